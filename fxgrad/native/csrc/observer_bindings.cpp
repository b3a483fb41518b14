#include "bindings.h"
#include "observer.h"

#include <torch/csrc/autograd/python_cpp_function.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace fxgrad {

void bind_observer(py::module_& module) {
  py::class_<Step>(module, "Step")
      .def_readonly("name", &Step::name)
      .def_readonly("grad_mode", &Step::grad_mode)
      .def_readonly("sources", &Step::sources)
      .def_readonly("outputs", &Step::outputs)
      .def_readonly("taken", &Step::taken)
      .def_readonly("given", &Step::given)
      .def("dtypes", [](const Step& step) {
        std::vector<at::ScalarType> found;
        for (const uint16_t output : step.outputs) found.push_back(static_cast<at::ScalarType>(output / 2));
        return found;
      });
  py::class_<Piece>(module, "Piece")
      .def(py::init([](int32_t edge, int32_t count, int32_t start, std::vector<int32_t> path, int32_t position, int32_t source) {
        return Piece{edge, count, start, std::move(path), position, source};
      }));
  py::class_<Gate>(module, "Gate")
      .def(py::init([](uint8_t kind, double low, double high, double near, std::optional<int64_t> axis) {
        return Gate{static_cast<Gate::Kind>(kind), low, high, near, axis};
      }));
  module.def("count_active", &count_active);
  py::class_<Model, std::shared_ptr<Model>>(module, "Model")
      .def(py::init<>())
      .def("set_parameters", &Model::set_parameters)
      .def("set_levels", &Model::set_levels)
      .def("set_gates", &Model::set_gates)
      .def("clear", [](Model& m) { m.courses = std::make_shared<Courses>(); })
      .def("__len__", [](const Model& m) { return m.courses->size(); });
  py::class_<Forward, std::shared_ptr<Forward>>(module, "Forward")
      .def(py::init<std::shared_ptr<Model>, std::shared_ptr<Record>, bool, bool>())
      .def("begin", &Forward::begin)
      .def("finish", &Forward::finish)
      .def("leave", &Forward::leave)
      .def("note", &Forward::note)
      .def("learn", &Forward::learn)
      .def_property_readonly("position", &Forward::position)
      .def_property_readonly("plan", &Forward::plan)
      .def_property_readonly("plan_nearby", &Forward::plan_nearby)
      .def_property_readonly("values", &Forward::values)
      .def("value_of", &Forward::value_of)
      .def("places", [](const Forward& forward) {
        py::list found;
        for (const Place& place : forward.places()) {
          if (place.node) {
            found.append(py::make_tuple(py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(place.node)), place.output));
          } else {
            found.append(py::none());
          }
        }
        return found;
      })
      .def("hook_edges", &Forward::hook_edges)
      .def_property_readonly("steps", [](const Forward& f) { return std::vector<Step>(f.steps()); })  // a course keeps them, not us
      .def_property_readonly("first_values", &Forward::first_values)
      .def_readonly("differs_at", &Forward::differs_at)
      .def_readonly("noted", &Forward::noted)
      .def_readonly("failed", &Forward::failed);
}

}  // namespace fxgrad

#include "bindings.h"
#include "follower.h"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace fxgrad {

namespace {

Follower& of(PyObject* self) { return **static_cast<std::shared_ptr<Follower>*>(PyCapsule_GetPointer(self, nullptr)); }

template <class F>
PyObject* guarded(F run) noexcept {
  try {
    return py::object(run()).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* enter(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return guarded([&]() -> py::object { of(self).enter(given, count); return py::none(); });
}

PyObject* leave(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return guarded([&]() -> py::object { of(self).leave(given, count); return py::none(); });
}

PyObject* function(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] {
    PyObject* const kwargs = count > 3 && given[3] != Py_None && PyDict_Size(given[3]) != 0 ? given[3] : nullptr;
    return of(self).function(given[0], given[1], given[2], kwargs);
  });
}

// Not by pybind11, which takes a microsecond a call: torch calls these for each module and function.
template <class F>
PyMethodDef method(const char* name, F run) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run)), METH_FASTCALL, nullptr};
}
PyMethodDef kEnter = method("enter", &enter), kLeave = method("leave", &leave), kFunction = method("function", &function);

py::tuple hooks(const std::shared_ptr<Follower>& follower) {
  const auto self = py::reinterpret_steal<py::object>(PyCapsule_New(
      new std::shared_ptr<Follower>(follower), nullptr,
      [](PyObject* capsule) { delete static_cast<std::shared_ptr<Follower>*>(PyCapsule_GetPointer(capsule, nullptr)); }));
  const auto made = [&](PyMethodDef& of) { return py::reinterpret_steal<py::object>(PyCFunction_New(&of, self.ptr())); };
  return py::make_tuple(made(kEnter), made(kLeave), made(kFunction));
}

}  // namespace

void bind_follower(py::module_& module) {
  py::class_<Ways, std::shared_ptr<Ways>>(module, "Ways")
      .def(py::init<const std::vector<std::pair<py::object, bool>>&, const std::vector<py::object>&, py::object, py::object,
                    py::object, const std::vector<py::object>&>())
      .def("set_hooked", &Ways::set_hooked)
      .def("__len__", &Ways::size);
  py::class_<Follower, std::shared_ptr<Follower>>(module, "Follower")
      .def(py::init<std::shared_ptr<Ways>, py::object, std::shared_ptr<Forward>>())
      .def("hooks", &hooks)
      .def("begin", &Follower::begin)
      .def("finish", &Follower::finish)
      .def("restore", &Follower::restore)
      .def("learn", &Follower::learn)
      .def("close", &Follower::close)
      .def("at", &Follower::position)
      .def_property_readonly("plan", &Follower::plan)
      .def_readwrite("mode", &Follower::mode);
}

}  // namespace fxgrad

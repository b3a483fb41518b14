// What every step asks of a model's registries and parameters, without the Python that asking takes.
#include "bindings.h"

#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace fxgrad {

namespace {

// Dictionaries of modules, parameters and buffers, and what was in them.
class Registries {
 public:
  explicit Registries(std::vector<std::pair<py::dict, py::tuple>> entries) : entries_(std::move(entries)) {}

  // Whether each holds the very objects that it held, in that order.
  bool unchanged() const {
    for (const auto& [registry, values] : entries_) {
      if (PyDict_Size(registry.ptr()) != PyTuple_GET_SIZE(values.ptr())) return false;
      PyObject *key = nullptr, *value = nullptr;
      Py_ssize_t at = 0, number = 0;
      while (PyDict_Next(registry.ptr(), &at, &key, &value) != 0) {
        if (value != PyTuple_GET_ITEM(values.ptr(), number++)) return false;
      }
    }
    return true;
  }

 private:
  std::vector<std::pair<py::dict, py::tuple>> entries_;
};

// Of each tensor, whether it requires a gradient; and whether a leaf that does has one.
std::pair<py::bytes, bool> look(const py::list& tensors) {
  std::string trained;
  bool has_gradient = false;
  for (const py::handle& item : tensors) {
    const at::Tensor& tensor = THPVariable_Unpack(item.ptr());
    const bool requires_grad = tensor.requires_grad();
    trained.push_back(requires_grad ? 1 : 0);
    has_gradient |= requires_grad && tensor.is_leaf() && tensor.grad().defined();
  }
  return {py::bytes(trained), has_gradient};
}

// How often the memory of each was changed in place, as 32-bit numbers; `listed` has tuples whose last item is the tensor.
py::bytes versions(const py::list& listed) {
  std::string found;
  found.reserve(listed.size() * sizeof(uint32_t));
  for (const py::handle& item : listed) {
    const at::Tensor& tensor = THPVariable_Unpack(PyTuple_GET_ITEM(item.ptr(), PyTuple_GET_SIZE(item.ptr()) - 1));
    const uint32_t version = tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
    found.append(reinterpret_cast<const char*>(&version), sizeof(version));
  }
  return py::bytes(found);
}

}  // namespace

void bind_looking(py::module_& module) {
  py::class_<Registries>(module, "Registries")
      .def(py::init<std::vector<std::pair<py::dict, py::tuple>>>())
      .def("unchanged", &Registries::unchanged);
  module.def("look", &look);
  module.def("versions", &versions);
}

}  // namespace fxgrad

// The reductions for Python: each takes a gradient and memory to write to, and makes no tensor.
#include "bindings.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>

#include "statistics.h"

namespace py = pybind11;

namespace fxgrad {

const char* variant();

namespace {

// A tensor whose memory may be read: none of a Python subclass, which may mean something else by it.
const at::Tensor* plain(py::handle object) {
  if (!THPVariable_CheckExact(object.ptr())) return nullptr;
  const at::Tensor& values = THPVariable_Unpack(object.ptr());
  return reducible(values) ? &values : nullptr;
}

const at::Tensor& values_of(py::handle object) {
  const at::Tensor* values = plain(object);
  if (!values) throw py::type_error("not a plain dense tensor of float32, float64, float16 or bfloat16 on the CPU");
  if (values->requires_grad() && at::GradMode::is_enabled()) {
    throw py::type_error("the gradient is being differentiated");
  }
  return *values;
}

double* slot_of(const at::Tensor& slot, int64_t entries) {
  const bool fits = slot.device().is_cpu() && slot.scalar_type() == at::kDouble && slot.is_contiguous();
  if (!fits || slot.numel() != entries) throw py::type_error("the slot is no float64 memory of the right size");
  return static_cast<double*>(slot.mutable_data_ptr());
}

void norm_into(py::handle gradient, const at::Tensor& slot) {
  const at::Tensor& values = values_of(gradient);
  const bool single = slot.scalar_type() == at::kFloat && slot.device().is_cpu() && slot.numel() == 1;
  if (single && values.scalar_type() == at::kDouble) throw py::type_error("a norm of doubles has a slot of a double");
  double* wide = single ? nullptr : slot_of(slot, 1);
  double norm;
  {
    py::gil_scoped_release released;
    norm = std::sqrt(norm_square(values));
  }
  if (single) {
    *static_cast<float*>(slot.mutable_data_ptr()) = static_cast<float>(norm);
  } else {
    *wide = norm;
  }
}

void full_into(py::handle gradient, const at::Tensor& row) {
  const at::Tensor& values = values_of(gradient);
  double* out = slot_of(row, kColumns);
  py::gil_scoped_release released;
  full(values, out);
}

// The same for a row in which squares are not scaled.
void full_of_singles_into(py::handle gradient, const at::Tensor& row) {
  if (values_of(gradient).scalar_type() == at::kDouble) throw py::type_error("squares of doubles are scaled");
  full_into(gradient, row);
}

// Of many tensors, each into its row of `rows`, shape (at least as many, 11).  By tensor, whether it was taken: those that
// `full_of_singles_into` takes are.
py::bytes full_of_all(const py::list& tensors, const at::Tensor& rows) {
  const auto size = static_cast<int64_t>(tensors.size());
  if (rows.dim() != 2 || rows.size(0) < size || rows.size(1) != kColumns || rows.scalar_type() != at::kDouble ||
      !rows.is_contiguous() || !rows.device().is_cpu()) {
    throw py::value_error("rows are wanted for all tensors, of 11 float64 each");
  }
  double* out = rows.data_ptr<double>();
  std::string taken(tensors.size(), '\0');
  std::vector<const at::Tensor*> plains(tensors.size(), nullptr);
  for (size_t n = 0; n < tensors.size(); n++) {
    const at::Tensor* const found = plain(PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(n)));
    if (found == nullptr || found->scalar_type() == at::kDouble) continue;
    plains[n] = found;
    taken[n] = 1;
  }
  {
    py::gil_scoped_release released;
    for (size_t n = 0; n < plains.size(); n++) {
      if (plains[n] != nullptr) full(*plains[n], out + n * kColumns);
    }
  }
  return py::bytes(taken);
}

void histogram_into(py::handle gradient, const at::Tensor& row, const at::Tensor& bins) {
  const at::Tensor& values = values_of(gradient);
  double* out = slot_of(row, kColumns);
  double* counts = slot_of(bins, kBins);
  int64_t counted[kBins];
  py::gil_scoped_release released;
  histogram(values, out, counted);
  for (int k = 0; k < kBins; ++k) counts[k] = static_cast<double>(counted[k]);
}

}  // namespace

void bind_statistics(py::module_& module) {
  module.def("variant", &variant, "Which loops are used: avx512, avx2 or default.");
  module.def("reducible", [](py::handle tensor) { return plain(tensor) != nullptr; },
             "Whether the other functions take a tensor.");
  const py::arg gradient("gradient"), out("out"), bins("bins");
  module.def("norm_into", &norm_into, "Write the l2 norm into a slot of one float32 or float64.", gradient, out);
  module.def("full_into", &full_into, "Write the scalars of level full into a row of 11 float64.", gradient, out);
  module.def("full_of_singles_into", &full_of_singles_into, "The same, but refuse float64.", gradient, out);
  module.def("full_of_all", &full_of_all, "The same of a list of tensors, into rows; which of them were taken.");
  module.def("histogram_into", &histogram_into, "The same as full_into, and the exponents into a row of 64 float64.",
             gradient, out, bins);
}

}  // namespace fxgrad

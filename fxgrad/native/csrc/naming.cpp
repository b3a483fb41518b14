// The values of a call: their names, and where they appear.
#include "follower.h"

#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

namespace py = pybind11;

namespace fxgrad {

namespace {

constexpr int kDepth = 8;  // as Python looks into containers

bool is_tensor(PyObject* value) { return THPVariable_Check(value); }

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

bool differentiable(const at::Tensor& tensor) {
  return at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type());
}

bool leaf_tensor(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return (meta == nullptr || !meta->grad_fn_) && tensor.is_leaf();
}

}  // namespace

const Follower::Known* Follower::known(PyObject* tensor) const {
  const auto found = values_.find(tensor);
  if (found == values_.end() || PyWeakref_GetObject(found->second.weak) != tensor) return nullptr;
  return &found->second;
}

bool Follower::lost(const Known& known, const at::Tensor& tensor) {
  return known.view && known.version != version_of(tensor);
}

// The name of a tensor that is taken; false where only the Python recorder can tell: a value that was made where no call
// could be seen, one of a region that runs again, a view that was changed.
bool Follower::ref(PyObject* object, std::vector<int32_t>& facts) const {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const Known* const found = known(object);
  facts.push_back(found == nullptr ? kNone : found->binding);
  if (found == nullptr) return !tensor.requires_grad() || ways_->owns(object);
  return !lost(*found, tensor) && (found->requires_grad || !tensor.requires_grad());
}

bool Follower::refs(PyObject* value, std::vector<int32_t>& facts, int depth) {
  if (is_tensor(value)) return ref(value, facts);
  if (value == Py_None || depth > kDepth || ways_->plain(value)) return true;
  bool fit = true;
  if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
    for (Py_ssize_t n = 0; n < PySequence_Fast_GET_SIZE(value); n++) {
      fit &= refs(PySequence_Fast_GET_ITEM(value, n), facts, depth + 1);
    }
  } else {
    for (const auto& found : ways_->flatten(value)) fit &= ref(py::tuple(py::reinterpret_borrow<py::object>(found))[1].ptr(), facts);
  }
  return fit;
}

bool Follower::refs_of_values(PyObject* kwargs, std::vector<int32_t>& facts) {
  bool fit = true;
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t at = 0;
  while (PyDict_Next(kwargs, &at, &key, &value) != 0) fit &= refs(value, facts);
  return fit;
}

// Whether a call has changed the view that it was given first.
bool Follower::changed_view(PyObject* args) const {
  if (PyTuple_GET_SIZE(args) == 0 || !is_tensor(PyTuple_GET_ITEM(args, 0))) return false;
  PyObject* const first = PyTuple_GET_ITEM(args, 0);
  const Known* const found = known(first);
  return found != nullptr && lost(*found, THPVariable_Unpack(first));
}

void Follower::tensors(PyObject* value, Tensors& found, std::vector<py::object>& held) {
  if (is_tensor(value)) {
    found.push_back({value, ways_->word("")});
    return;
  }
  if (value == Py_None || ways_->plain(value)) return;
  const bool sequence = PyTuple_CheckExact(value) || PyList_CheckExact(value);
  bool flat = sequence;
  for (Py_ssize_t n = 0; flat && n < PySequence_Fast_GET_SIZE(value); n++) {
    PyObject* const item = PySequence_Fast_GET_ITEM(value, n);
    flat = is_tensor(item) || item == Py_None || ways_->plain(item);
  }
  if (flat) {
    for (Py_ssize_t n = 0; n < PySequence_Fast_GET_SIZE(value); n++) {
      PyObject* const item = PySequence_Fast_GET_ITEM(value, n);
      if (is_tensor(item)) found.push_back({item, ways_->word("[" + std::to_string(n) + "]")});
    }
    return;
  }
  for (const auto& entry : ways_->flatten(value)) {
    const py::tuple pair = py::reinterpret_borrow<py::tuple>(entry);
    held.push_back(pair[1]);
    found.push_back({held.back().ptr(), ways_->word(pair[0].cast<std::string>())});
  }
}

void Follower::describe(const Tensors& found, std::vector<int32_t>& facts) {
  if (found.empty()) {
    facts.push_back(kNothing);
    return;
  }
  facts.push_back(at::GradMode::is_enabled() ? 1 : 0);
  for (const auto& [object, position] : found) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    facts.push_back(position);
    facts.push_back(static_cast<int32_t>(tensor.scalar_type()) * 2 + (tensor.requires_grad() ? 1 : 0));
  }
}

// Tensors have appeared, all of one call; `first`: the site at which what is happening began.  Where the way is known,
// those at which a rule acts are handed over; so are leaf tensors, whose one hook is that of the latest call.
void Follower::bind(const Tensors& found, int32_t first) {
  for (const auto& [object, position] : found) {
    const at::Tensor tensor = THPVariable_Unpack(object);
    const bool requires_grad = tensor.requires_grad() && at::GradMode::is_enabled();
    const int32_t site = differentiable(tensor) ? sites_++ : -1;
    if (!session_ && site >= 0 && forward_) forward_->note(tensor, site);
    if (!session_ && site >= 0 && requires_grad) {
      const bool hooked = ways_->at(mark_).hooked[static_cast<size_t>(site - first)] != 0;
      const bool unseen = forward_ && forward_->value_of(tensor) < 0;  // by any operator: Python observes it
      if (hooked || unseen || leaf_tensor(tensor)) owner_.attr("put")(py::handle(object), site);
    }
    PyObject* const weak = PyWeakref_NewRef(object, nullptr);
    if (weak == nullptr) throw py::error_already_set();
    const Known made{weak, static_cast<int32_t>(bindings_.size()), requires_grad, version_of(tensor), site, tensor.is_view()};
    const auto [place, fresh] = values_.emplace(object, made);
    if (!fresh) {
      Py_DECREF(place->second.weak);
      place->second = made;
    }
    bindings_.emplace_back(calls_, position);
  }
}

py::object Follower::named(const std::vector<int32_t>& facts) const {
  py::list found;
  for (const int32_t fact : facts) {
    if (fact == kNone) {
      found.append(py::none());
    } else {
      const auto& [call, position] = bindings_[static_cast<size_t>(fact)];
      found.append(py::make_tuple(call, ways_->text(position)));
    }
  }
  return found;
}

}  // namespace fxgrad

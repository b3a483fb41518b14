#include "record.h"

#include "bindings.h"
#include "statistics.h"
#include "unseen.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>

#include <algorithm>

namespace py = pybind11;

namespace fxgrad {

void Event::grow(size_t slots) {
  if (slots <= state.size()) return;
  state.resize(slots, 0);
  doubled.resize(slots, 0);
  squares.resize(slots, 0.0);
}

namespace {

// What the reductions take, or an undefined tensor: expanded and sliced gradients are copied.
at::Tensor reducible_form(const at::Tensor& gradient) {
  if (reducible(gradient)) return gradient;
  constexpr c10::DispatchKeySet strange({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                         c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
  if (gradient.layout() != at::kStrided || !gradient.device().is_cpu() || gradient.key_set().has_any(strange) ||
      gradient.is_non_overlapping_and_dense()) {
    return {};
  }
  at::NoGradGuard off;
  const c10::impl::ExcludeDispatchKeyGuard unseen(kModes);
  const at::Tensor copy = gradient.contiguous();
  return reducible(copy) ? copy : at::Tensor();
}

}  // namespace

bool Event::write(const at::Tensor& given, size_t slot, Level level) {
  const at::Tensor gradient = reducible_form(given);
  if (!gradient.defined()) return false;
  if (level == Level::norm) {
    squares[slot] = norm_square(gradient);
  } else {
    if (columns.size() < state.size() * kColumns) columns.resize(state.size() * kColumns);
    double* row = columns.data() + slot * kColumns;
    if (level == Level::full) {
      full(gradient, row);
    } else {
      if (bins.size() < state.size() * kBins) bins.resize(state.size() * kBins);
      histogram(gradient, row, bins.data() + slot * kBins);
    }
  }
  doubled[slot] = gradient.scalar_type() == at::kDouble;
  state[slot] = static_cast<uint8_t>(level);
  return true;
}

Record::~Record() {
  if (!Py_IsInitialized()) {
    owner_.release();
    return;
  }
  py::gil_scoped_acquire gil;
  owner_ = py::object();
}

size_t Shapes::add(at::IntArrayRef sizes) {
  sizes_.emplace_back(sizes);
  return sizes_.size() - 1;
}

void Shapes::set(size_t slot, at::IntArrayRef sizes) {
  if (slot >= sizes_.size()) sizes_.resize(slot + 1);
  sizes_[slot] = c10::DimVector(sizes);
}

Event* Record::event(int64_t task) {
  Event* now = current_.load();
  if (now != nullptr && now->task == task && now->open.load(std::memory_order_acquire)) return now;
  py::gil_scoped_acquire gil;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& known : events_) {
      if (known->task == task && known->open.load()) {
        current_.store(known.get());
        return known.get();
      }
    }
  }
  auto made = std::make_shared<Event>(task);
  made->grow(shapes->size());
  if (!owner_.attr("native_begins")(made).cast<bool>()) return nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back(made);
  current_.store(made.get());
  forget_closed();
  return made.get();
}

// Another thread may have read `current_` and not have looked at it yet: then closed events stay for now.  One that
// begins to after our look at `using_` reads the new `current_`.
void Record::forget_closed() {
  if (using_.load() > 1) return;
  events_.erase(std::remove_if(events_.begin(), events_.end(), [](const auto& e) { return !e->open.load(); }),
                events_.end());
}

Event* Record::again(int64_t task, size_t slot) {
  {
    py::gil_scoped_acquire gil;
    if (!owner_.attr("native_again")(slot).cast<bool>()) return nullptr;
  }
  return event(task);
}

namespace {

struct Use {
  explicit Use(std::atomic<int>& count) : count_(count) { count_.fetch_add(1); }
  ~Use() { count_.fetch_sub(1); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  std::atomic<int>& count_;
};

}  // namespace

void Record::observe(const at::Tensor& gradient, size_t slot, Level wanted) noexcept {
  if (!gradient.defined() || !on.load(std::memory_order_relaxed)) return;
  const Use use(using_);
  try {
    const int64_t task = torch::autograd::get_current_graph_task_id();
    Event* now = event(task);
    if (now == nullptr) return;
    if (slot >= now->state.size()) now->grow(std::max(shapes->size(), slot + 1));
    if (now->state[slot] != 0) {
      now = again(task, slot);
      if (now == nullptr) return;
    }
    if (gradient.requires_grad() && !now->differentiated) {
      now->differentiated = true;
      py::gil_scoped_acquire gil;
      owner_.attr("native_differentiated")();
    }
    if (!now->write(gradient, slot, wanted)) {
      py::gil_scoped_acquire gil;
      owner_.attr("native_takes")(slot, gradient);
    }
  } catch (py::error_already_set& error) {
    py::gil_scoped_acquire gil;
    failed(slot, error.what());
  } catch (const std::exception& error) {
    failed(slot, error.what());
  }
}

// The user's backward goes on; the event says why a statistic is missing.
void Record::failed(size_t slot, const char* what) noexcept {
  py::gil_scoped_acquire gil;
  try {
    owner_.attr("native_failed")(slot, what);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("fxgrad, telling why a statistic is missing");
  }
}

torch::autograd::variable_list SiteHook::operator()(const torch::autograd::variable_list& gradients) {
  if (output_ < gradients.size()) record_->observe(gradients[output_], slot_, level_);
  return gradients;
}

void LeafHooks::put(size_t slot, const at::Tensor& leaf, Level level) {
  auto hook = std::make_unique<SiteHook>(record_, slot, 0, level);
  if (slot >= put_.size()) put_.resize(slot + 1);
  put_[slot] = {hook.get(), level};
  auto& hooks = torch::autograd::impl::hooks(leaf);  // `add_hook` wants to be the only one
  hooks.insert(hooks.begin(), std::move(hook));      // before the user's, which may change the gradient
}

// For the slots that have had a hook put.
template <class F>
void LeafHooks::each(const py::list& leaves, F use) const {
  const size_t count = std::min(leaves.size(), put_.size());
  for (size_t slot = 0; slot < count; slot++) {
    PyObject* const leaf = PyList_GET_ITEM(leaves.ptr(), static_cast<Py_ssize_t>(slot));
    if (put_[slot].hook != nullptr && THPVariable_Check(leaf)) use(slot, THPVariable_Unpack(leaf));
  }
}

bool LeafHooks::there(size_t slot, const at::Tensor& leaf) const {
  const auto& hooks = torch::autograd::impl::hooks(leaf);
  const SiteHook* const ours = put_[slot].hook;
  return std::any_of(hooks.begin(), hooks.end(), [ours](const auto& h) { return h.get() == ours; });
}

std::vector<size_t> LeafHooks::lost(const py::list& leaves) const {
  std::vector<size_t> found;
  each(leaves, [&](size_t slot, const at::Tensor& leaf) {
    if (!there(slot, leaf)) found.push_back(slot);
  });
  return found;
}

void LeafHooks::mend(const py::list& leaves) {
  each(leaves, [&](size_t slot, const at::Tensor& leaf) {
    if (!there(slot, leaf)) put(slot, leaf, put_[slot].level);
  });
}

void LeafHooks::set_levels(const py::list& leaves, const std::vector<size_t>& raised, Level level) {
  mend(leaves);
  each(leaves, [&](size_t slot, const at::Tensor&) {
    Put& known = put_[slot];
    known.level = std::find(raised.begin(), raised.end(), slot) == raised.end() ? record_->level : level;
    known.hook->set_level(known.level);
  });
}

void LeafHooks::remove(size_t slot, const at::Tensor& leaf) {
  if (slot >= put_.size() || put_[slot].hook == nullptr) return;
  const SiteHook* const ours = put_[slot].hook;
  auto& hooks = torch::autograd::impl::hooks(leaf);
  hooks.erase(std::remove_if(hooks.begin(), hooks.end(), [ours](const auto& h) { return h.get() == ours; }), hooks.end());
  put_[slot] = Put();
}

void hook_value(const at::Tensor& value, const std::shared_ptr<Record>& record, size_t slot, Level level) {
  const auto& node = value.grad_fn();
  // In front of the user's, who may have put some on a value that is first seen where it is used.
  auto& hooks = node->tensor_pre_hooks();
  hooks.insert(hooks.begin(), std::make_unique<SiteHook>(record, slot, value.output_nr(), level));
}

namespace {

at::Tensor as_tensor(const void* data, size_t rows, size_t width, at::ScalarType type) {
  auto made = at::empty({static_cast<int64_t>(rows), static_cast<int64_t>(width)}, at::TensorOptions().dtype(type));
  if (rows != 0) std::memcpy(made.data_ptr(), data, rows * width * at::elementSize(type));
  return made;
}

}  // namespace

void bind_record(py::module_& module) {
  py::enum_<Level>(module, "Level")
      .value("none", Level::none)
      .value("norm", Level::norm)
      .value("full", Level::full)
      .value("histogram", Level::histogram);
  py::class_<Event, std::shared_ptr<Event>>(module, "Event")
      .def("close", [](Event& e) { e.open.store(false, std::memory_order_release); })
      .def_property_readonly("state", [](const Event& e) { return py::bytes(reinterpret_cast<const char*>(e.state.data()), e.state.size()); })
      .def_property_readonly("doubled", [](const Event& e) { return py::bytes(reinterpret_cast<const char*>(e.doubled.data()), e.doubled.size()); })
      .def_property_readonly("squares", [](const Event& e) { return as_tensor(e.squares.data(), e.squares.size(), 1, at::kDouble).view(-1); })
      .def_property_readonly("columns", [](const Event& e) { return as_tensor(e.columns.data(), e.columns.size() / kColumns, kColumns, at::kDouble); })
      .def_property_readonly("bins", [](const Event& e) { return as_tensor(e.bins.data(), e.bins.size() / kBins, kBins, at::kLong); });
  py::class_<Shapes, std::shared_ptr<Shapes>>(module, "Shapes")
      .def("add", [](Shapes& s, const std::vector<int64_t>& sizes) { return s.add(sizes); })
      .def("set", [](Shapes& s, size_t slot, const std::vector<int64_t>& sizes) { s.set(slot, sizes); })
      .def("at", &Shapes::at)
      .def("same_as", &Shapes::same_as)
      .def("__len__", &Shapes::size);
  py::class_<Record, std::shared_ptr<Record>>(module, "Record")
      .def(py::init<py::object, Level>())
      .def_readonly("shapes", &Record::shapes)
      .def_readonly("values", &Record::values)
      .def_property_readonly("units", [](const Record& r) {
        py::list found;
        for (const Units& one : r.units) found.append(py::make_tuple(one.slot, one.axis, one.active));
        return found;
      })
      .def("take_values", [](Record& r, Level level) { r.values = std::make_shared<Event>(-1); r.values_level = level; })
      .def("put", [](const std::shared_ptr<Record>& r, const at::Tensor& value, size_t slot, bool full) {
        r->shapes->set(slot, value.is_nested() ? at::IntArrayRef() : value.sizes());
        hook_value(value, r, slot, full ? std::max(r->level, Level::full) : r->level);
      })
      .def("observe", [](Record& r, const at::Tensor& g, size_t slot, Level level) { py::gil_scoped_release no; r.observe(g, slot, level); })
      .def_property("on", [](const Record& r) { return r.on.load(); }, [](Record& r, bool on) { r.on.store(on); });
  py::class_<LeafHooks, std::shared_ptr<LeafHooks>>(module, "LeafHooks")
      .def(py::init<std::shared_ptr<Record>>())
      .def("put", &LeafHooks::put)
      .def("mend", &LeafHooks::mend)
      .def("lost", &LeafHooks::lost)
      .def("set_levels", &LeafHooks::set_levels)
      .def("remove", &LeafHooks::remove);
}

}  // namespace fxgrad

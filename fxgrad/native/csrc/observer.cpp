#include "observer.h"

#include "listening.h"
#include "unseen.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace py = pybind11;

namespace fxgrad {

namespace {

template <class F>
void each_tensor(const c10::IValue& value, F use) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined()) use(tensor);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) {
      if (tensor.defined()) use(tensor);
    }
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) each_tensor(item, use);
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) each_tensor(item, use);
  }
}

}  // namespace

// ---- one forward call --------------------------------------------------------------------------------------------

Forward::Forward(std::shared_ptr<Model> model, std::shared_ptr<Record> record, bool learning, bool keeps_places)
    : model_(std::move(model)),
      courses_(model_->courses),
      parameters_(model_->parameters),
      record_(std::move(record)),
      learning_(learning),
      keeps_places_(keeps_places && !learning) {
  if (!model_->pool.empty()) {
    places_ = std::move(model_->pool.back());
    model_->pool.pop_back();
    places_.clear();
  }
}

void Forward::begin(const std::string& kind, const std::vector<at::Tensor>& inputs, py::object step, py::object leaf,
                    py::object value) {
  const auto given = [](py::object&& one) { return one.is_none() ? py::object() : std::move(one); };
  on_step = given(std::move(step));
  on_leaf = given(std::move(leaf));
  on_value = given(std::move(value));
  base_depth_ = listen(this);
  base_task_ = torch::autograd::get_current_graph_task_id();
  active_ = true;
  open(kind.c_str(), true);
  for (const auto& input : inputs) returned(input);
  close();
}

// They lead to who holds us: a circle that Python's collector does not see.
void Forward::forget_callbacks() { on_step = on_leaf = on_value = py::object(); }

void Forward::leave() {
  stop();
  at_.clear();  // they keep the graph
  forget_callbacks();
}

void Forward::stop() {
  if (!active_) return;
  active_ = false;
  unlisten(this);
  leaves_.clear();
  pending_.clear();
  plain_.clear();
  found_.clear();
  model_->pool.push_back(std::move(places_));
  places_ = Places();
}

void Forward::finish(const std::vector<at::Tensor>& outputs) {
  open("outputs", true);
  for (const auto& output : outputs) take(output);
  close();
  stop();
  forget_callbacks();
}

// Inside of an operator, of our own doing (whoever of us does it), or in a backward pass that the forward runs: what
// autograd and hooks call there is no call of the model's.
bool Forward::foreign() const {
  return depth_of_operators() != base_depth_ || of_our_own() || torch::autograd::get_current_graph_task_id() != base_task_;
}

// The user's forward goes on, whatever is wrong with the observer.
template <class F>
void Forward::guarded(F look) noexcept {
  if (!failed.empty()) return;
  try {
    look();
  } catch (py::error_already_set& error) {
    py::gil_scoped_acquire gil;
    fail(error.what());
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

void Forward::start(const at::RecordFunction& function) noexcept {
  if (!foreign()) guarded([&] { begins(function); });
}

void Forward::end(const at::RecordFunction& function) noexcept {
  if (!foreign()) guarded([&] { ends(function); });
}

void Forward::begins(const at::RecordFunction& function) {
  open(function.name(), at::GradMode::is_enabled());
  for (const auto& input : function.inputs()) {
    each_tensor(input, [this](const at::Tensor& tensor) { take(tensor); });
  }
  if (differs_at < 0 && !learning_) {
    begun_ = courses_->begun(node_, step_.name.c_str(), step_.grad_mode, step_.sources);
    if (begun_ < 0) differ();
  }
  hook_discovered(begun_);  // before the operator changes it in place
  tell();
}

// Python is told of a step while the operator runs, so that it sees from where that was called.
void Forward::tell() {
  if (told_ || !writes_steps() || !on_step) return;
  told_ = true;
  py::gil_scoped_acquire gil;
  on_step(step_.name);
}

void Forward::fail(const char* what) noexcept { failed = *what == 0 ? "?" : what; }

void Forward::ends(const at::RecordFunction& function) {
  for (const auto& output : function.outputs()) {
    each_tensor(output, [this](const at::Tensor& tensor) { returned(tensor); });
  }
  close();
}

void Forward::open(const char* name, bool grad_mode) {
  step_.name = name;
  step_.grad_mode = grad_mode;
  step_.sources.clear();
  step_.taken.clear();
  step_.given.clear();
  step_.outputs.clear();
  found_.clear();
  first_ = values_;
  begun_ = -1;
  told_ = false;
}

// The step is complete: it is the known one, or the first that differs.
void Forward::close() {
  if (differs_at < 0 && !learning_) {
    if (begun_ < 0) begun_ = courses_->begun(node_, step_.name.c_str(), step_.grad_mode, step_.sources);
    const int32_t known = begun_ < 0 ? -1 : courses_->ended(begun_, step_);
    if (known < 0) {
      differ();
    } else {
      node_ = known;
    }
  }
  hook_discovered(node_);
  tell();
  if (writes_steps()) {
    steps_.push_back(step_);
    first_values_.push_back(first_);
  }
  count_++;
}

void Forward::differ() {
  differs_at = count_;
  begun_ = -1;
}

int32_t Forward::find(const at::Tensor& tensor) const {
  const auto& node = tensor.grad_fn();
  if (node) return places_.find(node.get(), tensor.output_nr());
  const auto parameter = parameters_->find(tensor.unsafeGetTensorImpl());
  if (parameter != parameters_->end()) return parameter->second;
  for (const auto& [leaf, number] : leaves_) {
    if (leaf.is_same(tensor)) return number;
  }
  return -1;
}

void Forward::take(const at::Tensor& tensor) {
  const int32_t from = source(tensor);
  step_.sources.push_back(from);
  step_.taken.push_back(from == kNoGradient ? find_plain(tensor) : from == kExternal ? values_ - 1 : from);
}

int32_t Forward::find_plain(const at::Tensor& tensor) const {
  const auto* const wanted = tensor.unsafeGetTensorImpl();
  const auto found = std::find_if(plain_.rbegin(), plain_.rend(),
                                  [&](const auto& one) { return one.first._unsafe_get_target() == wanted; });
  return found == plain_.rend() ? -1 : found->second;
}

// Where a tensor that an operator takes comes from; the first use of an external value gives it a number.
int32_t Forward::source(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return kNoGradient;
  const int32_t known = find(tensor);
  if (known != -1) return known;
  discover(tensor);
  return kExternal;
}

void Forward::returned(const at::Tensor& tensor) {
  const bool requires_grad = tensor.requires_grad();
  step_.outputs.push_back(static_cast<uint16_t>(static_cast<int>(tensor.scalar_type()) * 2 + (requires_grad ? 1 : 0)));
  int32_t number = -1;
  if (requires_grad && step_.grad_mode) {
    number = find(tensor);
    if (number == -1) {
      discover(tensor);
      number = values_ - 1;
    }
  } else if (at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type())) {
    number_plain(tensor);
    number = values_ - 1;
  }
  step_.given.push_back(number);
}

// A value without a gradient has a number too: its shape is told, and perhaps its statistics.
void Forward::number_plain(const at::Tensor& tensor) {
  const int32_t number = values_++;
  plain_.emplace_back(tensor.getIntrusivePtr(), number);
  if (keeps_places_) at_.emplace_back();
  if (!learning_ && record_->values) found_.push_back({tensor, number, false});
  record_->shapes->add(tensor.is_nested() ? at::IntArrayRef() : tensor.sizes());
}

void Forward::discover(const at::Tensor& tensor) {
  const int32_t number = values_++;
  const auto& node = tensor.grad_fn();
  if (node) {
    places_.put(node.get(), tensor.output_nr(), number);
  } else {
    leaves_.emplace_back(tensor, number);
  }
  if (keeps_places_) at_.push_back({node ? node : torch::autograd::impl::gradient_edge(tensor).function,
                                      node ? static_cast<uint32_t>(tensor.output_nr()) : 0u});
  record_->shapes->add(tensor.is_nested() ? at::IntArrayRef() : tensor.sizes());
  for (const Pending& early : pending_) {
    const bool same = node ? early.place.node == node && early.place.output == tensor.output_nr() : early.leaf.is_same(tensor);
    if (same) noted.emplace_back(number, early.site);
  }
  if (!learning_) found_.push_back({tensor, number, true});
}

// Puts the hooks of the values that were discovered in the step that is `node`.
void Forward::hook_discovered(int32_t node) {
  for (const Found& found : found_) hook(found, node);
  found_.clear();
}

void Forward::hook(const Found& found, int32_t node) {
  uint8_t wanted = static_cast<uint8_t>(record_->level) | kTake;
  const Gate* gate = nullptr;
  if (differs_at < 0) {
    const auto& known = courses_->at(node);
    const auto within = static_cast<size_t>(found.number - first_);
    wanted = within < known.levels.size() ? known.levels[within] : 0;
    const auto gated = known.gates.find(static_cast<int32_t>(within));
    if (gated != known.gates.end()) gate = &gated->second;
  }
  const auto level = static_cast<Level>(wanted & kLevel);
  if (level != Level::none && found.differentiable) put(found, level);
  // Behind the hook: what Python puts on the value comes after ours, as the user's own hooks do.
  if (record_->values && (wanted & (kTake | kShow)) != 0) measure(found, wanted, gate);
}

void Forward::put(const Found& found, Level level) {
  if (found.tensor.grad_fn()) {
    hook_value(found.tensor, record_, static_cast<size_t>(found.number), level);
  } else if (on_leaf) {
    py::gil_scoped_acquire gil;
    on_leaf(found.tensor, found.number);
  }
}

// Takes the statistics of a value, and shows it to Python where that is wanted or the loops in C++ do not take it.
void Forward::measure(const Found& found, uint8_t wanted, const Gate* gate) {
  const OfOurOwn own;
  bool shown = (wanted & kShow) != 0;
  if ((wanted & kTake) != 0) {
    record_->values->grow(static_cast<size_t>(found.number) + 1);
    shown |= !record_->values->write(found.tensor, static_cast<size_t>(found.number), record_->values_level);
  }
  if (gate != nullptr) {
    at::NoGradGuard off;
    const c10::impl::ExcludeDispatchKeyGuard unseen(kModes);
    at::Tensor active = count_active(found.tensor, *gate);
    shown |= !active.defined();
    if (active.defined()) record_->units.push_back({found.number, gate->dimension(found.tensor.dim()), std::move(active)});
  }
  if (shown && on_value) {
    py::gil_scoped_acquire gil;
    try {
      // An alias: the value has no Python object yet, and torch is to make the one that the user gets.
      on_value(found.tensor.detach(), found.number);
    } catch (py::error_already_set& error) {
      fail(error.what());
    }
  }
}

// ---- learning ----------------------------------------------------------------------------------------------------

void Forward::note(const at::Tensor& value, int64_t site) {
  guarded([&] { note_known(value, site); });
}

void Forward::note_known(const at::Tensor& value, int64_t site) {
  int32_t known = -1;
  if (value.requires_grad() && at::GradMode::is_enabled()) {
    known = find(value);
  } else {
    known = find_plain(value);
    if (known < 0) return;
  }
  if (known != -1) {
    noted.emplace_back(known, site);
  } else {
    const auto& node = value.grad_fn();
    pending_.push_back({node ? at::Tensor() : value, {node, static_cast<uint32_t>(value.output_nr())}, site});
  }
}

int32_t Forward::value_of(const at::Tensor& tensor) const { return tensor.requires_grad() ? find(tensor) : -1; }

int32_t Forward::learn(int32_t plan) { return model_->add(steps_, first_values_, values_, plan); }

std::vector<int32_t> Forward::hook_edges(const std::vector<Piece>& pieces, int32_t count, const std::set<int32_t>& raised,
                                         const std::map<int32_t, at::Tensor>& parameters) {
  Where where{at_, {}};
  for (const auto& [number, parameter] : parameters) {
    const auto edge = torch::autograd::impl::gradient_edge(parameter);
    where.parameters[number] = {edge.function, edge.input_nr};
  }
  for (int32_t n = 0; n < count; n++) record_->shapes->add({});
  for (const Piece& piece : pieces) {  // an edge's part has its source's shape
    const auto slot = static_cast<size_t>(values_ + piece.edge);
    if (piece.source < 0) {
      record_->shapes->set(slot, parameters.at(piece.source).sizes());
    } else {
      const auto source = record_->shapes->at(static_cast<size_t>(piece.source));
      record_->shapes->set(slot, source);
    }
  }
  auto missing = fxgrad::hook_edges(pieces, where, record_, static_cast<size_t>(values_), raised);
  at_.clear();
  return missing;
}

int32_t Forward::plan_nearby() const {
  int32_t node = node_;
  while (courses_->at(node).plan < 0) node = courses_->at(node).next.at(0);
  return courses_->at(node).plan;
}

int32_t Forward::plan() const { return differs_at >= 0 ? -1 : courses_->at(node_).plan; }

}  // namespace fxgrad

#include "follower.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <pythread.h>

namespace py = pybind11;

namespace fxgrad {

namespace {

bool is_tensor(PyObject* value) { return THPVariable_Check(value); }

bool transformed() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

}  // namespace

Follower::Follower(std::shared_ptr<Ways> ways, py::object owner, std::shared_ptr<Forward> forward)
    : ways_(std::move(ways)), forward_(std::move(forward)), owner_(std::move(owner)), thread_(PyThread_get_thread_ident()) {}

Follower::~Follower() {
  for (const auto& [tensor, known] : values_) Py_XDECREF(known.weak);
}

// ---- following and noting ----------------------------------------------------------------------------------------

// Whether autograd nodes were made that no call made: what cannot be seen may use any value.
bool Follower::hidden() const { return forward_ && !session_ && sequence_ != at::sequence_number::peek(); }

void Follower::called_now() { sequence_ = at::sequence_number::peek(); }

bool Follower::follows(const Happening& happening, bool fit) {
  const int32_t next = fit ? ways_->find(mark_, happening) : -1;
  if (next < 0) {
    take_over();
    return false;
  }
  mark_ = next;
  return true;
}

// The Python recorder goes on from here.
void Follower::take_over() {
  py::list stack, values;
  for (const auto& [place, mark] : stack_) {
    stack.append(py::make_tuple(place, place < 0 ? py::list() : named(ways_->at(mark).happening.facts)));
  }
  for (const auto& [object, known] : values_) {
    PyObject* const tensor = PyWeakref_GetObject(known.weak);
    if (tensor != object) continue;
    const auto& [call, position] = bindings_[static_cast<size_t>(known.binding)];
    values.append(py::make_tuple(py::handle(tensor), call, ways_->text(position), known.requires_grad, known.version,
                                 known.site, known.view));
  }
  const Mark& mark = ways_->at(mark_);
  session_ = owner_.attr("hand_over")(mark.plan, mark.calls, mark.spans, stack, inside_, values);
  session_.attr("_sequence") = sequence_;
}

// Something that the Python recorder sees; `fit`: whether a way may hold it.
void Follower::note(Happening happening, bool fit) {
  stopped_ |= !fit;
  if (stopped_) return;
  Mark mark;
  mark.happening = std::move(happening);
  mark.site = sites_;
  noted_.push_back(std::move(mark));
}

// The latest thing that was noted has happened; the Python recorder has to have counted the same.
void Follower::counted() {
  if (stopped_ || noted_.empty()) return;
  const bool alike = PyObject_Length(session_.attr("calls").ptr()) == calls_;
  Mark& mark = noted_.back();
  mark.calls = calls_;
  mark.spans = spans_;
  mark.hooked.assign(static_cast<size_t>(sites_ - mark.site), 0);
  if (!alike) {
    stopped_ = true;
    noted_.pop_back();
  }
}

bool Follower::learn(int32_t plan) {
  const int32_t before = ways_->size();
  int32_t parent = mark_;
  for (Mark& mark : noted_) {
    mark.plan = plan;
    parent = ways_->add(parent, mark);
  }
  return ways_->size() != before;
}

py::object Follower::delegate(const char* method, PyObject* const* given, Py_ssize_t count) {
  const py::object bound = session_.attr(method);
  PyObject* const result = PyObject_Vectorcall(bound.ptr(), given, static_cast<size_t>(count), nullptr);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// ---- what happens ------------------------------------------------------------------------------------------------

void Follower::begin(const std::vector<std::pair<std::string, py::object>>& inputs) {
  Happening happening{What::inputs, {}, -1, {}};
  Tensors found;
  for (const auto& [word, tensor] : inputs) found.push_back({tensor.ptr(), ways_->word(word)});
  describe(found, happening.facts);
  if (!follows(happening, true)) {
    session_.attr("begin")();
    note(std::move(happening), true);
  }
  const int32_t first = sites_;
  for (const auto& [tensor, word] : found) {  // each is a call of its own
    bind({{tensor, ways_->word("")}}, first);
    calls_++;
  }
  if (session_) counted();
  called_now();
}

void Follower::finish(py::handle result) {
  Happening happening{What::outputs, {}, -1, {}};
  const bool fit = refs(result.ptr(), happening.facts) && !hidden();
  if (session_ || !follows(happening, fit)) {
    session_.attr("finish")(result);
    note(std::move(happening), fit);
    calls_++;
    spans_++;
    counted();
  }
}

// Lets go of Python, whose objects lead back here.
void Follower::close() {
  restore();
  forward_.reset();
  owner_ = session_ = mode = py::object();
}

void Follower::restore() {
  if (!off_) return;
  at::impl::PythonTorchFunctionTLS::push_onto_stack(off_);
  off_.reset();
}

// Inside of a leaf module functions are no calls of the graph's, so torch need not ask our mode.
void Follower::leaf_begins() {
  inside_ = 1;
  using Modes = at::impl::PythonTorchFunctionTLS;
  const int64_t count = Modes::stack_len();
  if (session_ || count == 0 || Modes::get_stack_at(count - 1)->ptr(getPyInterpreter()) != mode.ptr()) return;
  off_ = Modes::pop_stack();
}

// Where only the Python recorder can go on: something that no way holds.
void Follower::stop() {
  if (!session_) take_over();
  stopped_ = true;
}

void Follower::enter(PyObject* const* given, Py_ssize_t count) {
  if (PyThread_get_thread_ident() != thread_) return;
  if (running_ != 0 && !stopped_) stop();  // a module that a function calls
  if (stopped_) {
    delegate("_enter_module", given, count);
    return;
  }
  if (inside_ != 0) {
    inside_++;
    if (session_) delegate("_enter_module", given, count);
    return;
  }
  Happening happening{What::enters, {}, ways_->place_of(given[0]), {}};
  const int32_t place = happening.place;
  bool fit = place < 0 || refs(given[1], happening.facts);
  if (place >= 0 && ways_->leaf(place)) fit &= !hidden();
  if (session_ || !follows(happening, fit)) {
    delegate("_enter_module", given, count);
    note(std::move(happening), fit);
    counted();
  }
  stack_.push_back({place, mark_});
  if (place >= 0 && ways_->leaf(place)) leaf_begins();
}

void Follower::leave(PyObject* const* given, Py_ssize_t count) {
  if (PyThread_get_thread_ident() != thread_) return;
  if (running_ != 0 && !stopped_) stop();
  if (stopped_ || stack_.empty()) {
    if (session_) delegate("_leave_module", given, count);
    return;
  }
  if (inside_ > 1) {
    inside_--;
    if (session_) delegate("_leave_module", given, count);
    return;
  }
  restore();
  const bool leaf = inside_ == 1;
  leaf ? left_leaf(given, count) : left(given, count);
}

// A module whose own calls are in the graph.
void Follower::left(PyObject* const* given, Py_ssize_t count) {
  const int32_t place = stack_.back().place;
  Happening happening{place < 0 ? What::leaves : What::returned, {}, place, {}};
  const bool fit = place < 0 || refs(given[count - 1], happening.facts);
  const bool known = !session_ && follows(happening, fit);
  if (!known) {
    delegate("_leave_module", given, count);
    note(std::move(happening), fit);
  }
  stack_.pop_back();
  spans_ += place < 0 ? 0 : 1;
  if (!known) counted();
}

void Follower::left_leaf(PyObject* const* given, Py_ssize_t count) {
  const Open top = stack_.back();
  PyObject* const result = given[count - 1];
  Tensors found;
  std::vector<py::object> held;
  tensors(result, found, held);
  Happening happening{What::leaves, {}, top.place, {}};
  bool fit = !changed_view(given[1]);
  if (!found.empty() && count > 3) fit &= refs_of_values(given[2], happening.facts);
  happening.facts.push_back(kBehind);
  describe(found, happening.facts);
  if (!at::GradMode::is_enabled()) {  // such a view is none of a known call when it is looked up next
    for (const auto& one : found) fit &= !THPVariable_Unpack(one.tensor).requires_grad();
  }
  const bool known = !session_ && follows(happening, fit);
  if (!known) {
    delegate("_leave_module", given, count);
    note(std::move(happening), fit);
  }
  inside_ = 0;
  stack_.pop_back();
  bind(found, sites_);
  called_now();
  calls_ += found.empty() ? 0 : 1;
  if (!known) counted();
  told(top, result);
}

// What a leaf module returned, by name.
void Follower::told(Open top, PyObject* result) {
  Happening happening{What::returned, {}, top.place, {}};
  const bool fit = refs(result, happening.facts);
  const bool noting = static_cast<bool>(session_);  // the Python recorder was told with the call
  const bool known = !noting && follows(happening, fit);
  if (!known && !noting) session_.attr("returned")(top.place, named(ways_->at(top.mark).happening.facts), py::handle(result));
  if (!known) note(std::move(happening), fit);
  spans_++;
  if (!known) counted();
}

py::object Follower::function(PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs) {
  PyObject* const given[] = {func, types, args, kwargs == nullptr ? Py_None : kwargs};
  if (stopped_) return delegate("__torch_function__", given, 4);
  if (inside_ == 0 && !ways_->metadata(func)) {
    if (transformed()) {
      stop();
      return delegate("__torch_function__", given, 4);
    }
    Happening happening{What::begins, py::reinterpret_borrow<py::object>(func), -1, {}};
    bool fit = refs(args, happening.facts) && !hidden();
    if (kwargs != nullptr) fit &= refs_of_values(kwargs, happening.facts);
    if (!session_ && follows(happening, fit)) return followed(func, args, kwargs);
    note(std::move(happening), fit);
    counted();
    return noted(given);
  }
  return session_ ? delegate("__torch_function__", given, 4) : called(func, args, kwargs);
}

py::object Follower::called(PyObject* func, PyObject* args, PyObject* kwargs) {
  PyObject* const result = PyObject_Call(func, args, kwargs);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

namespace {
struct Counting {
  explicit Counting(int& of) : count(of) { count++; }
  ~Counting() { count--; }
  int& count;
};
}  // namespace

// A function that the way knows, with the values that it takes.
py::object Follower::followed(PyObject* func, PyObject* args, PyObject* kwargs) {
  py::object result;
  {
    Counting one(running_);
    result = called(func, args, kwargs);
  }
  Tensors found;
  std::vector<py::object> held;
  Happening happening = ends(func, args, result.ptr(), found, held);
  bool known = !session_;  // else a module was called meanwhile
  if (known) {
    known = follows(happening, !changed_view(args));
  }
  if (!known) {
    const py::object names = named(ways_->at(mark_).happening.facts);
    session_.attr("written")(py::handle(func), names, py::handle(args), kwargs == nullptr ? py::dict() : py::reinterpret_borrow<py::dict>(kwargs), result);
    note(std::move(happening), !changed_view(args));
  }
  bind(found, sites_);
  called_now();
  calls_ += found.empty() ? 0 : 1;
  if (!known) counted();
  return result;
}

// One that the Python recorder writes down.
py::object Follower::noted(PyObject* const* given) {
  py::object result;
  try {
    Counting one(running_);
    result = delegate("__torch_function__", given, 4);
  } catch (py::error_already_set&) {
    stopped_ = true;
    throw;
  }
  if (stopped_) return result;
  Tensors found;
  std::vector<py::object> held;
  note(ends(given[0], given[2], result.ptr(), found, held), !changed_view(given[2]));
  bind(found, sites_);
  calls_ += found.empty() ? 0 : 1;
  counted();
  return result;
}

Happening Follower::ends(PyObject* func, PyObject* args, PyObject* result, Tensors& found, std::vector<py::object>& held) {
  Happening happening{What::ends, {}, -1, {}};
  if (is_tensor(result) || PyTuple_Check(result) || PyList_Check(result)) {
    tensors(result, found, held);
  } else if (ways_->writes_item(func)) {
    found.push_back({PyTuple_GET_ITEM(args, 0), ways_->word("")});
  }
  describe(found, happening.facts);
  return happening;
}

}  // namespace fxgrad

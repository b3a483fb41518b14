// One forward call that is followed along the known ways: what it does is compared as it happens, before it happens where
// that can be, and tensors at which a rule acts are handed to Python.
//
// At the first difference the Python recorder takes over for the rest of the call, from the state that the known way gives
// it: it has missed nothing.  What it sees from there on is noted, to be known the next time.
#pragma once

#include "observer.h"
#include "ways.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <tuple>
#include <vector>

namespace fxgrad {

class Follower {
 public:
  // `owner`: its `hand_over(mark, stack, inside, values)` makes the Python recorder of the rest; `put(tensor, site)` puts
  // a rule's hook.
  // `forward`, where there is one, observes the call, and is told which site each value is.
  Follower(std::shared_ptr<Ways> ways, pybind11::object owner, std::shared_ptr<Forward> forward);
  ~Follower();
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;

  void begin(const std::vector<std::pair<std::string, pybind11::object>>& inputs);
  void finish(pybind11::handle result);
  void restore();  // the torch function mode, if the forward ended inside of a leaf module
  bool learn(int32_t plan);  // what the Python recorder saw; whether that was new
  std::tuple<int32_t, int32_t, int32_t> position() const {  // a plan, and how many of its calls and module calls there were
    const Mark& mark = ways_->at(mark_);
    return {mark.plan, mark.calls, mark.spans};
  }
  int32_t plan() const { return session_ ? -1 : ways_->at(mark_).plan; }

  // In place of module hooks and of `__torch_function__`.
  void enter(PyObject* const* given, Py_ssize_t count);
  void leave(PyObject* const* given, Py_ssize_t count);
  pybind11::object function(PyObject* func, PyObject* types, PyObject* args, PyObject* kwargs);
  void close();

  pybind11::object mode;  // the torch function mode that leads here; it is off inside of leaf modules

 private:
  struct Known {
    PyObject* weak;
    int32_t binding;
    bool requires_grad;
    uint32_t version;
    int32_t site;
    bool view;
  };
  struct Open {
    int32_t place;
    int32_t mark;
  };
  struct Returned {
    PyObject* tensor;  // borrowed
    int32_t position;
  };
  using Tensors = std::vector<Returned>;

  const Known* known(PyObject* tensor) const;
  static bool lost(const Known& known, const at::Tensor& tensor);
  bool ref(PyObject* tensor, std::vector<int32_t>& facts) const;
  bool refs(PyObject* value, std::vector<int32_t>& facts, int depth = 0);
  bool refs_of_values(PyObject* kwargs, std::vector<int32_t>& facts);
  bool changed_view(PyObject* args) const;
  void tensors(PyObject* value, Tensors& found, std::vector<pybind11::object>& held);
  static void describe(const Tensors& found, std::vector<int32_t>& facts);
  void bind(const Tensors& found, int32_t first);

  bool hidden() const;
  void called_now();
  bool follows(const Happening& happening, bool fit);
  void take_over();
  void note(Happening happening, bool fit);
  void counted();
  void stop();
  void left(PyObject* const* given, Py_ssize_t count);
  void left_leaf(PyObject* const* given, Py_ssize_t count);
  void told(Open top, PyObject* result);
  pybind11::object called(PyObject* func, PyObject* args, PyObject* kwargs);
  pybind11::object followed(PyObject* func, PyObject* args, PyObject* kwargs);
  pybind11::object noted(PyObject* const* given);
  Happening ends(PyObject* func, PyObject* args, PyObject* result, Tensors& found, std::vector<pybind11::object>& held);
  pybind11::object named(const std::vector<int32_t>& facts) const;
  pybind11::object delegate(const char* method, PyObject* const* given, Py_ssize_t count);
  void leaf_begins();

  std::shared_ptr<Ways> ways_;
  std::shared_ptr<Forward> forward_;
  pybind11::object owner_, session_;
  unsigned long thread_;
  int32_t mark_ = 0, calls_ = 0, spans_ = 0, sites_ = 0;
  int inside_ = 0, running_ = 0;
  uint64_t sequence_ = 0;  // of autograd, when the latest call had returned
  bool stopped_ = false;  // noting, since something happened that no way holds
  std::vector<Open> stack_;
  std::unordered_map<PyObject*, Known> values_;
  std::vector<std::pair<int32_t, int32_t>> bindings_;  // call and position
  std::vector<Mark> noted_;
  std::shared_ptr<c10::SafePyObject> off_;  // the mode while it is off
};

}  // namespace fxgrad

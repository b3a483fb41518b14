// The known ways of a model's forward, as the Python recorder writes them down: a tree of what happens, one mark each.
//
// Other than a course, a way knows the functions and modules themselves, so that a call which follows it to the end has
// the very nodes, names and sites that the Python recorder would have found.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace fxgrad {

// What happens: arguments come, a function begins and ends, a module is entered and left, what a module call returned is
// told, the model returns.
enum class What : uint8_t { inputs, begins, ends, enters, leaves, returned, outputs };

struct Happening {
  What what;
  pybind11::object function;    // that begins
  int32_t place = -1;           // of the module; -1: one that has no path
  std::vector<int32_t> facts;   // all else that names and sites depend on
  bool same_as(const Happening& other) const;
};

struct Mark {
  Happening happening;
  int32_t plan = -1;   // one that has this mark
  int32_t calls = 0;   // of the graph, so far
  int32_t spans = 0;   // module calls that have returned, so far
  int32_t site = 0;    // the number of the first site that appears here
  std::vector<uint8_t> hooked;  // by tensor that appears here: whether a rule acts on it
  std::vector<int32_t> next;
};

constexpr int32_t kNone = -1;       // a tensor without a name
constexpr int32_t kBehind = -2;     // what a module call returned stands behind what it took by name
constexpr int32_t kNothing = -3;    // it returned no tensor

// Changed with the GIL held only; a call keeps the tree that it began with.
class Ways {
 public:
  // `modules`: module, and whether it is a leaf, in the order of their numbers; `tensors`: parameters and buffers.
  // `flatten` lists the tensors in a value with their positions; `is_metadata` knows functions that make no node.
  Ways(const std::vector<std::pair<pybind11::object, bool>>& modules, const std::vector<pybind11::object>& tensors,
       pybind11::object flatten, pybind11::object is_metadata, pybind11::object writes_item,
       const std::vector<pybind11::object>& plain);
  ~Ways();
  Ways(const Ways&) = delete;
  Ways& operator=(const Ways&) = delete;

  int32_t find(int32_t mark, const Happening& happening) const;
  int32_t add(int32_t parent, const Mark& mark);
  // At which sites of a plan a rule acts; `all`: at any.
  void set_hooked(int32_t plan, const std::unordered_set<int32_t>& sites, bool all);
  Mark& at(int32_t mark) { return marks_[static_cast<size_t>(mark)]; }
  int32_t size() const { return static_cast<int32_t>(marks_.size()); }

  int32_t place_of(PyObject* module) const;
  bool leaf(int32_t place) const { return places_[static_cast<size_t>(place)].second; }
  bool owns(PyObject* tensor) const { return tensors_.count(tensor) != 0; }
  bool plain(PyObject* value) const { return plain_.count(Py_TYPE(value)) != 0; }
  bool metadata(PyObject* function);
  bool writes_item(PyObject* function) const { return function == writes_item_.ptr(); }
  pybind11::list flatten(PyObject* value) const { return flatten_(pybind11::handle(value)); }
  int32_t word(const std::string& text);
  const std::string& text(int32_t word) const { return texts_[static_cast<size_t>(word)]; }

 private:
  std::vector<Mark> marks_;
  std::vector<std::pair<PyObject*, bool>> places_;  // weak references
  std::unordered_map<PyObject*, int32_t> numbers_;
  std::unordered_set<PyObject*> tensors_;           // held by the model's map
  std::unordered_set<PyTypeObject*> plain_;
  pybind11::object flatten_, is_metadata_, writes_item_;
  pybind11::dict metadata_;
  std::unordered_map<std::string, int32_t> words_;
  std::vector<std::string> texts_;
};

}  // namespace fxgrad

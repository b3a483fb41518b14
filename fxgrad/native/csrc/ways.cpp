#include "ways.h"

namespace py = pybind11;

namespace fxgrad {

bool Happening::same_as(const Happening& other) const {
  if (what != other.what || place != other.place || facts != other.facts) return false;
  if (function.ptr() == other.function.ptr()) return true;
  if (!function || !other.function) return false;
  const int same = PyObject_RichCompareBool(function.ptr(), other.function.ptr(), Py_EQ);  // `Tensor.T.__get__` is made anew
  if (same < 0) throw py::error_already_set();
  return same == 1;
}

Ways::Ways(const std::vector<std::pair<py::object, bool>>& modules, const std::vector<py::object>& tensors,
           py::object flatten, py::object is_metadata, py::object writes_item, const std::vector<py::object>& plain)
    : flatten_(std::move(flatten)), is_metadata_(std::move(is_metadata)), writes_item_(std::move(writes_item)) {
  marks_.emplace_back();
  for (const auto& [module, leaf] : modules) {
    PyObject* weak = PyWeakref_NewRef(module.ptr(), nullptr);
    if (weak == nullptr) throw py::error_already_set();
    numbers_.emplace(module.ptr(), static_cast<int32_t>(places_.size()));
    places_.emplace_back(weak, leaf);
  }
  for (const auto& tensor : tensors) tensors_.insert(tensor.ptr());
  for (const auto& type : plain) plain_.insert(reinterpret_cast<PyTypeObject*>(type.ptr()));
  word("");
}

Ways::~Ways() {
  for (const auto& place : places_) Py_XDECREF(place.first);
}

int32_t Ways::find(int32_t mark, const Happening& happening) const {
  for (const int32_t next : marks_[static_cast<size_t>(mark)].next) {
    if (marks_[static_cast<size_t>(next)].happening.same_as(happening)) return next;
  }
  return -1;
}

int32_t Ways::add(int32_t parent, const Mark& mark) {
  const int32_t found = find(parent, mark.happening);
  if (found >= 0) return found;
  marks_.push_back(mark);
  at(parent).next.push_back(size() - 1);
  return size() - 1;
}

void Ways::set_hooked(int32_t plan, const std::unordered_set<int32_t>& sites, bool all) {
  for (Mark& mark : marks_) {
    if (mark.plan != plan) continue;
    for (size_t n = 0; n < mark.hooked.size(); n++) {
      mark.hooked[n] = all || sites.count(mark.site + static_cast<int32_t>(n)) != 0 ? 1 : 0;
    }
  }
}

// A module's number; -1 for one that came later, and for one whose place in memory another has now.
int32_t Ways::place_of(PyObject* module) const {
  const auto found = numbers_.find(module);
  if (found == numbers_.end()) return -1;
  return PyWeakref_GetObject(places_[static_cast<size_t>(found->second)].first) == module ? found->second : -1;
}

bool Ways::metadata(PyObject* function) {
  PyObject* known = PyDict_GetItemWithError(metadata_.ptr(), function);
  if (known == nullptr) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    const py::object answer = is_metadata_(py::handle(function));
    metadata_[py::handle(function)] = answer;
    return answer.ptr() == Py_True;
  }
  return known == Py_True;
}

int32_t Ways::word(const std::string& text) {
  const auto found = words_.find(text);
  if (found != words_.end()) return found->second;
  const auto number = static_cast<int32_t>(texts_.size());
  words_.emplace(text, number);
  texts_.push_back(text);
  return number;
}

}  // namespace fxgrad

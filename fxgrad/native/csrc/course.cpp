#include "course.h"

#include <algorithm>
#include <cstring>

namespace fxgrad {

bool Step::begins_like(const char* other, bool mode, const std::vector<int32_t>& from) const {
  return grad_mode == mode && sources == from && std::strcmp(name.c_str(), other) == 0;
}

int32_t Courses::begun(int32_t node, const char* name, bool mode, const std::vector<int32_t>& sources) const {
  for (const int32_t next : at(node).next) {
    if (at(next).step.begins_like(name, mode, sources)) return next;
  }
  return -1;
}

int32_t Courses::ended(int32_t begun, const Step& ended) const {
  const Node& first = at(begun);
  if (first.step.returned_like(ended)) return begun;
  for (const int32_t next : at(first.parent).next) {
    const Step& step = at(next).step;
    if (step.returned_like(ended) && step.begins_like(first.step.name.c_str(), first.step.grad_mode, first.step.sources)) {
      return next;
    }
  }
  return -1;
}

int32_t Courses::child(int32_t node, const Step& step) const {
  const int32_t found = begun(node, step.name.c_str(), step.grad_mode, step.sources);
  return found < 0 ? -1 : ended(found, step);
}

int32_t Courses::add(const std::vector<Step>& steps, std::vector<int32_t> first_values, int32_t values, int32_t plan) {
  first_values.push_back(values);
  int32_t node = 0;
  for (size_t n = 0; n < steps.size(); n++) {
    int32_t next = child(node, steps[n]);
    if (next < 0) {
      next = static_cast<int32_t>(nodes_.size());
      Node made;
      made.step = steps[n];
      made.parent = node;
      made.first_value = first_values[n];
      made.levels.assign(static_cast<size_t>(first_values[n + 1] - first_values[n]), 0);
      nodes_.push_back(std::move(made));
      nodes_[static_cast<size_t>(node)].next.push_back(next);
    }
    node = next;
  }
  Node& last = nodes_[static_cast<size_t>(node)];
  if (last.plan < 0) {
    last.plan = plan;
    ends_[plan] = node;
  }
  return last.plan;
}

void Courses::clear_levels() {
  for (Node& node : nodes_) std::fill(node.levels.begin(), node.levels.end(), uint8_t{0});
}

void Courses::set_gates(int32_t plan, const std::map<int32_t, Gate>& gates) {
  const auto end = ends_.find(plan);
  if (end == ends_.end()) return;
  for (int32_t node = end->second; node > 0; node = at(node).parent) {
    Node& step = nodes_[static_cast<size_t>(node)];
    for (size_t n = 0; n < step.levels.size(); n++) {
      const auto found = gates.find(step.first_value + static_cast<int32_t>(n));
      if (found != gates.end()) step.gates.insert_or_assign(static_cast<int32_t>(n), found->second);
    }
  }
}

void Courses::set_levels(int32_t plan, const std::map<int32_t, uint8_t>& levels) {
  const auto end = ends_.find(plan);
  if (end == ends_.end()) return;
  for (int32_t node = end->second; node > 0; node = at(node).parent) {
    Node& step = nodes_[static_cast<size_t>(node)];
    for (size_t n = 0; n < step.levels.size(); n++) {
      const auto wanted = levels.find(step.first_value + static_cast<int32_t>(n));
      if (wanted == levels.end()) continue;
      const uint8_t level = std::max<uint8_t>(step.levels[n] & kLevel, wanted->second & kLevel);
      step.levels[n] = static_cast<uint8_t>(level | ((step.levels[n] | wanted->second) & (kTake | kShow)));
    }
  }
}

}  // namespace fxgrad

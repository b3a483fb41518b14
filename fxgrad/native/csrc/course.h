// The known courses of a model's forward: sequences of operators, as a tree.
//
// A step of a course is one operator that Python called: its name, whether gradients were on, where each of its tensors
// comes from, and what it returned.  Values are numbered in the order in which they appear.
#pragma once

#include "units.h"

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace fxgrad {

// Where a tensor that an operator takes comes from: a value's number, or one of these; parameters below `kParameters`.
constexpr int32_t kNoGradient = -1;  // requires none
constexpr int32_t kExternal = -2;    // made where no operator could be seen; it gets the next number here
constexpr int32_t kParameters = -16;

// What is wanted of a value besides a hook: its own statistics; to be shown to Python.
constexpr uint8_t kTake = 4, kShow = 8, kLevel = 3;

struct Step {
  std::string name;
  bool grad_mode = true;
  std::vector<int32_t> sources;
  std::vector<uint16_t> outputs;  // of each tensor returned: dtype * 2 + requires grad
  std::vector<int32_t> taken;     // by tensor taken, the number of the value (or parameter) that it is; -1 for what has none
  std::vector<int32_t> given;     // the same by tensor returned

  bool returned_like(const Step& other) const { return outputs == other.outputs && given == other.given; }
  bool begins_like(const char* other, bool mode, const std::vector<int32_t>& from) const;
};

class Courses {
 public:
  struct Node {
    Step step;
    int32_t parent = -1;
    int32_t plan = -1;       // of the course that ends here
    int32_t first_value = 0; // the number of the first value that appears in this step
    std::vector<uint8_t> levels;  // by value of this step: the `Level` of its hook (0: none), and what follows
    std::map<int32_t, Gate> gates;  // by value of this step, where its active units are counted
    std::vector<int32_t> next;
  };

  Courses() { nodes_.emplace_back(); }
  const Node& at(int32_t node) const { return nodes_[static_cast<size_t>(node)]; }
  size_t size() const { return nodes_.size(); }

  // The step behind `node` that begins so, and among those the one that returned the same; -1 where there is none.
  int32_t begun(int32_t node, const char* name, bool mode, const std::vector<int32_t>& sources) const;
  int32_t ended(int32_t begun, const Step& step) const;

  // Adds a course of so many `values`; `first_values` counts those that appeared before each step.  The plan that ends there: `plan`, or an
  // earlier one that ran the very same steps.
  int32_t add(const std::vector<Step>& steps, std::vector<int32_t> first_values, int32_t values, int32_t plan);
  void clear_levels();
  // What the values of a plan's course get; where courses share a step, it gets what any of them wants.
  void set_levels(int32_t plan, const std::map<int32_t, uint8_t>& levels);
  void set_gates(int32_t plan, const std::map<int32_t, Gate>& gates);

 private:
  int32_t child(int32_t node, const Step& step) const;
  std::vector<Node> nodes_;
  std::map<int32_t, int32_t> ends_;  // by plan, its last step
};

}  // namespace fxgrad

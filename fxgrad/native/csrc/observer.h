// Sees each operator that Python calls while a forward runs, proves that it is the one of a known course, and puts hooks
// on what it returns.
#pragma once

#include "course.h"
#include "edges.h"
#include "record.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/node.h>

#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fxgrad {

// Values by where they are in the autograd graph: node and output number.  A node's address may be used again when it
// was freed; its sequence number is not.
class Places {
 public:
  Places() = default;
  int32_t find(const torch::autograd::Node* node, uint32_t output) const;  // -1: unknown
  void put(const torch::autograd::Node* node, uint32_t output, int32_t value);
  void clear();

 private:
  struct Slot {
    const torch::autograd::Node* node = nullptr;
    uint32_t output = 0;
    int32_t value = -1;
    uint64_t sequence = 0;
    uint32_t round = 0;
  };
  size_t position(const torch::autograd::Node* node, uint32_t output) const;
  std::vector<Slot> slots_;
  size_t count_ = 0;
  uint32_t round_ = 1;
};

using Parameters = std::unordered_map<const c10::TensorImpl*, int32_t>;

// What stays the same from one forward call of a model to the next.  Changed with the GIL held, and never in place: a
// call reads what it began with, whatever other threads do.
struct Model {
  std::shared_ptr<const Courses> courses = std::make_shared<Courses>();
  std::shared_ptr<const Parameters> parameters = std::make_shared<Parameters>();
  std::vector<Places> pool;
  void set_parameters(const std::vector<at::Tensor>& tensors);
  int32_t add(const std::vector<Step>& steps, const std::vector<int32_t>& first_values, int32_t values, int32_t plan);
  void set_levels(const std::map<int32_t, std::map<int32_t, uint8_t>>& levels);  // of every plan
  void set_gates(int32_t plan, const std::map<int32_t, Gate>& gates);  // by value
};

// One forward call.  `learning`: the Python recorder runs beside it, whose sites are noted; otherwise hooks are put.
class Forward {
 public:
  Forward(std::shared_ptr<Model> model, std::shared_ptr<Record> record, bool learning, bool keeps_places);
  ~Forward() { leave(); }
  Forward(const Forward&) = delete;
  Forward& operator=(const Forward&) = delete;

  // `kind` names the inputs; the callbacks may be None.
  void begin(const std::string& kind, const std::vector<at::Tensor>& inputs, pybind11::object on_step,
             pybind11::object on_leaf, pybind11::object on_value);
  void finish(const std::vector<at::Tensor>& outputs);
  void leave();  // also after an error; nothing of the call is kept behind this

  void note(const at::Tensor& value, int64_t site);  // while learning
  int64_t position() const { return static_cast<int64_t>(steps_.size()); }
  int32_t learn(int32_t plan);
  int32_t plan() const;
  int32_t plan_nearby() const;  // one whose course began as this one did
  int32_t value_of(const at::Tensor& tensor) const;
  const std::vector<Place>& places() const { return at_; }
  std::vector<int32_t> hook_edges(const std::vector<Piece>& pieces, int32_t count, const std::set<int32_t>& raised,
                                  const std::map<int32_t, at::Tensor>& parameters);
  int32_t values() const { return values_; }

  // An operator begins and ends in this thread, in whatever way.
  void start(const at::RecordFunction& function) noexcept;
  void end(const at::RecordFunction& function) noexcept;
  int depth() const { return base_depth_; }  // of operators, where the model's own are

  void fail(const char* what) noexcept;  // an error of ours: nothing more is looked at

  std::string failed;  // the first error
  int64_t differs_at = -1;  // the step at which the call left all known courses
  std::vector<std::pair<int32_t, int64_t>> noted;  // value and site
  pybind11::object on_step;  // told of each step from the first difference on, and while learning
  pybind11::object on_value;  // shown a value where Python has to look at it
  pybind11::object on_leaf;  // puts a hook on a leaf tensor that is no parameter
  const std::vector<Step>& steps() const { return steps_; }
  const std::vector<int32_t>& first_values() const { return first_values_; }

 private:
  template <class F>
  void guarded(F look) noexcept;
  void begins(const at::RecordFunction& function);
  void ends(const at::RecordFunction& function);
  void note_known(const at::Tensor& value, int64_t site);
  bool writes_steps() const { return learning_ || differs_at >= 0; }
  int32_t find(const at::Tensor& tensor) const;
  int32_t find_plain(const at::Tensor& tensor) const;
  void take(const at::Tensor& tensor);
  int32_t source(const at::Tensor& tensor);
  void discover(const at::Tensor& tensor);
  void number_plain(const at::Tensor& tensor);
  void returned(const at::Tensor& tensor);
  void hook_discovered(int32_t node);
  struct Found {
    at::Tensor tensor;
    int32_t number;
    bool differentiable;
  };
  void hook(const Found& found, int32_t node);
  void put(const Found& found, Level level);
  void measure(const Found& found, uint8_t wanted, const Gate* gate);
  void open(const char* name, bool grad_mode);
  void close();
  void differ();
  void tell();

  std::shared_ptr<Model> model_;
  std::shared_ptr<const Courses> courses_;
  std::shared_ptr<const Parameters> parameters_;
  std::shared_ptr<Record> record_;
  bool learning_, keeps_places_;
  bool active_ = false;
  bool told_ = false;
  int base_depth_ = 0;
  int base_task_ = -1;
  bool foreign() const;
  void stop();
  void forget_callbacks();
  int32_t node_ = 0;   // of the tree: the last step
  int32_t begun_ = -1; // the step that is running
  int32_t values_ = 0; // so far
  int32_t first_ = 0;  // of this step
  int64_t count_ = 0;
  Step step_;          // the one that is running; its memory is used again
  Places places_;
  std::vector<std::pair<at::Tensor, int32_t>> leaves_;  // that are no parameters
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::TensorImpl>, int32_t>> plain_;  // without a gradient
  std::vector<Place> at_;  // by value, where edges are measured
  std::vector<Step> steps_;
  std::vector<int32_t> first_values_;
  struct Pending {
    at::Tensor leaf;  // undefined for a value that has a place
    Place place;      // the value as it was, which the same tensor may not be any more
    int64_t site;
  };
  std::vector<Pending> pending_;  // noted before their first use
  std::vector<Found> found_;  // in this step, and not hooked yet
};

}  // namespace fxgrad

// What C++ hooks write: the statistics of the gradients of one forward call, by backward event.
//
// A slot is a value of the forward call.  Writing takes no lock and no GIL; Python is asked when a backward pass begins,
// and for every gradient that the reductions do not take.
#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/DimVector.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace fxgrad {

enum class Level : uint8_t { none = 0, norm = 1, full = 2, histogram = 3 };

// The active entries of an activation's output, by unit, which lie along `axis`.
struct Units {
  int32_t slot;
  int64_t axis;
  at::Tensor active;
};

// One run of the backward pass through one owner.
struct Event {
  explicit Event(int64_t task_) : task(task_) {}

  const int64_t task;
  std::atomic<bool> open{true};
  bool differentiated = false;
  std::vector<uint8_t> state;    // by slot: the `Level` that was written
  std::vector<uint8_t> doubled;  // by slot: float64, whose squares are scaled at level `full`
  std::vector<double> squares;   // by slot: the sum of squares, at level `norm`
  std::vector<double> columns;   // kColumns a slot, from level `full` on
  std::vector<int64_t> bins;     // kBins a slot, at level `histogram`

  void grow(size_t slots);
  bool write(const at::Tensor& gradient, size_t slot, Level level);
};

// The sizes of the values behind the slots.
class Shapes {
 public:
  size_t add(at::IntArrayRef sizes);  // a new slot; its number
  void set(size_t slot, at::IntArrayRef sizes);
  std::vector<int64_t> at(size_t slot) const { return {sizes_.at(slot).begin(), sizes_.at(slot).end()}; }
  size_t size() const { return sizes_.size(); }
  bool same_as(const Shapes& other) const { return sizes_ == other.sizes_; }

 private:
  std::vector<c10::DimVector> sizes_;
};

// Whose slots they are: a forward call, or the parameters.
//
// `owner` is the Python object that stands for it; its `native_begins(event)` is called when a backward pass begins (and
// says whether it is to be recorded), `native_takes(slot, gradient)` with what is left to Python, `native_again(slot)` for
// a second gradient in one pass (true: a new event), `native_differentiated()` where a pass is itself differentiated,
// `native_failed(slot, what)` where a statistic could not be written.
class Record {
 public:
  Record(pybind11::object owner, Level level) : level(level), owner_(std::move(owner)) {}
  ~Record();
  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;

  // Never throws: the user's backward pass goes on, whatever the gradient is.
  void observe(const at::Tensor& gradient, size_t slot, Level level) noexcept;

  const Level level;
  const std::shared_ptr<Shapes> shapes = std::make_shared<Shapes>();
  std::shared_ptr<Event> values;  // of the forward call itself; none where they are not asked for
  Level values_level = Level::none;
  std::vector<Units> units;  // of activations, taken with the values
  std::atomic<bool> on{true};

 private:
  Event* event(int64_t task);
  Event* again(int64_t task, size_t slot);
  void forget_closed();
  void failed(size_t slot, const char* what) noexcept;

  std::atomic<int> using_{0};  // threads that may hold an event
  std::atomic<Event*> current_{nullptr};
  std::mutex mutex_;  // taken with the GIL held, never the other way round
  std::vector<std::shared_ptr<Event>> events_;
  pybind11::object owner_;
};

// The hook of one value: sees what arrives at its autograd node for it, before any hook of the user's.
class SiteHook : public torch::autograd::FunctionPreHook {
 public:
  SiteHook(std::shared_ptr<Record> record, size_t slot, size_t output, Level level)
      : record_(std::move(record)), slot_(slot), output_(output), level_(level) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override;
  // Compiled autograd asks; there the Python recorder is chosen before a forward begins, so that nothing is lost.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}
  void set_level(Level level) { level_ = level; }

 private:
  std::shared_ptr<Record> record_;
  size_t slot_, output_;
  Level level_;
};

// The hooks on leaf tensors; they stay until they are taken off.  No reference to a tensor is kept, not even a weak one:
// torch refuses to swap what such a reference points to.  Whoever calls says which tensor a slot's is now.
class LeafHooks {
 public:
  explicit LeafHooks(std::shared_ptr<Record> record) : record_(std::move(record)) {}
  ~LeafHooks() { record_->on.store(false); }
  void put(size_t slot, const at::Tensor& leaf, Level level);
  // `leaves`: by slot, its tensor; None for a slot without a hook.
  void mend(const pybind11::list& leaves);  // put back what torch cleared, as it does at a tensor's first Python hook
  std::vector<size_t> lost(const pybind11::list& leaves) const;  // slots whose hook torch cleared
  void set_levels(const pybind11::list& leaves, const std::vector<size_t>& raised, Level level);  // others: the record's
  void remove(size_t slot, const at::Tensor& leaf);

 private:
  struct Put {
    SiteHook* hook = nullptr;  // none: the slot has no hook
    Level level = Level::none;
  };
  bool there(size_t slot, const at::Tensor& leaf) const;
  template <class F>
  void each(const pybind11::list& leaves, F use) const;
  std::shared_ptr<Record> record_;
  std::vector<Put> put_;  // by slot
};

// Puts a hook for `slot` on the node of a value that is no leaf.
void hook_value(const at::Tensor& value, const std::shared_ptr<Record>& record, size_t slot, Level level);

}  // namespace fxgrad

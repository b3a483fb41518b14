#include "observer.h"

#include <algorithm>

using torch::autograd::Node;

namespace fxgrad {

// ---- values by place ---------------------------------------------------------------------------------------------

size_t Places::position(const Node* node, uint32_t output) const {
  const size_t mask = slots_.size() - 1;
  size_t at = ((reinterpret_cast<uintptr_t>(node) >> 4) * 0x9E3779B97F4A7C15ull + output * 0x85EBCA6Bull) & mask;
  while (slots_[at].round == round_ && (slots_[at].node != node || slots_[at].output != output)) at = (at + 1) & mask;
  return at;
}

int32_t Places::find(const Node* node, uint32_t output) const {
  if (slots_.empty()) return -1;
  const Slot& slot = slots_[position(node, output)];
  return slot.round == round_ && slot.sequence == node->sequence_nr() ? slot.value : -1;
}

void Places::put(const Node* node, uint32_t output, int32_t value) {
  if (count_ * 2 >= slots_.size()) {
    std::vector<Slot> old(std::max<size_t>(slots_.size() * 2, 512));
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.round == round_) slots_[position(slot.node, slot.output)] = slot;
    }
  }
  Slot& slot = slots_[position(node, output)];
  count_ += slot.round != round_;
  slot = {node, output, value, node->sequence_nr(), round_};
}

void Places::clear() {
  count_ = 0;
  round_++;
}

// ---- what stays ------------------------------------------------------------------------------------------------

void Model::set_parameters(const std::vector<at::Tensor>& tensors) {
  auto made = std::make_shared<Parameters>();
  int32_t number = 0;
  for (const auto& tensor : tensors) made->emplace(tensor.unsafeGetTensorImpl(), kParameters - number++);
  parameters = made;
}

int32_t Model::add(const std::vector<Step>& steps, const std::vector<int32_t>& first_values, int32_t values,
                   int32_t plan) {
  auto made = std::make_shared<Courses>(*courses);
  const int32_t found = made->add(steps, first_values, values, plan);
  courses = made;
  return found;
}

void Model::set_gates(int32_t plan, const std::map<int32_t, Gate>& gates) {
  auto made = std::make_shared<Courses>(*courses);
  made->set_gates(plan, gates);
  courses = made;
}

void Model::set_levels(const std::map<int32_t, std::map<int32_t, uint8_t>>& levels) {
  auto made = std::make_shared<Courses>(*courses);
  made->clear_levels();
  for (const auto& [plan, wanted] : levels) made->set_levels(plan, wanted);
  courses = made;
}

}  // namespace fxgrad

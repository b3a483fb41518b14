#include "edges.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace fxgrad {

torch::autograd::variable_list EdgeHook::operator()(const torch::autograd::variable_list& passed,
                                                    const torch::autograd::variable_list&) {
  if (static_cast<size_t>(position_) < passed.size()) take(passed[static_cast<size_t>(position_)]);
  return passed;
}

void EdgeHook::take(const at::Tensor& gradient) noexcept {
  if (!pieces_) {
    record_->observe(gradient, slot_, level_);
    return;
  }
  const int64_t task = torch::autograd::get_current_graph_task_id();
  if (pieces_->task != task || pieces_->missing == 0) *pieces_ = {task, count_, {}};
  pieces_->missing--;
  if (gradient.defined()) pieces_->arrived.push_back(gradient);
  if (pieces_->missing != 0 || pieces_->arrived.empty()) return;
  const std::vector<at::Tensor> arrived = std::move(pieces_->arrived);
  pieces_->arrived.clear();
  try {
    at::NoGradGuard off;
    record_->observe(arrived.size() == 1 ? arrived[0] : at::stack(arrived).sum(0), slot_, level_);
  } catch (const std::exception& error) {
    TORCH_WARN_ONCE("fxgrad could not add the pieces of an edge: ", error.what());
  }
}

std::vector<int32_t> hook_edges(const std::vector<Piece>& pieces, const Where& where,
                                const std::shared_ptr<Record>& record, size_t first, const std::set<int32_t>& raised) {
  std::vector<int32_t> missing;
  std::map<int32_t, std::shared_ptr<Pieces>> several;
  for (const Piece& piece : pieces) {
    auto node = where.of(piece.start).node;
    for (const int32_t step : piece.path) {
      if (!node || static_cast<uint32_t>(step) >= node->num_outputs()) {
        node = {};
        break;
      }
      node = node->next_edge(static_cast<size_t>(step)).function;
    }
    const Place& source = where.of(piece.source);
    const auto position = static_cast<uint32_t>(piece.position);
    if (!node || position >= node->num_outputs() || node->next_edge(position).function != source.node ||
        node->next_edge(position).input_nr != source.output) {
      missing.push_back(piece.edge);
      continue;
    }
    if (piece.count > 1 && !several[piece.edge]) several[piece.edge] = std::make_shared<Pieces>();
    const Level level = raised.count(piece.edge) ? std::max(record->level, Level::full) : record->level;
    node->add_post_hook(std::make_unique<EdgeHook>(record, first + static_cast<size_t>(piece.edge), piece,
                                                   piece.count > 1 ? several[piece.edge] : nullptr, level));
  }
  return missing;
}

}  // namespace fxgrad

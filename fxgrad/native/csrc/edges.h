// The part of a value's gradient that one consumer sends back: a hook on the consumer's autograd node.
#pragma once

#include "record.h"

#include <torch/csrc/autograd/node.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

namespace fxgrad {

// One edge of the autograd graph: the node that is reached from that of value `start` over `path` (input numbers) has,
// as its input number `position`, value `source`.
struct Piece {
  int32_t edge;
  int32_t count;  // pieces that make up the edge's part
  int32_t start;
  std::vector<int32_t> path;
  int32_t position;
  int32_t source;
};

// What several pieces of one edge add up to.
struct Pieces {
  int64_t task = -1;
  int32_t missing = 0;
  std::vector<at::Tensor> arrived;
};

class EdgeHook : public torch::autograd::FunctionPostHook {
 public:
  EdgeHook(std::shared_ptr<Record> record, size_t slot, const Piece& piece, std::shared_ptr<Pieces> pieces, Level level)
      : record_(std::move(record)), slot_(slot), position_(piece.position), count_(piece.count),
        pieces_(std::move(pieces)), level_(level) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& passed,
                                            const torch::autograd::variable_list& received) override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  void take(const at::Tensor& gradient) noexcept;

  std::shared_ptr<Record> record_;
  size_t slot_;
  int32_t position_, count_;
  std::shared_ptr<Pieces> pieces_;
  Level level_;
};

using NodePointer = std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())>;

// Where a value is in the autograd graph.
struct Place {
  NodePointer node;
  uint32_t output = 0;
};

// Where the values of a forward call are: by number, and those that are parameters by theirs.
struct Where {
  const std::vector<Place>& values;
  std::map<int32_t, Place> parameters;

  const Place& of(int32_t value) const {
    return value < 0 ? parameters.at(value) : values.at(static_cast<size_t>(value));
  }
};

// Puts the hooks; slot `first + edge` is that of an edge, and the edges in `raised` are measured at `full` at least.  The
// edges that are not there.
std::vector<int32_t> hook_edges(const std::vector<Piece>& pieces, const Where& where,
                                const std::shared_ptr<Record>& record, size_t first, const std::set<int32_t>& raised);

}  // namespace fxgrad

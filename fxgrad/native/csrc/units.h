// Which units of an activation are active: what `fxgrad.capture.activations` counts in plain torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace fxgrad {

// How the inactive entries of an activation's output are told, and where its units lie.
struct Gate {
  enum Kind : uint8_t { limits, just_below_zero, exact_zero };
  Kind kind;
  double low, high;           // inactive at or below, at or above; NaN for none
  double near;                // of `just_below_zero`: so far below, -0.0 included
  std::optional<int64_t> axis;  // negative: from the end; none: dimension 1 of four or more, else the last

  int64_t dimension(int64_t dimensions) const;
};

// By unit, how many entries are active: int32, shape (units,).  Undefined where the memory of the value cannot be walked:
// no plain dense tensor of fp32, fp64, fp16 or bf16 on the CPU, or no dimension at all.  A NaN is active.
at::Tensor count_active(const at::Tensor& value, const Gate& gate);

}  // namespace fxgrad

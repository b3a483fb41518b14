#include "units.h"

#include "statistics.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

namespace fxgrad {

int64_t Gate::dimension(int64_t dimensions) const {
  if (!axis) return dimensions >= 4 ? 1 : dimensions - 1;  // (batch, channel, height, width)
  const int64_t found = *axis + (*axis < 0 ? dimensions : 0);
  return found >= 0 && found < dimensions ? found : dimensions - 1;
}

namespace {

// Memory as (outer, units, inner), whatever the order of the dimensions in it.
struct Walk {
  int64_t outer = 1, units = 1, inner = 1;

  Walk(const at::Tensor& value, int64_t axis) {
    std::vector<int64_t> order(static_cast<size_t>(value.dim()));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return value.stride(a) > value.stride(b); });
    units = value.size(axis);
    bool behind = false;
    for (const int64_t dimension : order) {
      if (dimension == axis) {
        behind = true;
      } else {
        (behind ? inner : outer) *= value.size(dimension);
      }
    }
  }
};

template <class T, class Inactive>
void walk(const Walk& shape, const T* values, int32_t* active, Inactive inactive) {
  for (int64_t o = 0; o < shape.outer; o++) {
    if (shape.inner == 1) {
      for (int64_t u = 0; u < shape.units; u++) active[u] += !inactive(values[u]);
    } else {
      for (int64_t u = 0; u < shape.units; u++) {
        const T* const row = values + u * shape.inner;
        int32_t count = 0;
        for (int64_t n = 0; n < shape.inner; n++) count += !inactive(row[n]);
        active[u] += count;
      }
    }
    values += shape.units * shape.inner;
  }
}

template <class T>
using Bits = std::conditional_t<sizeof(T) == 8, int64_t, std::conditional_t<sizeof(T) == 4, int32_t, int16_t>>;

template <class T>
void count(const Walk& shape, const void* values, int32_t* active, const Gate& gate) {
  const T* const typed = static_cast<const T*>(values);
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  if (gate.kind == Gate::limits) {  // as torch compares with a number: in the value's own dtype
    const auto low = static_cast<Wide>(static_cast<T>(gate.low)), high = static_cast<Wide>(static_cast<T>(gate.high));
    walk(shape, typed, active, [low, high](T v) {
      const auto wide = static_cast<Wide>(v);
      return (wide <= low) | (wide >= high);
    });
  } else if (gate.kind == Gate::just_below_zero) {
    // As integers, the bits of negative numbers grow with -value.
    const T near = static_cast<T>(-gate.near);
    Bits<T> limit;
    std::memcpy(&limit, &near, sizeof(limit));
    walk(shape, static_cast<const Bits<T>*>(values), active, [limit](Bits<T> v) { return v <= limit; });
  } else {
    walk(shape, typed, active, [](T v) { return static_cast<Wide>(v) == 0; });
  }
}

}  // namespace

at::Tensor count_active(const at::Tensor& value, const Gate& gate) {
  if (value.dim() == 0 || !reducible(value)) return {};
  const Walk shape(value, gate.dimension(value.dim()));
  at::Tensor active = at::zeros({shape.units}, at::TensorOptions().dtype(at::kInt));
  if (value.numel() == 0) return active;
  int32_t* const counts = active.mutable_data_ptr<int32_t>();
  const void* const memory = value.const_data_ptr();
  switch (value.scalar_type()) {
    case at::kFloat: count<float>(shape, memory, counts, gate); break;
    case at::kDouble: count<double>(shape, memory, counts, gate); break;
    case at::kHalf: count<c10::Half>(shape, memory, counts, gate); break;
    default: count<c10::BFloat16>(shape, memory, counts, gate); break;
  }
  return active;
}

}  // namespace fxgrad

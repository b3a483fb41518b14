#include "statistics.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "kernels.h"

namespace fxgrad {
namespace {

constexpr int64_t kChunk = int64_t{1} << 18;     // entries that are reduced by themselves, whatever the threads
constexpr int64_t kParallel = int64_t{1} << 20;  // entries from which on several threads are worth starting
constexpr double kScales[3] = {0x1p-600, 1.0, 0x1p600};

const Kernels& choose() {
#if defined(__x86_64__)
  const std::string capability = at::get_cpu_capability();  // honours ATEN_CPU_CAPABILITY
  if (capability.rfind("AVX512", 0) == 0) return kernels_avx512;
  if (capability.rfind("AVX2", 0) == 0) return kernels_avx2;
#endif
  return kernels_default;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

Type type_of(const at::Tensor& values) {
  switch (values.scalar_type()) {
    case at::kFloat: return kFloat;
    case at::kHalf: return kHalf;
    case at::kBFloat16: return kBFloat16;
    case at::kDouble: return kDouble;
    default: return kTypes;
  }
}

Sums nothing() {
  Sums sums{};
  sums.smallest = std::numeric_limits<double>::infinity();
  return sums;
}

void add(Sums& to, const Sums& part) {
  to.sum += part.sum;
  to.abs += part.abs;
  for (int k = 0; k < 3; ++k) to.square[k] += part.square[k];
  to.largest = std::max(to.largest, part.largest);
  to.smallest = std::min(to.smallest, part.smallest);
  to.nan += part.nan;
  to.inf += part.inf;
  to.zero += part.zero;
  to.flush += part.flush;
  to.subnormal += part.subnormal;
  to.overflow += part.overflow;
}

// Calls reduce(chunk number, memory, entries) for each chunk, in threads where that pays.
template <class Reduce>
void each_chunk(const at::Tensor& values, const Reduce& reduce) {
  const char* memory = static_cast<const char*>(values.const_data_ptr());
  const int64_t n = values.numel(), width = values.element_size(), chunks = (n + kChunk - 1) / kChunk;
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) reduce(k, memory + k * kChunk * width, std::min(kChunk, n - k * kChunk));
  };
  if (n >= kParallel && at::get_num_threads() > 1 && !at::in_parallel_region()) {
    at::parallel_for(0, chunks, 1, some);
  } else {
    some(0, chunks);
  }
}

Sums reduce(const at::Tensor& values, int64_t* bins) {
  const auto kernel = kernels().full[type_of(values)];
  const int64_t n = values.numel();
  Sums sums = nothing();
  if (n <= kChunk) {
    kernel(values.const_data_ptr(), n, &sums, bins);
    return sums;
  }
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  std::vector<Sums> parts(chunks, nothing());
  std::vector<int64_t> counted(bins ? chunks * kBins : 0);
  each_chunk(values, [&](int64_t k, const void* memory, int64_t size) {
    kernel(memory, size, &parts[k], bins ? &counted[k * kBins] : nullptr);
  });
  for (const Sums& part : parts) add(sums, part);
  for (size_t k = 0; k < counted.size(); ++k) bins[k % kBins] += counted[k];
  return sums;
}

void put(const Sums& sums, bool scaled, double out[kColumns]) {
  double square = sums.square[1];
  if (scaled) {  // as the squares of the values divided by the largest
    square = 0;
    for (int k = 0; k < 3; ++k) {
      const double largest = sums.largest * kScales[k];
      if (sums.square[k] > 0) square += sums.square[k] / largest / largest;
    }
  }
  const double columns[kColumns] = {
      sums.sum,
      sums.abs,
      square,
      sums.largest,
      sums.smallest,
      static_cast<double>(sums.nan),
      static_cast<double>(sums.inf),
      static_cast<double>(sums.zero),
      static_cast<double>(sums.flush),
      static_cast<double>(sums.subnormal),
      static_cast<double>(sums.overflow),
  };
  std::copy(columns, columns + kColumns, out);
}

}  // namespace

const char* variant() { return kernels().name; }

bool reducible(const at::Tensor& values) {
  if (!values.defined() || type_of(values) == kTypes) return false;
  // What else a plain tensor may carry are autograd's keys.  Anything more (Python's, functorch's, sparse, meta, lazy
  // bits) means that its memory isn't the whole truth.
  constexpr auto known = c10::DispatchKeySet({
      c10::DispatchKey::CPU,
      c10::DispatchKey::AutogradCPU,
      c10::DispatchKey::ADInplaceOrView,
      c10::DispatchKey::AutocastCPU,
  });
  const auto keys = values.key_set();
  const bool more = (keys - known).highestFunctionalityKey() != c10::DispatchKey::Undefined;
  if (more || !keys.has(c10::DispatchKey::CPU) || !values.device().is_cpu() || !values.has_storage()) return false;
  return values.is_non_overlapping_and_dense();
}

double norm_square(const at::Tensor& values) {
  const auto kernel = kernels().norm_square[type_of(values)];
  const int64_t n = values.numel();
  if (n <= kChunk) return kernel(values.const_data_ptr(), n);
  std::vector<double> parts((n + kChunk - 1) / kChunk);
  each_chunk(values, [&](int64_t k, const void* memory, int64_t size) { parts[k] = kernel(memory, size); });
  double sum = 0;
  for (const double part : parts) sum += part;
  return sum;
}

void full(const at::Tensor& values, double out[kColumns]) {
  put(reduce(values, nullptr), type_of(values) == kDouble, out);
}

void histogram(const at::Tensor& values, double out[kColumns], int64_t bins[kBins]) {
  std::fill(bins, bins + kBins, 0);
  put(reduce(values, bins), type_of(values) == kDouble, out);
}

}  // namespace fxgrad

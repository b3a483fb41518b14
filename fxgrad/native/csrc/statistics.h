// The reductions of a gradient on the CPU: what `fxgrad.record.statistics` computes, in one pass over its memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fxgrad {

constexpr int kColumns = 11;  // as in record/statistics.py, COLUMNS
constexpr int kBins = 64;     // as in schema/histogram.py, BINS

// Whether the functions below take this tensor: dense memory of a plain tensor on the CPU, fp32, fp64, fp16 or bf16.
// What has a Python class of its own, a functorch wrapper, a lazy conjugate or negation, or gaps in memory, is refused.
bool reducible(const at::Tensor& values);

// The sum of squares.  Products are float32 (float64 for fp64), sums over blocks float64: 0 and Inf mean, as in
// record/statistics.py at level `norm`, that the products left their range.
double norm_square(const at::Tensor& values);

// The scalars of COLUMNS, over the finite entries; for fp64, squares are divided by the largest modulus squared.
void full(const at::Tensor& values, double out[kColumns]);

// The same, and how many finite non-zero moduli lie in each bin of schema/histogram.py.  `bins` is overwritten.
void histogram(const at::Tensor& values, double out[kColumns], int64_t bins[kBins]);

}  // namespace fxgrad

// The loops over memory, compiled once for each kind of CPU.
//
// The files kernels_*.cpp are compiled for instructions that this CPU may not have.  They include nothing with inline
// functions (the linker might keep such a copy of one for everybody), and nothing here has code.
#pragma once

#include <stdint.h>

namespace fxgrad {

enum Type { kFloat, kHalf, kBFloat16, kDouble, kTypes };

// What a part of a tensor adds up to.  `square`: of values times 2**-600, 1 and 2**600, so that no square of a double
// leaves its range; only the second is used for the other types.  `smallest` is infinite where there is none.
struct Sums {
  double sum, abs, square[3], largest, smallest;
  int64_t nan, inf, zero, flush, subnormal, overflow;
};

struct Kernels {
  const char* name;
  double (*norm_square[kTypes])(const void* values, int64_t n);
  // Adds to `sums`, and to `bins` (64) where it isn't null; n is less than 2**31.
  void (*full[kTypes])(const void* values, int64_t n, Sums* sums, int64_t* bins);
};

extern const Kernels kernels_default;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace fxgrad

// For x86-64 CPUs with AVX2; torch says at run time whether this is one.
#include "kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define FXGRAD_WIDTH 32
#include "vectors.h"
#include "loops.h"
#include "doubles.h"

namespace fxgrad {
FXGRAD_KERNELS(kernels_avx2, "avx2")
}  // namespace fxgrad

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

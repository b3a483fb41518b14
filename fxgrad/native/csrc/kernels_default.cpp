// For any CPU: 16 bytes at a time, which is SSE2 on x86-64 and NEON on Arm.
#include "kernels.h"
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define FXGRAD_WIDTH 16
#include "vectors.h"
#include "loops.h"
#include "doubles.h"

namespace fxgrad {
FXGRAD_KERNELS(kernels_default, "default")
}  // namespace fxgrad

// Vectors of FXGRAD_WIDTH bytes in the notation that GCC and Clang share, and the few steps that it has no words for.
// Included by each kernels_*.cpp; everything is local to it.

namespace fxgrad {
namespace {

typedef float F __attribute__((vector_size(FXGRAD_WIDTH)));
typedef int32_t I __attribute__((vector_size(FXGRAD_WIDTH)));
typedef uint32_t U __attribute__((vector_size(FXGRAD_WIDTH)));
typedef double D __attribute__((vector_size(FXGRAD_WIDTH)));
typedef int64_t L __attribute__((vector_size(FXGRAD_WIDTH)));
constexpr int kLanes = FXGRAD_WIDTH / 4;

struct Half { uint16_t bits; };
struct BFloat16 { uint16_t bits; };

#define FXGRAD_INLINE static inline __attribute__((always_inline))

template <class V, class T>
FXGRAD_INLINE V load(const T* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

template <class V>
FXGRAD_INLINE V larger(V a, V b) { return a > b ? a : b; }

template <class V>
FXGRAD_INLINE V smaller(V a, V b) { return a < b ? a : b; }

// ---- float32 from memory --------------------------------------------------------------------------------------------

FXGRAD_INLINE F read(const float* from) { return load<F>(from); }

#if FXGRAD_WIDTH == 64

FXGRAD_INLINE F read(const Half* from) {
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}
FXGRAD_INLINE F read(const BFloat16* from) {
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}
FXGRAD_INLINE D low(F v) { return (D)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)); }
FXGRAD_INLINE D high(F v) {
  return (D)_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1)));
}
FXGRAD_INLINE F fused(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
FXGRAD_INLINE D fused(D a, D b, D c) { return (D)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }

#elif FXGRAD_WIDTH == 32

FXGRAD_INLINE F read(const Half* from) { return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
FXGRAD_INLINE F read(const BFloat16* from) {
  return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
}
FXGRAD_INLINE D low(F v) { return (D)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)); }
FXGRAD_INLINE D high(F v) { return (D)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1)); }
FXGRAD_INLINE F fused(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
FXGRAD_INLINE D fused(D a, D b, D c) { return (D)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }

#else

typedef uint16_t H __attribute__((vector_size(8)));

FXGRAD_INLINE F read(const BFloat16* from) { return (F)(__builtin_convertvector(load<H>(from), U) << 16); }
// In integers, since a CPU that takes subnormals for zero would lose float16's on the way through a multiplication.
FXGRAD_INLINE F read(const Half* from) {
  const U bits = __builtin_convertvector(load<H>(from), U);
  const U modulus = bits & 0x7fff;
  const F small = __builtin_convertvector((I)modulus, F) * 0x1p-24f;
  U wide = (modulus << 13) + (112u << 23);
  wide = (I)modulus >= 0x7c00 ? (wide | 0x7f800000u) : wide;
  wide = (I)modulus < 0x400 ? (U)small : wide;
  return (F)(wide | (bits & 0x8000) << 16);
}
#if defined(__x86_64__)
FXGRAD_INLINE D low(F v) { return (D)_mm_cvtps_pd((__m128)v); }
FXGRAD_INLINE D high(F v) { return (D)_mm_cvtps_pd(_mm_movehl_ps((__m128)v, (__m128)v)); }
#else
FXGRAD_INLINE D low(F v) { return D{v[0], v[1]}; }
FXGRAD_INLINE D high(F v) { return D{v[2], v[3]}; }
#endif
FXGRAD_INLINE F fused(F a, F b, F c) { return a * b + c; }
FXGRAD_INLINE D fused(D a, D b, D c) { return a * b + c; }

#endif

// ---- over the lanes -------------------------------------------------------------------------------------------------

template <class S, class V>
FXGRAD_INLINE S total(V v) {
  S s = 0;
  for (unsigned k = 0; k < sizeof(V) / sizeof(v[0]); ++k) s += v[k];
  return s;
}

template <class S, class V>
FXGRAD_INLINE S largest_of(V v) {
  S s = v[0];
  for (unsigned k = 1; k < sizeof(V) / sizeof(v[0]); ++k) s = v[k] > s ? v[k] : s;
  return s;
}

template <class S, class V>
FXGRAD_INLINE S smallest_of(V v) {
  S s = v[0];
  for (unsigned k = 1; k < sizeof(V) / sizeof(v[0]); ++k) s = v[k] < s ? v[k] : s;
  return s;
}

}  // namespace
}  // namespace fxgrad

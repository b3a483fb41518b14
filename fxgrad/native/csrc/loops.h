// The reductions of float32 and of what widens to it, a block at a time, so that the rare second look is at the cache.
//
// Counting is done on the bits of the moduli, which are in the order of the moduli, NaN last.  A difference of two
// shifted by 31 is 1 where it is negative, whatever the CPU takes subnormals for.

namespace fxgrad {
namespace {

constexpr int64_t kBlock = 4096;
constexpr uint32_t kSign = 0x7fffffff;        // takes the sign off
constexpr uint32_t kInf = 0x7f800000;         // bits of infinity
constexpr uint32_t kFlush = (127 - 25) << 23;  // of 2**-25, half of float16's smallest number
constexpr uint32_t kOverflow = 0x477fe000;    // of 65504, float16's largest number
constexpr int kCopies = 8;                    // of the histogram, so that a count needn't wait for the one before

template <class T> struct Tiny { static constexpr uint32_t bits = 1u << 23; };
template <> struct Tiny<Half> { static constexpr uint32_t bits = (127 - 14) << 23; };

FXGRAD_INLINE double as_double(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// The last, incomplete vector: `n` entries, and zeros.
template <class T>
struct Tail {
  T values[kLanes];
  Tail(const T* from, int64_t n) {
    __builtin_memset(values, 0, sizeof(values));
    __builtin_memcpy(values, from, n * sizeof(T));
  }
};

// ---- level `norm` ---------------------------------------------------------------------------------------------------

template <class T>
double norm_square(const void* memory, int64_t n) {
  const T* p = static_cast<const T*>(memory);
  double sum = 0;
  while (n > 0) {
    const int64_t size = n < kBlock ? n : kBlock;
    F acc[4] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes)
      for (int k = 0; k < 4; ++k) {
        const F v = read(p + i + k * kLanes);
        acc[k] = fused(v, v, acc[k]);
      }
    for (; i + kLanes <= size; i += kLanes) {
      const F v = read(p + i);
      acc[0] = fused(v, v, acc[0]);
    }
    if (i < size) {
      const Tail<T> tail(p + i, size - i);
      const F v = read(tail.values);
      acc[1] = fused(v, v, acc[1]);
    }
    D wide = {};
    for (int k = 0; k < 4; ++k) wide += low(acc[k]) + high(acc[k]);
    sum += total<double>(wide);
    p += size;
    n -= size;
  }
  return sum;
}

// ---- level `full` ---------------------------------------------------------------------------------------------------

// Of a block: its sums, the largest modulus, the smallest less 1 (zeros wrap around), how many are zero, and how many
// are below kFlush.
struct Core {
  D sum[2], abs[2], square[2];
  I largest;
  U smallest, zero, flush;
};

template <class T, bool finite>
FXGRAD_INLINE void step(F v, Core& c) {
  U modulus = (U)v & kSign;
  if (!finite) {
    const U whole = (U)((I)modulus < (I)(I{} + (int32_t)kInf));
    v = (F)((U)v & whole);
    // What isn't finite is no zero either: it gets a modulus that none of the counts below takes notice of.
    c.largest = larger(c.largest, (I)(modulus & whole));
    modulus = (modulus & whole) | (~whole & kInf);
  } else {
    c.largest = larger(c.largest, (I)modulus);
  }
  const U less = modulus - 1;
  c.smallest = smaller(c.smallest, less);
  c.zero += less >> 31;
  if (Tiny<T>::bits == 1u << 23) c.flush += (modulus - kFlush) >> 31;  // float16 has no such numbers but zero
  const D wide[2] = {low(v), high(v)};
  for (int k = 0; k < 2; ++k) {
    c.sum[k] += wide[k];
    c.abs[k] += (D)((L)wide[k] & INT64_MAX);
    c.square[k] = fused(wide[k], wide[k], c.square[k]);
  }
}

template <class T, bool finite>
static __attribute__((noinline)) void pass(const T* p, int64_t n, Core* result) {
  Core c = {};
  c.smallest = ~c.smallest;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) step<T, finite>(read(p + i), c);
  if (i < n) {
    const Tail<T> tail(p + i, n - i);
    step<T, finite>(read(tail.values), c);
  }
  *result = c;
}

// How many moduli are below `limit`, and of those that fill up the last vector.
template <class T>
static __attribute__((noinline)) int64_t below(const T* p, int64_t n, uint32_t limit) {
  U count = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) count += (((U)read(p + i) & kSign) - limit) >> 31;
  if (i < n) {
    const Tail<T> tail(p + i, n - i);
    count += (((U)read(tail.values) & kSign) - limit) >> 31;
  }
  return total<int64_t>(count);
}

template <class T>
static void block(const T* p, int64_t n, Sums* s) {
  Core c;
  const int64_t filled = n % kLanes ? kLanes - n % kLanes : 0;
  pass<T, true>(p, n, &c);
  uint32_t largest = largest_of<int32_t>(c.largest);
  if (largest >= kInf) {
    pass<T, false>(p, n, &c);
    largest = largest_of<int32_t>(c.largest);
    const int64_t numbers = below(p, n, kInf + 1);
    s->nan += n + filled - numbers;
    s->inf += numbers - below(p, n, kInf);
  }
  s->sum += total<double>(c.sum[0] + c.sum[1]);
  s->abs += total<double>(c.abs[0] + c.abs[1]);
  s->square[1] += total<double>(c.square[0] + c.square[1]);
  const int64_t zero = total<int64_t>(c.zero);
  s->zero += zero - filled;
  if (Tiny<T>::bits == 1u << 23) s->flush += total<int64_t>(c.flush) - zero;
  const uint32_t smallest = smallest_of<uint32_t>(c.smallest) + 1;
  if (smallest - 1 < kInf - 1) {
    const double value = as_double(smallest);
    s->smallest = value < s->smallest ? value : s->smallest;
    if (smallest < Tiny<T>::bits) s->subnormal += below(p, n, Tiny<T>::bits) - zero;
  }
  const double value = as_double(largest);
  s->largest = value > s->largest ? value : s->largest;
  if (largest > kOverflow) s->overflow += below(p, n, kInf) - below(p, n, kOverflow + 1);
}

// ---- the histogram --------------------------------------------------------------------------------------------------

// By biased exponent of float32: eight copies, added up in the end.
struct Exponents { uint32_t counts[kCopies][256]; };

template <class T>
static void count(const T* p, int64_t n, Exponents* e) {
  uint32_t bits[kBlock + kLanes];
  const uint32_t* from = bits;
  if (sizeof(T) == 4) {
    from = reinterpret_cast<const uint32_t*>(p);
  } else {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const F v = read(p + i);
      __builtin_memcpy(bits + i, &v, sizeof(v));
    }
    const Tail<T> tail(p + i, n - i);
    const F v = read(tail.values);
    __builtin_memcpy(bits + i, &v, sizeof(v));
  }
  int64_t i = 0;
  for (; i + kCopies <= n; i += kCopies)
    for (int k = 0; k < kCopies; k += 2) {
      uint64_t two;
      __builtin_memcpy(&two, from + i + k, 8);
      ++e->counts[k][two >> 23 & 255];
      ++e->counts[k + 1][two >> 55 & 255];
    }
  for (; i < n; ++i) {
    uint32_t one;
    __builtin_memcpy(&one, from + i, 4);
    ++e->counts[0][one >> 23 & 255];
  }
}

// Bin 0 has moduli below 2**-46, whose exponent is 80; zeros, which are among those of exponent 0, are left out.
static void fold(const Exponents& e, int64_t zeros, int64_t* bins) {
  uint32_t sums[256];
  for (int exponent = 0; exponent < 256; ++exponent) sums[exponent] = e.counts[0][exponent];
  for (int k = 1; k < kCopies; ++k)
    for (int exponent = 0; exponent < 256; ++exponent) sums[exponent] += e.counts[k][exponent];
  int64_t below = -zeros, above = 0;
  for (int exponent = 0; exponent <= 80; ++exponent) below += sums[exponent];
  for (int exponent = 143; exponent < 255; ++exponent) above += sums[exponent];
  bins[0] += below;
  for (int exponent = 81; exponent < 143; ++exponent) bins[exponent - 80] += sums[exponent];
  bins[63] += above;
}

template <class T>
void full(const void* memory, int64_t n, Sums* sums, int64_t* bins) {
  const T* p = static_cast<const T*>(memory);
  const int64_t zeros = sums->zero;
  Exponents exponents;
  if (bins) __builtin_memset(&exponents, 0, sizeof(exponents));
  while (n > 0) {
    const int64_t size = n < kBlock ? n : kBlock;
    block(p, size, sums);
    if (bins) count(p, size, &exponents);
    p += size;
    n -= size;
  }
  if (bins) fold(exponents, sums->zero - zeros, bins);
}

}  // namespace
}  // namespace fxgrad

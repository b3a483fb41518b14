// The reductions of float64.  A block is first taken for finite and of middling size; where it isn't, again.

#define FXGRAD_KERNELS(variable, name)                                                                  \
  extern const Kernels variable = {                                                                     \
      name,                                                                                             \
      {norm_square<float>, norm_square<Half>, norm_square<BFloat16>, norm_square_of_doubles},           \
      {full<float>, full<Half>, full<BFloat16>, full_of_doubles},                                       \
  };

namespace fxgrad {
namespace {

constexpr int kDoubles = FXGRAD_WIDTH / 8;
constexpr int64_t kDoubleBlock = 2048;
const double kInfinity = __builtin_inf();

struct DoubleTail {
  double values[kDoubles];
  DoubleTail(const double* from, int64_t n) {
    __builtin_memset(values, 0, sizeof(values));
    __builtin_memcpy(values, from, n * sizeof(double));
  }
};

double norm_square_of_doubles(const void* memory, int64_t n) {
  const double* p = static_cast<const double*>(memory);
  D acc[4] = {};
  int64_t i = 0;
  for (; i + 4 * kDoubles <= n; i += 4 * kDoubles)
    for (int k = 0; k < 4; ++k) {
      const D v = load<D>(p + i + k * kDoubles);
      acc[k] = fused(v, v, acc[k]);
    }
  for (; i < n; i += kDoubles) {
    const DoubleTail tail(p + i, n - i < kDoubles ? n - i : kDoubles);
    const D v = load<D>(tail.values);
    acc[0] = fused(v, v, acc[0]);
  }
  return total<double>(acc[0] + acc[1] + (acc[2] + acc[3]));
}

struct DoubleCore {
  D sum, abs, square, largest, smallest;
  L zero, flush, subnormal, overflow, inf, nan;
};

// `rare`: also where there may be numbers that aren't finite, that are subnormal, or above 65504; squares of v * scale.
template <bool rare>
FXGRAD_INLINE void step(D v, double scale, DoubleCore& c) {
  D modulus = (D)((L)v & INT64_MAX);
  if (rare) {
    const L infinite = modulus == kInfinity, nan = modulus != modulus;
    c.inf -= infinite;
    c.nan -= nan;
    const L whole = ~(infinite | nan);
    v = (D)((L)v & whole);
    c.subnormal -= ((modulus < 0x1p-1022) & (modulus != 0.0));
    c.overflow -= (modulus > 65504.0) & whole;
    c.largest = larger(c.largest, (D)((L)modulus & whole));
    c.abs += (D)((L)modulus & whole);
  } else {
    c.largest = larger(c.largest, modulus);
    c.abs += modulus;
  }
  const L zero = modulus == 0.0;
  c.zero -= zero;
  c.flush -= modulus < 0x1p-25;
  c.smallest = smaller((D)((L)modulus | (zero & 0x7ff0000000000000)), c.smallest);
  c.sum += v;
  const D root = rare ? v * scale : v;
  c.square = fused(root, root, c.square);
}

template <bool rare>
static __attribute__((noinline)) void pass(const double* p, int64_t n, double scale, DoubleCore* result) {
  DoubleCore c = {};
  c.smallest += kInfinity;
  int64_t i = 0;
  for (; i + kDoubles <= n; i += kDoubles) step<rare>(load<D>(p + i), scale, c);
  if (i < n) {
    const DoubleTail tail(p + i, n - i);
    step<rare>(load<D>(tail.values), scale, c);
  }
  *result = c;
}

static void block_of_doubles(const double* p, int64_t n, Sums* s) {
  DoubleCore c;
  const int64_t filled = n % kDoubles ? kDoubles - n % kDoubles : 0;
  pass<false>(p, n, 1.0, &c);
  double largest = largest_of<double>(c.largest), smallest = smallest_of<double>(c.smallest);
  const double sum = total<double>(c.sum);
  int kind = 1;
  if (largest > 65504.0 || largest < 0x1p-450 || smallest < 0x1p-1022 || !(sum - sum == 0.0)) {
    pass<true>(p, n, 1.0, &c);
    largest = largest_of<double>(c.largest);
    kind = largest > 0x1p500 ? 0 : largest < 0x1p-450 ? 2 : 1;
    if (kind != 1) pass<true>(p, n, kind == 0 ? 0x1p-600 : 0x1p600, &c);
    smallest = smallest_of<double>(c.smallest);
  }
  s->sum += total<double>(c.sum);
  s->abs += total<double>(c.abs);
  s->square[kind] += total<double>(c.square);
  s->largest = largest > s->largest ? largest : s->largest;
  s->smallest = smallest < s->smallest ? smallest : s->smallest;
  s->nan += total<int64_t>(c.nan);
  s->inf += total<int64_t>(c.inf);
  s->zero += total<int64_t>(c.zero) - filled;
  s->flush += total<int64_t>(c.flush) - total<int64_t>(c.zero);
  s->subnormal += total<int64_t>(c.subnormal);
  s->overflow += total<int64_t>(c.overflow);
}

// By bin, and what is not finite as the 65th.
struct DoubleBins { uint32_t counts[kCopies][65]; };

FXGRAD_INLINE int bin_of(const double* p) {
  uint64_t bits;
  __builtin_memcpy(&bits, p, 8);
  const int exponent = bits >> 52 & 2047;
  const int bin = exponent < 976 ? 0 : exponent > 1039 ? 63 : exponent - 976;
  return exponent == 2047 ? 64 : bin;
}

static void count(const double* p, int64_t n, DoubleBins* b) {
  int64_t i = 0;
  for (; i + kCopies <= n; i += kCopies)
    for (int k = 0; k < kCopies; ++k) ++b->counts[k][bin_of(p + i + k)];
  for (; i < n; ++i) ++b->counts[0][bin_of(p + i)];
}

void full_of_doubles(const void* memory, int64_t n, Sums* sums, int64_t* bins) {
  const double* p = static_cast<const double*>(memory);
  const int64_t zeros = sums->zero;
  DoubleBins counted;
  if (bins) __builtin_memset(&counted, 0, sizeof(counted));
  while (n > 0) {
    const int64_t size = n < kDoubleBlock ? n : kDoubleBlock;
    block_of_doubles(p, size, sums);
    if (bins) count(p, size, &counted);
    p += size;
    n -= size;
  }
  if (!bins) return;
  bins[0] -= sums->zero - zeros;
  for (int bin = 0; bin < 64; ++bin)
    for (int k = 0; k < kCopies; ++k) bins[bin] += counted.counts[k][bin];
}

}  // namespace
}  // namespace fxgrad

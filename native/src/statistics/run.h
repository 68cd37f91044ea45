// The kernel: one run of elements that lie next to each other, its first flat index a multiple of 64.
//
// A chunk of what float32 holds is summed in float32, `kFlush` rows at a time, and these sums in
// float64. Near a mean of 0 a bucket is all of its values less twice those whose sign is turned,
// which is cheapest. Elsewhere that would lose digits, and squares even more: there squares are of
// distances from the mean of the chunk's first row. That row is a 128th of the chunk, so rounding
// loses at most some 100 roundings of the variance itself, whatever comes after it. Where float32
// does not do (NaN, infinities, squares that overflow or vanish) the chunk is read again in float64,
// as are all other types of elements.
#pragma once

#include "kernel/elements.h"
#include "statistics/summary.h"

namespace polyattn::POLYATTN_NAMESPACE {

constexpr int kChunkRows = 128;  // of 64 elements
constexpr int kFlush = 16;       // rows; it divides kChunkRows
constexpr int kAhead = 32;       // rows fetched ahead: what another core wrote is not in this one's caches
constexpr double kSmallSquare = 1e-30;
constexpr double kNear = 0.25;  // mean^2 / variance up to which the mean is near 0

// Vectors of float64. Their size is written out, for GCC takes none that depends on a template's
// argument.
#if defined(__AVX512F__)
constexpr int kWideLanes = 8;
#elif defined(__AVX2__)
constexpr int kWideLanes = 4;
#else
constexpr int kWideLanes = 2;
#endif
typedef double Wide __attribute__((vector_size(kWideLanes * 8)));
typedef int64_t WideInt __attribute__((vector_size(kWideLanes * 8)));

POLYATTN_INLINE uint64_t splitmix64(uint64_t z) {
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

template <class S, class T>
POLYATTN_INLINE void to_floats(const T* p, int count, float* out) {
  int i = 0;
  for (; i + S::kLanes <= count; i += S::kLanes) S::store(out + i, S::load(p + i));
  for (; i < count; ++i) out[i] = to_float(p[i]);
}

template <class S, class T>
POLYATTN_INLINE void to_doubles(const T* p, int count, double* out) {
  for (int i = 0; i < count; ++i) out[i] = double(p[i]);
}
template <class S>
POLYATTN_INLINE void to_doubles(const BF16* p, int count, double* out) {
  float x[64];
  to_floats<S>(p, count, x);
  for (int i = 0; i < count; ++i) out[i] = double(x[i]);
}
template <class S>
POLYATTN_INLINE void to_doubles(const F16* p, int count, double* out) {
  float x[64];
  to_floats<S>(p, count, x);
  for (int i = 0; i < count; ++i) out[i] = double(x[i]);
}

// Any type, any values, in float64.
template <class S, class T>
struct Precise {
  static constexpr int kLanes = kWideLanes;
  using Vec = Wide;
  using Int = WideInt;

  static POLYATTN_INLINE Vec fill(double x) { return Vec{} + x; }
  static POLYATTN_INLINE Vec keep(Int mask, Vec x) { return (Vec)((Int)x & mask); }
  static POLYATTN_INLINE Vec where(Int mask, Vec yes, Vec no) {
    return (Vec)(((Int)yes & mask) | ((Int)no & ~mask));
  }
  static POLYATTN_INLINE double total(Vec x) {
    double sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += x[i];
    return sum;
  }
  static POLYATTN_INLINE int64_t total(Int x) {
    int64_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += x[i];
    return sum;
  }

  // The mean of the finite elements of a row, else `otherwise`.
  static double shift_of(const double* x, double otherwise) {
    double sum = 0;
    int finite = 0;
    for (int i = 0; i < 64; ++i) {
      if (!(__builtin_fabs(x[i]) <= __DBL_MAX__)) continue;
      sum += (x[i] - sum) / ++finite;  // the mean so far: exact for a constant row, no overflow
    }
    return finite == 0 ? otherwise : sum;
  }

  // `count` elements, up to a chunk.
  static void add(const T* p, int64_t count, uint64_t block, Summary& s) {
    alignas(64) double x[64];
    Vec low = fill(s.min), high = fill(s.max), sum{}, absolute{}, away{}, squares{};
    Int finite{}, nan{}, plus{}, minus{}, zero{};  // each lane counts down
    double shift = 0;
    const Vec top = fill(__DBL_MAX__);
    Int lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    for (int64_t start = 0; start < count; start += 64, ++block) {
      const int row = int(smaller<int64_t>(64, count - start));
      to_doubles<S>(p + start, row, x);
      for (int i = row; i < 64; ++i) x[i] = __builtin_nan("");  // taken off the count below
      if (start == 0) shift = shift_of(x, s.mean);
      const uint64_t word = splitmix64(block);
      for (int c = 0; c < 64; c += kLanes) {
        Vec v, bucket;
        __builtin_memcpy(&v, x + c, sizeof v);
        __builtin_memcpy(&bucket, s.sketch + c, sizeof v);
        const Vec size = (Vec)((Int)v & INT64_MAX);
        const Int fine = (Int)(size <= top);
        const Vec value = keep(fine, v), distance = keep(fine, v - shift);
        finite += fine;
        nan += (Int)(v != v);
        plus += (Int)(v > top);
        minus += (Int)(v < -top);
        zero += (Int)(v == Vec{});
        low = where((Int)(v < low) & fine, v, low);
        high = where((Int)(v > high) & fine, v, high);
        sum += value;
        absolute += keep(fine, size);
        away += distance;
        squares += distance * distance;
        const Int signs = ((Int{} + int64_t(word >> c)) << (63 - lane)) & INT64_MIN;
        bucket += (Vec)((Int)value ^ signs);
        __builtin_memcpy(s.sketch + c, &bucket, sizeof v);
      }
    }
    const int64_t found = -total(finite);
    s.nan += -total(nan) - (round_up(count, 64) - count);
    s.plus_inf -= total(plus);
    s.minus_inf -= total(minus);
    s.zero -= total(zero);
    for (int i = 0; i < kLanes; ++i) {
      s.min = smaller(s.min, double(low[i]));
      s.max = larger(s.max, double(high[i]));
    }
    s.sum += total(sum);
    s.abs_sum += total(absolute);
    if (found == 0) return;
    const double offset = total(away) / double(found);
    const double m2 = total(squares) - offset * offset * double(found);
    add_moments(s, found, shift + offset, m2 < 0 ? 0 : m2);
  }
};

// Elements that float32 holds, in float32.
template <class S, class T>
struct Fast {
  using Vec = typename S::Vec;
  static constexpr int L = S::kLanes, G = S::kColumnBlock;
  static_assert(G == 2 || G == 4);

  struct Sums {
    double absolute[L] = {}, squares[L] = {};
    double values[kBuckets] = {};
    double negated[kBuckets] = {};  // of the values whose sign is turned
    float least[L], most[L];
    int64_t zeros = 0;
  };

  static POLYATTN_INLINE Vec tree(Vec (&x)[G]) {
    if constexpr (G == 2) return S::add(x[0], x[1]);
    return S::add(S::add(x[0], x[1]), S::add(x[2], x[3]));
  }
  template <int count>
  static POLYATTN_INLINE double total(const double (&x)[count]) {
    double sum = 0;
    for (int i = 0; i < count; ++i) sum += x[i];
    return sum;
  }

  // The mean of a row; exactly x where all are x, so that a constant tensor has no variance.
  static POLYATTN_INLINE float mean_of_row(const T* p) {
    float x[64];
    for (int i = 0; i < 64; i += L) S::store(x + i, S::load(p + i));
    for (int width = 32; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) x[i] += x[i + width];
    }
    return x[0] * (1.0f / 64);
  }

  // `kShifted`: `values` and `squares` are of distances from `shift`, and `negated` has all values,
  // those whose sign is turned with that sign.
  template <bool kShifted>
  static void sum(const T* p, int rows, uint64_t block, float shift, Sums& sums) {
    uint64_t words[kChunkRows];
    for (int r = 0; r < rows; ++r) words[r] = splitmix64(block + uint64_t(r));
    const Vec from = S::fill(shift);
    Vec low = S::load(p), high = low;
    typename S::Tally zeros = S::no_tally();
    for (int start = 0; start < rows; start += kFlush) {
      const int end = smaller(rows, start + kFlush);
      for (int c = 0; c < 64; c += G * L) {
        Vec values[G], negated[G], absolute[G], squares[G];
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) values[g] = negated[g] = absolute[g] = squares[g] = S::zero();
        for (int r = start; r < end; ++r) {
          const uint64_t word = words[r] >> c;
#pragma GCC unroll 4
          for (int g = 0; g < G; ++g) {
            const T* const at = p + r * 64 + c + g * L;
            if (g * L * sizeof(T) % 64 == 0) __builtin_prefetch(at + kAhead * 64);
            const Vec x = S::load(at);
            low = S::min(x, low);
            high = S::max(x, high);
            zeros = S::tally_zeros(zeros, x);
            absolute[g] = S::add(absolute[g], S::abs(x));
            if constexpr (kShifted) {
              const Vec d = S::sub(x, from);
              values[g] = S::add(values[g], d);
              squares[g] = S::fma(d, d, squares[g]);
              negated[g] = S::add(negated[g], S::negate(word >> (g * L), x));
            } else {
              values[g] = S::add(values[g], x);
              squares[g] = S::fma(x, x, squares[g]);
              negated[g] = S::add_some(negated[g], word >> (g * L), x);
            }
          }
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
          S::add_lanes(values[g], sums.values + c + g * L);
          S::add_lanes(negated[g], sums.negated + c + g * L);
        }
        S::add_lanes(tree(absolute), sums.absolute);
        S::add_lanes(tree(squares), sums.squares);
      }
    }
    S::store(sums.least, low);
    S::store(sums.most, high);
    sums.zeros = S::sum_tally(zeros);
  }

  // Whole rows, up to a chunk. False, and nothing is added: read them in float64.
  // `near`: whether the mean is thought to be near 0, as the deviation goes; set to what it is.
  static bool add(const T* p, int rows, uint64_t block, bool& near, Summary& s) {
    const double count = 64.0 * rows;
    double squares, mean, m2;
    Sums sums;
    const auto moments = [&](float shift) {
      squares = total(sums.squares);
      const double offset = total(sums.values) / count;
      mean = double(shift) + offset;
      m2 = squares - offset * offset * count;
      if (m2 < 0) m2 = 0;
    };
    bool shifted = !near;
    if (near) {
      sum<false>(p, rows, block, 0, sums);
      moments(0);
      near = mean * mean * count <= kNear * m2;
      shifted = squares <= __DBL_MAX__ && !near;
    }
    if (shifted) {
      sums = Sums();
      const float shift = mean_of_row(p);
      sum<true>(p, rows, block, shift, sums);
      moments(shift);
      near = mean * mean * count <= kNear * m2;
    }
    const double absolute = total(sums.absolute);
    double least = double(sums.least[0]), most = double(sums.most[0]);
    for (int i = 1; i < L; ++i) {
      least = smaller(least, double(sums.least[i]));
      most = larger(most, double(sums.most[i]));
    }
    // Sums of what is not finite are not finite. All others are bounded by these two.
    if (!(absolute <= __DBL_MAX__ && squares <= __DBL_MAX__)) return false;
    if (squares < kSmallSquare * count && least != most) return false;
    add_moments(s, int64_t{64} * rows, mean, m2);
    s.zero += sums.zeros;
    s.min = smaller(s.min, least);
    s.max = larger(s.max, most);
    s.sum += mean * count;
    s.abs_sum += absolute;
    for (int i = 0; i < kBuckets; ++i) {
      s.sketch[i] += shifted ? sums.negated[i] : sums.values[i] - 2 * sums.negated[i];
    }
    return true;
  }
};

template <class S, class T>
void precise_run(const T* p, int64_t count, uint64_t block, Summary& s) {
  constexpr int64_t kChunkElements = 64 * kChunkRows;
  for (int64_t i = 0; i < count; i += kChunkElements) {
    const int64_t part = smaller(kChunkElements, count - i);
    Precise<S, T>::add(p + i, part, block + uint64_t(i / 64), s);
  }
}

template <class S, class T>
void fast_run(const T* p, int64_t count, uint64_t block, Summary& s) {
  constexpr int64_t kChunkElements = 64 * kChunkRows;
  bool near = true;
  for (int64_t i = 0; i < count; i += kChunkElements) {
    const int64_t part = smaller(kChunkElements, count - i);
    const int rows = int(part / 64);
    const uint64_t at = block + uint64_t(i / 64);
    int64_t done = 0;
    if (rows > 0 && Fast<S, T>::add(p + i, rows, at, near, s)) done = int64_t{64} * rows;
    if (done < part) Precise<S, T>::add(p + i + done, part - done, at + uint64_t(done / 64), s);
  }
}

// Adds `count` elements, the first of them the first one of `block`, to a summary.
template <class S>
void summarize(Element element, const void* p, int64_t count, uint64_t block, Summary& s) {
  switch (element) {
    case Element::f32:
      return fast_run<S>(static_cast<const float*>(p), count, block, s);
    case Element::bf16:
      return fast_run<S>(static_cast<const BF16*>(p), count, block, s);
    case Element::f16:
      return fast_run<S>(static_cast<const F16*>(p), count, block, s);
    case Element::f64:
      return precise_run<S>(static_cast<const double*>(p), count, block, s);
    case Element::i8:
      return fast_run<S>(static_cast<const int8_t*>(p), count, block, s);
    case Element::u8:
      return fast_run<S>(static_cast<const uint8_t*>(p), count, block, s);
    case Element::i16:
      return fast_run<S>(static_cast<const int16_t*>(p), count, block, s);
    case Element::i32:
      return precise_run<S>(static_cast<const int32_t*>(p), count, block, s);
    case Element::i64:
      return precise_run<S>(static_cast<const int64_t*>(p), count, block, s);
  }
}

}  // namespace polyattn::POLYATTN_NAMESPACE

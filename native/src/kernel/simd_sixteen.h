// Sixteen lanes in plain C++, with pairs of bfloat16: what tests the forms that only newer processors have.
#pragma once

#include "kernel/elements.h"
#include "kernel/exponential.h"
#include "kernel/lanes.h"

namespace polyattn::POLYATTN_NAMESPACE {

struct Simd {
  static constexpr int kLanes = 16;
  static constexpr int kRowBlock = 4, kColumnBlock = 2;
  static constexpr int kAheadRows = 8, kFetchHint = 3;  // see simd_avx2.h
  static constexpr bool kPagesInTurn = true;
  struct Vec {
    float x[kLanes];
  };

  template <class Of>
  static POLYATTN_INLINE Vec each(Of of) {
    Vec y;
    for (int i = 0; i < kLanes; ++i) y.x[i] = of(i);
    return y;
  }

  static POLYATTN_INLINE Vec zero() { return Vec{}; }
  static POLYATTN_INLINE Vec fill(float x) {
    return each([&](int) { return x; });
  }
  static POLYATTN_INLINE Vec load(const float* p) {  // units of bfloat16 lie where those do
    Vec x;
    std::memcpy(x.x, p, sizeof x.x);
    return x;
  }
  template <class T>
  static POLYATTN_INLINE Vec load(const T* p) {
    return each([&](int i) { return to_float(p[i]); });
  }
  template <class T>
  static POLYATTN_INLINE Vec load_some(const T* p, int n) {
    return each([&](int i) { return i < n ? to_float(p[i]) : 0.0f; });
  }
  template <class T>
  static POLYATTN_INLINE void store(T* p, Vec v) {
    store_some(p, v, kLanes);
  }
  template <class T>
  static POLYATTN_INLINE void store_some(T* p, Vec v, int n) {
    for (int i = 0; i < n; ++i) from_float(v.x[i], p + i);
  }

  static POLYATTN_INLINE Vec add(Vec a, Vec b) {
    return each([&](int i) { return a.x[i] + b.x[i]; });
  }
  static POLYATTN_INLINE Vec sub(Vec a, Vec b) {
    return each([&](int i) { return a.x[i] - b.x[i]; });
  }
  static POLYATTN_INLINE Vec mul(Vec a, Vec b) {
    return each([&](int i) { return a.x[i] * b.x[i]; });
  }
  static POLYATTN_INLINE Vec div(Vec a, Vec b) {
    return each([&](int i) { return a.x[i] / b.x[i]; });
  }
  static POLYATTN_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return each([&](int i) { return a.x[i] * b.x[i] + c.x[i]; });
  }
  // the second operand where one is NaN
  static POLYATTN_INLINE Vec max(Vec a, Vec b) {
    return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
  }
  static POLYATTN_INLINE Vec abs(Vec a) {
    return each([&](int i) { return float_of(bits_of(a.x[i]) & 0x7fffffffu); });
  }
  static POLYATTN_INLINE Vec less_select(Vec a, Vec b, Vec yes, Vec no) {
    return each([&](int i) { return a.x[i] < b.x[i] ? yes.x[i] : no.x[i]; });
  }
  static POLYATTN_INLINE Vec select(uint64_t bits, Vec yes, Vec no) {
    return each([&](int i) { return bits >> i & 1 ? yes.x[i] : no.x[i]; });
  }
  // Whether a lane is above `most` or NaN.
  static POLYATTN_INLINE bool any_beyond(Vec a, Vec most) {
    bool beyond = false;
    for (int i = 0; i < kLanes; ++i) beyond |= !(a.x[i] <= most.x[i]);
    return beyond;
  }
  static POLYATTN_INLINE bool any_nan(Vec a) {
    bool nan = false;
    for (float x : a.x) nan |= x != x;
    return nan;
  }
  static POLYATTN_INLINE float sum(Vec a) {
    float total = 0;
    for (float x : a.x) total += x;
    return total;
  }
  static POLYATTN_INLINE Vec ramp() {
    return each([](int i) { return float(i); });
  }

  // 2^x: 0 below the normal numbers and for -inf, NaN for NaN.
  template <int kDegree>
  static POLYATTN_INLINE Vec exp2(Vec x) {
    return scaled(x, [](Vec r) { return power_of_fraction<Simd, kDegree>(r); });
  }
  // The same with coefficients of the caller's. Not in line: unrolled rows of it would be megabytes.
  template <int kDegree>
  static __attribute__((noinline)) Vec exp2_by(const Vec (&c)[kDegree + 1], Vec x) {
    return scaled(x, [&](Vec r) { return polynomial<Simd, kDegree>(c, r); });
  }
  // What power(fraction of x) is times 2^(whole part of x).
  template <class Power>
  static POLYATTN_INLINE Vec scaled(Vec x, Power power) {
    const Vec whole = each([&](int i) {
      const float bounded = x.x[i] < -126.0f ? -126.0f : x.x[i] > 127.0f ? 127.0f : x.x[i];
      return bounded == bounded ? __builtin_floorf(bounded) : 0.0f;
    });
    const Vec fraction = each([&](int i) {
      const float bounded = x.x[i] < -126.0f ? -126.0f : x.x[i] > 127.0f ? 127.0f : x.x[i];
      return bounded - whole.x[i];
    });
    const Vec p = power(fraction);
    // a factor of two apart, so that 2^127 and more are infinite by multiplication
    return each([&](int i) {
      const float factor = float_of(uint32_t(int(whole.x[i]) + 128) << 23);
      return x.x[i] < -126.0f ? 0.0f : p.x[i] * 0.5f * factor;
    });
  }

  static POLYATTN_INLINE uint64_t nonzero(const uint8_t* p, int n) {
    uint64_t bits = 0;
    for (int i = 0; i < n; ++i) bits |= uint64_t(p[i] != 0) << i;
    return bits;
  }
  static POLYATTN_INLINE uint64_t equal(const int64_t* p, int64_t id, int n) {
    uint64_t bits = 0;
    for (int i = 0; i < n; ++i) bits |= uint64_t(p[i] == id) << i;
    return bits;
  }

  static POLYATTN_INLINE void transpose(Vec (&r)[kLanes]) {
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < i; ++j) {
        const float x = r[i].x[j];
        r[i].x[j] = r[j].x[i];
        r[j].x[i] = x;
      }
    }
  }
  static POLYATTN_INLINE Vec lane_sums(Vec (&x)[kLanes]) {
    return across_lanes<Simd>(x, [](Vec a, Vec b) { return add(a, b); });
  }
  static POLYATTN_INLINE Vec lane_maxima(Vec (&x)[kLanes]) {
    return across_lanes<Simd>(x, [](Vec a, Vec b) { return max(a, b); });
  }

  // Units of a key, repeated; see simd_avx512.h.
  template <int R, class T>
  static POLYATTN_INLINE Vec repeated(const T* p) {
    return some_repeated<R>(p, int(kLanes / R * sizeof(float) / sizeof(T)));
  }
  template <int R, class T>
  static POLYATTN_INLINE Vec some_repeated(const T* p, int n) {
    Vec x{};
    for (int r = 0; r < R; ++r) std::memcpy(x.x + r * kLanes / R, p, size_t(n) * sizeof(T));
    return x;
  }
  template <class X>
  static POLYATTN_INLINE X quarter_sums(const X& a, const X& b, const X& c, const X& d) {
    const X* const all[] = {&a, &b, &c, &d};
    X y;
    for (int i = 0; i < kLanes; ++i) {
      const auto* const from = all[i % 4]->x + i / 4 * 4;
      y.x[i] = (from[0] + from[2]) + (from[1] + from[3]);
    }
    return y;
  }
  template <class X>
  static POLYATTN_INLINE X sum_quarters(const X (&x)[4]) {
    X y;
    for (int i = 0; i < kLanes; ++i) {
      const auto* const from = x[i / 4].x + i % 4;
      y.x[i] = (from[0] + from[8]) + (from[4] + from[12]);
    }
    return y;
  }
  // Of R vectors: see simd_avx512.h.
  template <int R>
  static POLYATTN_INLINE void unzip(Vec (&x)[R]) {
    Vec y[R];
    for (int i = 0; i < R * kLanes; ++i)
      y[i % 4 / (4 / R)].x[i / 4 * (4 / R) + i % (4 / R)] = x[i / kLanes].x[i % kLanes];
    for (int i = 0; i < R; ++i) x[i] = y[i];
  }
  static POLYATTN_INLINE void turn_quarters(Vec (&x)[4]) {
    Vec y[4];
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) std::memcpy(y[i].x + 4 * j, x[j].x + 4 * i, 4 * sizeof(float));
    }
    for (int i = 0; i < 4; ++i) x[i] = y[i];
  }

  // For tiles of a matrix unit; see simd_avx512bf16.h.
  static POLYATTN_INLINE Vec lower_halves(Vec x) {
    return each([&](int i) { return float_of(bits_of(x.x[i]) >> 16); });
  }
  static POLYATTN_INLINE void four_columns(const float* p, Vec (&x)[4]) {
    for (int c = 0; c < 4; ++c) x[c] = each([&](int i) { return p[i * kLanes + c]; });
  }
  // Even and odd elements in their order.
  static POLYATTN_INLINE void put_together(Vec& even, Vec& odd) {
    const auto element = [&](int i) { return (i % 2 ? odd : even).x[i / 2]; };
    const Vec low = each([&](int i) { return element(i); });
    odd = each([&](int i) { return element(kLanes + i); });
    even = low;
  }

  // Codes as units of two bfloat16; see simd_avx512bf16.h.
  static POLYATTN_INLINE uint32_t eighth(F8 x) {
    return uint32_t(kEighths.bits[x.bits & 0x7f] | (x.bits & 0x80) << 8);
  }
  static POLYATTN_INLINE Vec unit_codes(const F8* p, int n) {
    return each([&](int i) {
      const uint32_t low = 2 * i < n ? eighth(p[2 * i]) : 0, high = 2 * i + 1 < n ? eighth(p[2 * i + 1]) : 0;
      return float_of(high << 16 | low);
    });
  }
  static POLYATTN_INLINE Vec interleave(const F8* a, const F8* b, int n) {
    return each([&](int i) {
      const uint32_t low = a && i < n ? eighth(a[i]) : 0, high = b && i < n ? eighth(b[i]) : 0;
      return float_of(high << 16 | low);
    });
  }
  static POLYATTN_INLINE void two_unit_codes(const F8* p, Vec& a, Vec& b) {
    a = unit_codes(p, 2 * kLanes);
    b = unit_codes(p + 2 * kLanes, 2 * kLanes);
  }
  static POLYATTN_INLINE void units_by_eights(const F8* p, Vec& a, Vec& b) {
    for (int half = 0; half < 2; ++half) {
      (half ? b : a) = each([&](int i) {
        const F8* const two = p + i / 4 * 16 + half * 8 + i % 4 * 2;
        return float_of(eighth(two[1]) << 16 | eighth(two[0]));
      });
    }
  }
  static POLYATTN_INLINE void interleave_four(const F8* a, const F8* b, Vec (&x)[4]) {
    for (int v = 0; v < 4; ++v) {
      x[v] = each([&](int i) {
        const int column = i / 4 * 16 + 4 * v + i % 4;
        return float_of(eighth(b[column]) << 16 | eighth(a[column]));
      });
    }
  }
  static POLYATTN_INLINE void interleave_two(const F8* a, const F8* b, Vec& low, Vec& high) {
    low = interleave(a, b, kLanes);
    high = interleave(a + kLanes, b + kLanes, kLanes);
  }

  // Sums of products of integers, or two of these in each lane; see simd_avx512bf16.h.
  struct Ints {
    uint32_t x[kLanes];
  };
  template <class F>
  static POLYATTN_INLINE Ints each_int(F f) {
    Ints y;
    for (int i = 0; i < kLanes; ++i) y.x[i] = f(i);
    return y;
  }
  static POLYATTN_INLINE Ints ints(int32_t x) {
    return each_int([&](int) { return uint32_t(x); });
  }
  static POLYATTN_INLINE Ints load_ints(const int32_t* p) {
    return each_int([&](int i) { return uint32_t(p[i]); });
  }
  static POLYATTN_INLINE Ints add_ints(const Ints& a, const Ints& b) {
    return each_int([&](int i) { return a.x[i] + b.x[i]; });
  }
  static POLYATTN_INLINE int32_t sum_ints(const Ints& x) {
    uint32_t sum = 0;
    for (const uint32_t lane : x.x) sum += lane;
    return int32_t(sum);
  }
  static POLYATTN_INLINE Ints joined(Ints high, Ints low) {
    return each_int([&](int i) { return (high.x[i] << 8) + low.x[i]; });
  }
  static POLYATTN_INLINE Vec floats(Ints x) {
    return each([&](int i) { return float(int32_t(x.x[i])); });
  }
  static POLYATTN_INLINE Ints larger_size(Ints most, Vec x) {
    return each_int([&](int i) {
      const uint32_t size = bits_of(x.x[i]) & 0x7fffffffu;
      return size > most.x[i] ? size : most.x[i];
    });
  }
  static POLYATTN_INLINE float largest_size(Ints most) {
    uint32_t size = 0;
    for (const uint32_t lane : most.x) size = lane > size ? lane : size;
    return float_of(size);
  }
  static POLYATTN_INLINE Ints dot_words(Ints sum, Ints a, Ints b) {
    return each_int([&](int i) {
      const auto product = [&](int shift) {
        return uint32_t(int16_t(a.x[i] >> shift) * int32_t{int16_t(b.x[i] >> shift)});
      };
      return sum.x[i] + product(0) + product(16);
    });
  }
  static POLYATTN_INLINE uint32_t pair_of_words(int low, int high) {
    return uint32_t{uint16_t(high)} << 16 | uint16_t(low);
  }
  static POLYATTN_INLINE Ints two_words(const int16_t* p) {
    return each_int([&](int) { return pair_of_words(p[0], p[1]); });
  }
  static POLYATTN_INLINE Ints words(const int8_t* p, int n) {
    const auto code = [&](int i) { return i < n ? p[i] + 128 : 0; };
    return each_int([&](int i) { return pair_of_words(code(2 * i), code(2 * i + 1)); });
  }
  static POLYATTN_INLINE void words_by_eights(const int8_t* p, Ints& a, Ints& b) {
    for (int half = 0; half < 2; ++half) {
      (half ? b : a) = each_int([&](int i) {
        const int8_t* const two = p + i / 4 * 16 + half * 8 + i % 4 * 2;
        return pair_of_words(two[0] + 128, two[1] + 128);
      });
    }
  }
  static POLYATTN_INLINE void interleave_words(const int8_t* a, const int8_t* b, int n, Ints (&x)[4]) {
    for (int v = 0; v < 4; ++v) {
      x[v] = each_int([&](int i) {
        const int column = i / 4 * 16 + 4 * v + i % 4;
        return column < n ? pair_of_words(a[column] + 128, b[column] + 128) : 0;
      });
    }
  }
  static POLYATTN_INLINE void round_words(Vec x, int16_t* to, Ints& sum) {
    for (int i = 0; i < kLanes; ++i) {
      const int whole = int(__builtin_rintf(x.x[i]));
      to[i] = int16_t(whole);
      sum.x[i] += uint32_t(whole);
    }
  }
  static POLYATTN_INLINE void split(Vec x, int8_t* high, int8_t* low) {
    for (int i = 0; i < kLanes; ++i) {
      const int whole = int(__builtin_rintf(x.x[i])), h = (whole + 128) >> 8;
      high[i] = int8_t(h);
      low[i] = int8_t(whole - h * 256);
    }
  }
  static POLYATTN_INLINE Ints as_ints(Vec x) {
    return each_int([&](int i) { return bits_of(x.x[i]); });
  }
  static POLYATTN_INLINE void places_of_bytes(const int8_t* p, float* to) {
    for (int i = 0; i < 4 * kLanes; ++i)
      to[i] = float_of(uint32_t{uint8_t(p[i % kLanes])} << 8 * (i / kLanes));
  }
  static POLYATTN_INLINE void zip_four(Vec (&x)[4]) {
    Vec y[4];
    for (int i = 0; i < 4 * kLanes; ++i) y[i / kLanes].x[i % kLanes] = x[i % 4].x[i / 4];
    for (int i = 0; i < 4; ++i) x[i] = y[i];
  }
  // Units of two bfloat16; see simd_avx512bf16.h.
  static POLYATTN_INLINE float unit(float low, float high) {
    BF16 first, second;
    from_float(low, &first);
    from_float(high, &second);
    return float_of(uint32_t{second.bits} << 16 | first.bits);
  }
  static POLYATTN_INLINE Vec some_units(const BF16* p, int n) {
    Vec x{};
    if (n > 0) std::memcpy(x.x, p, size_t(n) * sizeof *p);
    return x;
  }
  static POLYATTN_INLINE Vec dot_pairs(Vec sum, Vec a, Vec b) {
    return each([&](int i) {
      const uint32_t x = bits_of(a.x[i]), y = bits_of(b.x[i]);
      const float high = float_of(x & 0xffff0000u) * float_of(y & 0xffff0000u);
      return sum.x[i] + high + float_of(x << 16) * float_of(y << 16);
    });
  }
  static POLYATTN_INLINE Vec interleave(const BF16* a, const BF16* b, int n) {
    return each([&](int i) {
      const uint32_t low = a && i < n ? a[i].bits : 0, high = b && i < n ? b[i].bits : 0;
      return float_of(high << 16 | low);
    });
  }
  static POLYATTN_INLINE void interleave_two(const BF16* a, const BF16* b, Vec& low, Vec& high) {
    low = interleave(a, b, kLanes);
    high = interleave(a + kLanes, b + kLanes, kLanes);
  }
  static POLYATTN_INLINE Vec pairs(Vec low, Vec high) {
    return each([&](int i) {
      const int from = 2 * i % kLanes;
      return i < kLanes / 2 ? unit(low.x[from], low.x[from + 1]) : unit(high.x[from], high.x[from + 1]);
    });
  }
  static POLYATTN_INLINE Vec zip(Vec a, Vec b) {
    return each([&](int i) { return unit(a.x[i], b.x[i]); });
  }
};

}  // namespace polyattn::POLYATTN_NAMESPACE

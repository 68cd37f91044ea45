// Four lanes by the compiler's vector types: NEON on aarch64 (fused multiply-add, 32 registers),
// plain code elsewhere.
#pragma once

#include <cmath>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernel/elements.h"
#include "kernel/exponential.h"
#include "kernel/lanes.h"

namespace polyattn::POLYATTN_NAMESPACE {

struct Simd {
  typedef float Vec __attribute__((vector_size(16)));
  typedef int32_t Int __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
#if defined(__aarch64__)
  static constexpr int kRowBlock = 6, kColumnBlock = 4;  // 24 sums, 4 operands, 1 broadcast
#else
  static constexpr int kRowBlock = 4, kColumnBlock = 2;
#endif
  static constexpr int kAheadRows = 8, kFetchHint = 3;  // see simd_avx2.h
  static constexpr bool kPagesInTurn = false;

  static POLYATTN_INLINE Vec zero() { return Vec{}; }
  static POLYATTN_INLINE Vec fill(float x) { return Vec{x, x, x, x}; }
  static POLYATTN_INLINE Vec load(const float* p) {
    Vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  // Two vectors of elements as the even and the odd ones; and the order that they had.
  static POLYATTN_INLINE void take_apart(const BF16* p, Vec& even, Vec& odd) {
    Int x;
    std::memcpy(&x, p, sizeof x);
    even = (Vec)(x << 16);
    odd = (Vec)(x & int32_t(0xffff0000u));
  }
  static POLYATTN_INLINE void put_together(Vec& even, Vec& odd) {
    const Vec low{even[0], odd[0], even[1], odd[1]};
    odd = Vec{even[2], odd[2], even[3], odd[3]};
    even = low;
  }
  template <class T>
  static POLYATTN_INLINE Vec load(const T* p) {
    return Vec{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
  }
  template <class T>
  static POLYATTN_INLINE Vec load_some(const T* p, int n) {
    Vec x{};
    for (int i = 0; i < n; ++i) x[i] = to_float(p[i]);
    return x;
  }
  static POLYATTN_INLINE void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
  template <class T>
  static POLYATTN_INLINE void store(T* p, Vec x) {
    for (int i = 0; i < 4; ++i) from_float(x[i], p + i);
  }
  template <class T>
  static POLYATTN_INLINE void store_some(T* p, Vec x, int n) {
    for (int i = 0; i < n; ++i) from_float(x[i], p + i);
  }

  static POLYATTN_INLINE Vec add(Vec a, Vec b) { return a + b; }
  static POLYATTN_INLINE Vec sub(Vec a, Vec b) { return a - b; }
  static POLYATTN_INLINE Vec mul(Vec a, Vec b) { return a * b; }
  static POLYATTN_INLINE Vec div(Vec a, Vec b) { return a / b; }
  static POLYATTN_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__aarch64__)
    return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
  }
  static POLYATTN_INLINE Vec where(Int mask, Vec yes, Vec no) {
    return (Vec)(((Int)yes & mask) | ((Int)no & ~mask));
  }
  // the second operand where one is NaN
  static POLYATTN_INLINE Vec max(Vec a, Vec b) { return where(a > b, a, b); }
  static POLYATTN_INLINE Vec min(Vec a, Vec b) { return where(a < b, a, b); }
  static POLYATTN_INLINE Vec abs(Vec a) { return (Vec)((Int)a & 0x7fffffff); }
  static POLYATTN_INLINE Vec less_select(Vec a, Vec b, Vec yes, Vec no) { return where(a < b, yes, no); }
  static POLYATTN_INLINE Vec select(uint64_t bits, Vec yes, Vec no) {
    const int b = int(bits & 15);
    const Int lane{1, 2, 4, 8};
    return where((Int{b, b, b, b} & lane) == lane, yes, no);
  }
  // -x in the lanes whose bits are set
  static POLYATTN_INLINE Vec negate(uint64_t bits, Vec x) {
    const int b = int(bits & 15);
    const Int signs = (Int{b, b, b, b} << Int{31, 30, 29, 28}) & INT32_MIN;
    return (Vec)((Int)x ^ signs);
  }
  // sum + x there, the sum elsewhere
  static POLYATTN_INLINE Vec add_some(Vec sum, uint64_t bits, Vec x) { return sum + select(bits, x, Vec{}); }
  // sums[i] += lane i
  static POLYATTN_INLINE void add_lanes(Vec x, double* sums) {
    for (int i = 0; i < kLanes; ++i) sums[i] += double(x[i]);
  }
  // How many zeros were met, lane by lane.
  using Tally = Int;
  static POLYATTN_INLINE Tally no_tally() { return Tally{}; }
  static POLYATTN_INLINE Tally tally_zeros(Tally t, Vec x) { return t - (x == zero()); }
  static POLYATTN_INLINE int64_t sum_tally(Tally t) {
    return int64_t{t[0]} + int64_t{t[1]} + int64_t{t[2]} + int64_t{t[3]};
  }
  static POLYATTN_INLINE bool any_nan(Vec a) {
    const Int nan = a != a;
    return (nan[0] | nan[1] | nan[2] | nan[3]) != 0;
  }
  static POLYATTN_INLINE float sum(Vec a) { return (a[0] + a[2]) + (a[1] + a[3]); }
  static POLYATTN_INLINE float largest(Vec a) {
    const float x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
    return x > y ? x : y;
  }
  static POLYATTN_INLINE Vec ramp() { return Vec{0, 1, 2, 3}; }

  // 2^x: 0 below the normal numbers and for -inf, NaN for NaN.
  template <int kDegree>
  static POLYATTN_INLINE Vec exp2(Vec x) {
    const Vec low = fill(-126.0f), high = fill(127.0f);
    Vec bounded = where(x < low, low, x);
    bounded = where(bounded > high, high, bounded);
    const Vec safe = where(bounded == bounded, bounded, zero());
    Int whole = __builtin_convertvector(safe, Int);  // towards zero
    whole += (Int)(__builtin_convertvector(whole, Vec) > safe);
    const Vec p = power_of_fraction<Simd, kDegree>(bounded - __builtin_convertvector(whole, Vec));
    // a factor of two apart, so that 2^127 and more are infinite by multiplication
    const Vec power = (Vec)((whole + 128) << 23);
    return where(x < fill(-126.0f), zero(), p * 0.5f * power);
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

  static POLYATTN_INLINE void transpose(Vec (&r)[4]) {
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < i; ++j) {
        const float x = r[i][j];
        r[i][j] = r[j][i];
        r[j][i] = x;
      }
    }
  }

  static POLYATTN_INLINE Vec lane_sums(Vec (&x)[kLanes]) {
    return across_lanes<Simd>(x, [](Vec a, Vec b) { return add(a, b); });
  }
  static POLYATTN_INLINE Vec lane_maxima(Vec (&x)[kLanes]) {
    return across_lanes<Simd>(x, [](Vec a, Vec b) { return max(a, b); });
  }
};

}  // namespace polyattn::POLYATTN_NAMESPACE

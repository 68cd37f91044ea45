// AVX2 with FMA and F16C: 8 lanes, 16 registers.
#pragma once

#include <immintrin.h>

#include "kernel/elements.h"
#include "kernel/exponential.h"
#include "kernel/lanes.h"

namespace polyattn::POLYATTN_NAMESPACE {

struct Simd {
  using Vec = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kRowBlock = 6, kColumnBlock = 2;  // 12 sums, 2 operands, 1 broadcast
  // How a few rows fetch keys ahead: so many rows before, into the first cache (3) or one behind it (1). Measured
  // on a Zen 3.
  static constexpr int kAheadRows = 8, kFetchHint = 3;
  static constexpr bool kPagesInTurn = false;

  static POLYATTN_INLINE Vec zero() { return _mm256_setzero_ps(); }
  static POLYATTN_INLINE Vec fill(float x) { return _mm256_set1_ps(x); }
  static POLYATTN_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static POLYATTN_INLINE Vec load(const BF16* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  // Two vectors of elements as the even and the odd ones; and the order that they had.
  static POLYATTN_INLINE void take_apart(const BF16* p, Vec& even, Vec& odd) {
    const __m256i x = _mm256_loadu_si256((const __m256i*)p);
    even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000u))));
  }
  static POLYATTN_INLINE void put_together(Vec& even, Vec& odd) {
    const Vec low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    even = _mm256_permute2f128_ps(low, high, 0x20);
    odd = _mm256_permute2f128_ps(low, high, 0x31);
  }
  static POLYATTN_INLINE Vec load(const F16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
  }
  static POLYATTN_INLINE Vec load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  }
  static POLYATTN_INLINE Vec load(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  }
  static POLYATTN_INLINE Vec load(const int16_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
  // float8_e4m3fn as halves, whose exponents are 8 more
  static POLYATTN_INLINE Vec load(const F8* p) {
    const __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), top = _mm_set1_epi16(0x3f80);
    const __m128i bits = _mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16(int16_t(0xbf80)));
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(bits, top), top);
    const __m128i half = _mm_or_si128(bits, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256));
  }
  template <class T>
  static POLYATTN_INLINE Vec load_some(const T* p, int n) {
    T values[kLanes] = {};
    for (int i = 0; i < n; ++i) values[i] = p[i];
    return load(values);
  }
  static POLYATTN_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
  static POLYATTN_INLINE void store(BF16* p, Vec x) {
    float values[kLanes];
    store(values, x);
    for (int i = 0; i < kLanes; ++i) from_float(values[i], p + i);
  }
  static POLYATTN_INLINE void store(F16* p, Vec x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  template <class T>
  static POLYATTN_INLINE void store_some(T* p, Vec x, int n) {
    float values[kLanes];
    store(values, x);
    for (int i = 0; i < n; ++i) from_float(values[i], p + i);
  }

  static POLYATTN_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static POLYATTN_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static POLYATTN_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static POLYATTN_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  static POLYATTN_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  // the second operand where one is NaN
  static POLYATTN_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  static POLYATTN_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
  static POLYATTN_INLINE Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static POLYATTN_INLINE Vec less_select(Vec a, Vec b, Vec yes, Vec no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static POLYATTN_INLINE Vec select(uint64_t bits, Vec yes, Vec no) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(int(bits & 0xff)), lane);
    return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane)));
  }
  // -x in the lanes whose bits are set
  static POLYATTN_INLINE Vec negate(uint64_t bits, Vec x) {
    return _mm256_xor_ps(x, _mm256_and_ps(bits_on_top(bits), fill(-0.0f)));
  }
  // sum + x there, the sum elsewhere
  static POLYATTN_INLINE Vec add_some(Vec sum, uint64_t bits, Vec x) {
    return _mm256_add_ps(sum, _mm256_blendv_ps(zero(), x, bits_on_top(bits)));
  }
  // sums[i] += lane i
  static POLYATTN_INLINE void add_lanes(Vec x, double* sums) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    _mm256_storeu_pd(sums, _mm256_add_pd(_mm256_loadu_pd(sums), low));
    _mm256_storeu_pd(sums + 4, _mm256_add_pd(_mm256_loadu_pd(sums + 4), high));
  }
  // How many zeros were met, lane by lane.
  using Tally = __m256i;
  static POLYATTN_INLINE Tally no_tally() { return _mm256_setzero_si256(); }
  static POLYATTN_INLINE Tally tally_zeros(Tally t, Vec x) {
    return _mm256_sub_epi32(t, _mm256_castps_si256(_mm256_cmp_ps(x, zero(), _CMP_EQ_OQ)));
  }
  static POLYATTN_INLINE int64_t sum_tally(Tally t) {
    int32_t counts[kLanes];
    _mm256_storeu_si256((__m256i*)counts, t);
    int64_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += counts[i];
    return sum;
  }
  static POLYATTN_INLINE bool any_nan(Vec a) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)) != 0;
  }
  static POLYATTN_INLINE float sum(Vec a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  static POLYATTN_INLINE Vec ramp() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }

  // 2^x: 0 below the normal numbers and for -inf, NaN for NaN.
  template <int kDegree>
  static POLYATTN_INLINE Vec exp2(Vec x) {
    const Vec bounded = _mm256_max_ps(_mm256_set1_ps(-126.0f), _mm256_min_ps(_mm256_set1_ps(127.0f), x));
    const Vec whole = _mm256_floor_ps(bounded);
    const Vec p = power_of_fraction<Simd, kDegree>(_mm256_sub_ps(bounded, whole));
    // a factor of two apart, so that 2^127 and more are infinite by multiplication; NaN stays NaN
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(128));
    const Vec power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    const Vec y = _mm256_mul_ps(_mm256_mul_ps(p, _mm256_set1_ps(0.5f)), power);
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_LT_OQ), y);
  }

  static POLYATTN_INLINE uint64_t nonzero(const uint8_t* p, int n) {
    uint64_t bits = 0;
    int i = 0;
    for (; i + 32 <= n; i += 32) {
      const __m256i x = _mm256_loadu_si256((const __m256i*)(p + i));
      const uint32_t zeros = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, _mm256_setzero_si256())));
      bits |= uint64_t(~zeros) << i;
    }
    for (; i < n; ++i) bits |= uint64_t(p[i] != 0) << i;
    return bits;
  }
  static POLYATTN_INLINE uint64_t equal(const int64_t* p, int64_t id, int n) {
    uint64_t bits = 0;
    for (int i = 0; i < n; ++i) bits |= uint64_t(p[i] == id) << i;
    return bits;
  }

  // Rows of 32-bit units to columns.
  static POLYATTN_INLINE void transpose(Vec (&r)[8]) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      for (int j = 0; j < 2; ++j) {
        r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
        r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
      }
    }
    for (int j = 0; j < 4; ++j) {
      t[j] = _mm256_permute2f128_ps(r[j], r[j + 4], 0x20);
      t[j + 4] = _mm256_permute2f128_ps(r[j], r[j + 4], 0x31);
    }
    for (int j = 0; j < 8; ++j) r[j] = t[j];
  }

  static POLYATTN_INLINE Vec lane_sums(Vec (&x)[kLanes]) {
    return across_lanes<Simd>(x, [](Vec a, Vec b) { return add(a, b); });
  }
  static POLYATTN_INLINE Vec lane_maxima(Vec (&x)[kLanes]) {
    return across_lanes<Simd>(x, [](Vec a, Vec b) { return max(a, b); });
  }

 private:
  // Bit i as the sign of lane i.
  static POLYATTN_INLINE Vec bits_on_top(uint64_t bits) {
    const __m256i to_top = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    return _mm256_castsi256_ps(_mm256_sllv_epi32(_mm256_set1_epi32(int(bits)), to_top));
  }
};

}  // namespace polyattn::POLYATTN_NAMESPACE

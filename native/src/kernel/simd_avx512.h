// AVX-512 (F, BW, DQ, VL): 16 lanes, 32 registers.
#pragma once

#include <immintrin.h>

#include "kernel/elements.h"
#include "kernel/exponential.h"

namespace polyattn::POLYATTN_NAMESPACE {

struct Simd {
  using Vec = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kRowBlock = 6, kColumnBlock = 4;  // 24 sums, 4 operands, 1 broadcast
  // How a few rows fetch keys ahead: so many rows before, into the first cache (3) or one behind it (1). Measured
  // on a Zen 4.
  static constexpr int kAheadRows = 64, kFetchHint = 1;
  static constexpr bool kPagesInTurn = true;  // where the processor gains by it

  static POLYATTN_INLINE Vec zero() { return _mm512_setzero_ps(); }
  static POLYATTN_INLINE Vec fill(float x) { return _mm512_set1_ps(x); }
  static POLYATTN_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static POLYATTN_INLINE Vec load(const BF16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
  // Two vectors of elements as the even and the odd ones; and the order that they had.
  static POLYATTN_INLINE void take_apart(const BF16* p, Vec& even, Vec& odd) {
    const __m512i x = _mm512_loadu_si512(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000u))));
  }
  static POLYATTN_INLINE void put_together(Vec& even, Vec& odd) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const Vec low = _mm512_permutex2var_ps(even, first, odd);
    odd = _mm512_permutex2var_ps(even, _mm512_add_epi32(first, _mm512_set1_epi32(8)), odd);
    even = low;
  }
  static POLYATTN_INLINE Vec load(const F16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
  }
  static POLYATTN_INLINE Vec load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
  static POLYATTN_INLINE Vec load(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
  static POLYATTN_INLINE Vec load(const int16_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)p)));
  }
  static POLYATTN_INLINE Vec load(const F8* p) { return eighth(_mm_loadu_si128((const __m128i*)p)); }
  static POLYATTN_INLINE Vec load_some(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static POLYATTN_INLINE Vec load_some(const BF16* p, int n) {
    return widen(_mm256_maskz_loadu_epi16(first(n), p));
  }
  static POLYATTN_INLINE Vec load_some(const F16* p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
  }
  static POLYATTN_INLINE Vec load_some(const int8_t* p, int n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p)));
  }
  static POLYATTN_INLINE Vec load_some(const F8* p, int n) {
    return eighth(_mm_maskz_loadu_epi8(first(n), p));
  }
  static POLYATTN_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
  static POLYATTN_INLINE void store(BF16* p, Vec x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
  static POLYATTN_INLINE void store(F16* p, Vec x) { _mm256_storeu_si256((__m256i*)p, half(x)); }
  static POLYATTN_INLINE void store_some(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static POLYATTN_INLINE void store_some(BF16* p, Vec x, int n) {
    _mm256_mask_storeu_epi16(p, first(n), narrow(x));
  }
  static POLYATTN_INLINE void store_some(F16* p, Vec x, int n) {
    _mm256_mask_storeu_epi16(p, first(n), half(x));
  }

  static POLYATTN_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static POLYATTN_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static POLYATTN_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static POLYATTN_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static POLYATTN_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  // the second operand where one is NaN
  static POLYATTN_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static POLYATTN_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
  static POLYATTN_INLINE Vec abs(Vec a) { return _mm512_abs_ps(a); }
  static POLYATTN_INLINE Vec less_select(Vec a, Vec b, Vec yes, Vec no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
  }
  static POLYATTN_INLINE Vec select(uint64_t bits, Vec yes, Vec no) {
    return _mm512_mask_blend_ps(__mmask16(bits), no, yes);
  }
  // -x in the lanes whose bits are set
  static POLYATTN_INLINE Vec negate(uint64_t bits, Vec x) {
    return _mm512_mask_xor_ps(x, __mmask16(bits), x, fill(-0.0f));
  }
  // sum + x there, the sum elsewhere
  static POLYATTN_INLINE Vec add_some(Vec sum, uint64_t bits, Vec x) {
    return _mm512_mask_add_ps(sum, __mmask16(bits), sum, x);
  }
  // sums[i] += lane i
  static POLYATTN_INLINE void add_lanes(Vec x, double* sums) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    _mm512_storeu_pd(sums, _mm512_add_pd(_mm512_loadu_pd(sums), low));
    _mm512_storeu_pd(sums + 8, _mm512_add_pd(_mm512_loadu_pd(sums + 8), high));
  }
  // How many zeros were met, lane by lane.
  using Tally = __m512i;
  static POLYATTN_INLINE Tally no_tally() { return _mm512_setzero_si512(); }
  static POLYATTN_INLINE Tally tally_zeros(Tally t, Vec x) {
    return _mm512_mask_add_epi32(t, _mm512_cmp_ps_mask(x, zero(), _CMP_EQ_OQ), t, _mm512_set1_epi32(1));
  }
  static POLYATTN_INLINE int64_t sum_tally(Tally t) { return _mm512_reduce_add_epi32(t); }
  static POLYATTN_INLINE bool any_nan(Vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }
  static POLYATTN_INLINE float sum(Vec a) { return _mm512_reduce_add_ps(a); }
  static POLYATTN_INLINE Vec ramp() {
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }

  // 2^x: 0 far below and for -inf, NaN for NaN; polynomials in exponential.h.
  template <int kDegree>
  static POLYATTN_INLINE Vec exp2(Vec x) {
    const Vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    // of -inf the fraction is NaN, and NaN scaled by 2^-inf is 0: the instruction is defined so
    return _mm512_scalef_ps(power_of_fraction<Simd, kDegree>(_mm512_sub_ps(x, whole)), whole);
  }

  // Bit i tells whether p[i] is not 0, for n <= 64 bytes.
  static POLYATTN_INLINE uint64_t nonzero(const uint8_t* p, int n) {
    __mmask64 valid = n >= 64 ? ~0ull : (1ull << n) - 1;
    __m512i x = _mm512_maskz_loadu_epi8(valid, p);
    return _mm512_test_epi8_mask(x, x);
  }
  static POLYATTN_INLINE uint64_t equal(const int64_t* p, int64_t id, int n) {
    __m512i wanted = _mm512_set1_epi64(id);
    uint64_t bits = 0;
    for (int i = 0; i < n; i += 8) {
      __mmask8 valid = n - i >= 8 ? 0xff : __mmask8((1u << (n - i)) - 1);
      __m512i x = _mm512_maskz_loadu_epi64(valid, p + i);
      bits |= uint64_t(_mm512_mask_cmpeq_epi64_mask(valid, x, wanted)) << i;
    }
    return bits;
  }

  // 16 / R units of a key as it is stored, repeated R times: 2 or 4; the same of the first n elements, the others 0.
  template <int R, class T>
  static POLYATTN_INLINE Vec repeated(const T* p) {
    const float* const units = reinterpret_cast<const float*>(p);
    if constexpr (R == 4) return _mm512_broadcast_f32x4(_mm_loadu_ps(units));
    return _mm512_broadcast_f32x8(_mm256_loadu_ps(units));
  }
  template <int R>
  static POLYATTN_INLINE Vec some_repeated(const float* p, int n) {
    const __m256 x = _mm256_maskz_loadu_ps(__mmask8(first(n)), p);
    return R == 4 ? _mm512_broadcast_f32x4(_mm256_castps256_ps128(x)) : _mm512_broadcast_f32x8(x);
  }
  template <int R>
  static POLYATTN_INLINE Vec some_repeated(const BF16* p, int n) {
    const __m256 x = _mm256_castsi256_ps(_mm256_maskz_loadu_epi16(first(n), p));
    return R == 4 ? _mm512_broadcast_f32x4(_mm256_castps256_ps128(x)) : _mm512_broadcast_f32x8(x);
  }
  // The sums over the quarters of four vectors: lane i of a quarter is that of the i-th vector.
  static POLYATTN_INLINE Vec quarter_sums(Vec a, Vec b, Vec c, Vec d) {
    return quarters(a, b, c, d, [](Vec x, Vec y) { return add(x, y); });
  }
  // The quarters of each of four vectors, summed: quarter i is that of the i-th vector.
  static POLYATTN_INLINE Vec sum_quarters(const Vec (&x)[4]) {
    return of_quarters(x[0], x[1], x[2], x[3], [](Vec a, Vec b) { return add(a, b); });
  }
  // Of the 64 lanes of four vectors number 4 * n + i to lane n of x[i].
  static POLYATTN_INLINE void unzip(Vec (&x)[4]) {
    const auto low = [](Vec a, Vec b) { return _mm512_castps_pd(_mm512_unpacklo_ps(a, b)); };
    const auto high = [](Vec a, Vec b) { return _mm512_castps_pd(_mm512_unpackhi_ps(a, b)); };
    const __m512d a = low(x[0], x[1]), b = low(x[2], x[3]), c = high(x[0], x[1]), d = high(x[2], x[3]);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const auto ordered = [&](__m512d y) { return _mm512_permutexvar_ps(order, _mm512_castpd_ps(y)); };
    x[0] = ordered(_mm512_unpacklo_pd(a, b));
    x[1] = ordered(_mm512_unpackhi_pd(a, b));
    x[2] = ordered(_mm512_unpacklo_pd(c, d));
    x[3] = ordered(_mm512_unpackhi_pd(c, d));
  }
  // Of the sixteen pairs of lanes of two vectors the even ones to x[0], the odd ones to x[1].
  static POLYATTN_INLINE void unzip(Vec (&x)[2]) {
    const __m512d a = _mm512_castps_pd(x[0]), b = _mm512_castps_pd(x[1]);
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    const __m512i odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
    x[0] = _mm512_castpd_ps(_mm512_permutex2var_pd(a, even, b));
    x[1] = _mm512_castpd_ps(_mm512_permutex2var_pd(a, odd, b));
  }
  // Quarter i of vector j to quarter j of vector i.
  static POLYATTN_INLINE void turn_quarters(Vec (&x)[4]) {
    const Vec a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
    const Vec c = _mm512_shuffle_f32x4(x[0], x[1], 0xee), d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
    x[0] = _mm512_shuffle_f32x4(a, b, 0x88);
    x[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
    x[2] = _mm512_shuffle_f32x4(c, d, 0x88);
    x[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }

  // Rows of 32-bit units to columns.
  static POLYATTN_INLINE void transpose(Vec (&r)[16]) {
    __m512 t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
#pragma GCC unroll 16
      for (int j = 0; j < 2; ++j) {
        __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
        r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 8) {
#pragma GCC unroll 16
      for (int j = 0; j < 4; ++j) {
        t[i + j] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0x88);
        t[i + j + 4] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0xdd);
      }
    }
#pragma GCC unroll 16
    for (int j = 0; j < 8; ++j) {
      r[j] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88);
      r[j + 8] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0xdd);
    }
  }

  // Lane i of the result is the sum (the largest) of the lanes of x[i].
  static POLYATTN_INLINE Vec lane_sums(Vec (&x)[16]) {
    return across(x, [](Vec a, Vec b) { return add(a, b); });
  }
  static POLYATTN_INLINE Vec lane_maxima(Vec (&x)[16]) {
    return across(x, [](Vec a, Vec b) { return max(a, b); });
  }

 protected:
  // What lanes i and i + 2 of each quarter are joined by takes a blend in the place of a second shuffle.
  template <class Join>
  static POLYATTN_INLINE Vec quarters(Vec a, Vec b, Vec c, Vec d, Join join) {
    const auto two = [&](Vec x, Vec y) {
      return join(_mm512_mask_blend_ps(0xcccc, x, y), _mm512_shuffle_ps(x, y, 0x4e));
    };
    const Vec x = two(a, b), y = two(c, d);
    return join(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd));
  }
  template <class Join>
  static POLYATTN_INLINE Vec of_quarters(Vec a, Vec b, Vec c, Vec d, Join join) {
    const auto two = [&](Vec x, Vec y) {
      return join(_mm512_mask_blend_ps(0xff00, x, y), _mm512_shuffle_f32x4(x, y, 0x4e));
    };
    const Vec x = two(a, b), y = two(c, d);
    return join(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  }
  // A transposition that joins on its way.
  template <class Join>
  static POLYATTN_INLINE Vec across(Vec (&x)[16], Join join) {
    Vec z[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) z[i] = quarters(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3], join);
    const Vec low = join(_mm512_shuffle_f32x4(z[0], z[1], 0x88), _mm512_shuffle_f32x4(z[0], z[1], 0xdd));
    const Vec high = join(_mm512_shuffle_f32x4(z[2], z[3], 0x88), _mm512_shuffle_f32x4(z[2], z[3], 0xdd));
    return join(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  }

  static POLYATTN_INLINE __mmask16 first(int n) { return __mmask16((1u << n) - 1); }
  static POLYATTN_INLINE Vec widen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  // float8_e4m3fn as halves, whose exponents are 8 more
  static POLYATTN_INLINE Vec eighth(__m128i codes) {
    const __m256i x = _mm256_cvtepi8_epi16(codes), top = _mm256_set1_epi16(0x3f80);
    const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(int16_t(0xbf80)));
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(bits, top), top);
    const __m256i half = _mm256_mask_blend_epi16(nan, bits, _mm256_set1_epi16(0x7e00));
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256));
  }
  static POLYATTN_INLINE __m256i half(Vec x) {
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static POLYATTN_INLINE __m256i narrow(Vec x) {  // to nearest even; NaN stays NaN
    __m512i u = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
    rounded = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), rounded, quiet);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
};

}  // namespace polyattn::POLYATTN_NAMESPACE

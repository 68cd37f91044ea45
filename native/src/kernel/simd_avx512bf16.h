// AVX-512 with the dot products of bfloat16 pairs and of bytes, and permutations of bytes (VBMI).
#pragma once

#include "kernel/simd_avx512.h"

namespace polyattn::POLYATTN_NAMESPACE {

struct PairSimd : Simd {
  // 32 codes as sixteen units; those from `n` on are 0.
  static POLYATTN_INLINE Vec unit_codes(const F8* p, int n) {
    const __m256i codes =
        n >= 32 ? _mm256_loadu_si256((const __m256i*)p) : _mm256_maskz_loadu_epi8((__mmask32{1} << n) - 1, p);
    return _mm512_castsi512_ps(eighths(codes));
  }
  // 64 codes as two vectors of units.
  static POLYATTN_INLINE void two_unit_codes(const F8* p, Vec& a, Vec& b) {
    pair_eighths(_mm512_permutexvar_epi64(spread(), _mm512_loadu_si512(p)), a, b);
  }
  // The same in the order of few_codes.h: of each sixteen codes the first eight, and the last eight.
  static POLYATTN_INLINE void units_by_eights(const F8* p, Vec& a, Vec& b) {
    pair_eighths(_mm512_loadu_si512(p), a, b);
  }
  // As for bfloat16, below.
  static POLYATTN_INLINE Vec interleave(const F8* a, const F8* b, int n) {
    const __m256i none = _mm256_setzero_si256();
    const __mmask16 valid = __mmask16((1u << n) - 1);
    const __m512i low = eighths(a ? _mm256_castsi128_si256(_mm_maskz_loadu_epi8(valid, a)) : none);
    const __m512i high = eighths(b ? _mm256_castsi128_si256(_mm_maskz_loadu_epi8(valid, b)) : none);
    return _mm512_castsi512_ps(_mm512_permutex2var_epi16(low, zipped(0), high));
  }
  // 64 columns: of each 16 the first four, the next ones, and so on. Sums are in order after turn_quarters().
  static POLYATTN_INLINE void interleave_four(const F8* a, const F8* b, Vec (&x)[4]) {
    const __m512i first = _mm512_loadu_si512(a), second = _mm512_loadu_si512(b);
    pair_eighths(_mm512_unpacklo_epi8(first, second), x[0], x[1]);
    pair_eighths(_mm512_unpackhi_epi8(first, second), x[2], x[3]);
  }
  static POLYATTN_INLINE void interleave_two(const F8* a, const F8* b, Vec& low, Vec& high) {
    const __m512i x = eighths(_mm256_loadu_si256((const __m256i*)a));
    const __m512i y = eighths(_mm256_loadu_si256((const __m256i*)b));
    low = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, zipped(0), y));
    high = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, zipped(16), y));
  }

  // Sixteen sums of products of integers, or 32 of these, of 16 bits.
  using Ints = __m512i;
  using Simd::quarter_sums;
  using Simd::sum_quarters;
  static POLYATTN_INLINE Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
  static POLYATTN_INLINE Ints load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
  static POLYATTN_INLINE Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static POLYATTN_INLINE int32_t sum_ints(Ints x) { return _mm512_reduce_add_epi32(x); }
  static POLYATTN_INLINE Ints joined(Ints high, Ints low) {
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
  }
  static POLYATTN_INLINE Vec floats(Ints x) { return _mm512_cvtepi32_ps(x); }
  // The larger sizes, NaN the largest of all; the largest of them.
  static POLYATTN_INLINE Ints larger_size(Ints most, Vec x) {
    return _mm512_max_epu32(most, _mm512_castps_si512(abs(x)));
  }
  static POLYATTN_INLINE float largest_size(Ints most) {
    return __builtin_bit_cast(float, _mm512_reduce_max_epu32(most));
  }
  // Of the intrinsic GCC 12 makes copies of the sums.
  static POLYATTN_INLINE Ints dot_words(Ints sum, Ints a, Ints b) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }
  static POLYATTN_INLINE Ints two_words(const int16_t* p) {
    int32_t two;
    std::memcpy(&two, p, sizeof two);
    return _mm512_set1_epi32(two);
  }
  // Up to 32 codes + 128; those from `n` on are any.
  static POLYATTN_INLINE Ints words(const int8_t* p, int n) {
    const __m256i sign = _mm256_set1_epi8(int8_t(0x80));
    const __m256i codes =
        n >= 32 ? _mm256_loadu_si256((const __m256i*)p) : _mm256_maskz_loadu_epi8((__mmask32{1} << n) - 1, p);
    return _mm512_cvtepu8_epi16(_mm256_xor_si256(codes, sign));
  }
  // 64 codes + 128 in the order of few_codes.h.
  static POLYATTN_INLINE void words_by_eights(const int8_t* p, Ints& a, Ints& b) {
    pair_words(unsign(_mm512_loadu_si512(p)), a, b);
  }
  // Two rows of up to 64 codes + 128 as pairs of words, columns in the order of interleave_four().
  static POLYATTN_INLINE void interleave_words(const int8_t* a, const int8_t* b, int n, Ints (&x)[4]) {
    const auto row = [n](const int8_t* p) {
      return unsign(n >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((__mmask64{1} << n) - 1, p));
    };
    const __m512i first = row(a), second = row(b);
    pair_words(_mm512_unpacklo_epi8(first, second), x[0], x[1]);
    pair_words(_mm512_unpackhi_epi8(first, second), x[2], x[3]);
  }
  // As for floats; see simd_avx512.h.
  static POLYATTN_INLINE Ints quarter_sums(Ints a, Ints b, Ints c, Ints d) {
    const auto add = [](Vec x, Vec y) { return as_floats(_mm512_add_epi32(as_ints(x), as_ints(y))); };
    return as_ints(quarters(as_floats(a), as_floats(b), as_floats(c), as_floats(d), add));
  }
  static POLYATTN_INLINE Ints sum_quarters(const Ints (&x)[4]) {
    const auto add = [](Vec a, Vec b) { return as_floats(_mm512_add_epi32(as_ints(a), as_ints(b))); };
    return as_ints(of_quarters(as_floats(x[0]), as_floats(x[1]), as_floats(x[2]), as_floats(x[3]), add));
  }
  // Rounds numbers whose sizes are below 32,768; adds them up.
  static POLYATTN_INLINE void round_words(Vec x, int16_t* to, Ints& sum) {
    const __m512i whole = _mm512_cvtps_epi32(x);
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(whole));
    sum = _mm512_add_epi32(sum, whole);
  }
  // Numbers as 256 * high + low, both signed bytes.
  static POLYATTN_INLINE void split(Vec x, int8_t* high, int8_t* low) {
    const __m512i whole = _mm512_cvtps_epi32(x);
    const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128((__m128i*)high, _mm512_cvtepi32_epi8(h));
    _mm_storeu_si128((__m128i*)low, _mm512_cvtepi32_epi8(whole));  // whole - 256 h, modulo 256
  }

  static POLYATTN_INLINE Ints as_ints(Vec x) { return _mm512_castps_si512(x); }
  // Sixteen bytes in the first, second, third and last place of units, which are 0 else.
  static POLYATTN_INLINE void places_of_bytes(const int8_t* p, float* to) {
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    _mm512_storeu_si512(to, x);
    _mm512_storeu_si512(to + 16, _mm512_slli_epi32(x, 8));
    _mm512_storeu_si512(to + 32, _mm512_slli_epi32(x, 16));
    _mm512_storeu_si512(to + 48, _mm512_slli_epi32(x, 24));
  }
  // Four vectors by turns: lane n of x[i] to place 4 n + i.
  static POLYATTN_INLINE void zip_four(Vec (&x)[4]) {
    const auto low = [](Vec a, Vec b) { return _mm512_castps_pd(_mm512_unpacklo_ps(a, b)); };
    const auto high = [](Vec a, Vec b) { return _mm512_castps_pd(_mm512_unpackhi_ps(a, b)); };
    const __m512d a = low(x[0], x[1]), b = high(x[0], x[1]), c = low(x[2], x[3]), d = high(x[2], x[3]);
    x[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    x[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    x[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    x[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    turn_quarters(x);
  }
  // The upper halves of 32-bit units as lower ones, and 0.
  static POLYATTN_INLINE Vec lower_halves(Vec x) {
    return _mm512_castsi512_ps(_mm512_srli_epi32(_mm512_castps_si512(x), 16));
  }
  // The first four columns of sixteen rows of sixteen.
  static POLYATTN_INLINE void four_columns(const float* p, Vec (&x)[4]) {
    Vec rows[4], two[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const auto four = [&](int quarter) { return _mm_loadu_ps(p + (4 * quarter + i) * 16); };
      rows[i] = _mm512_insertf32x4(_mm512_castps128_ps512(four(0)), four(1), 1);
      rows[i] = _mm512_insertf32x4(_mm512_insertf32x4(rows[i], four(2), 2), four(3), 3);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      two[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
      two[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512d a = _mm512_castps_pd(two[i]), b = _mm512_castps_pd(two[i + 2]);
      x[2 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      x[2 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }

  // Units of the first n elements, no more than there are; the others are 0.
  static POLYATTN_INLINE Vec some_units(const BF16* p, int n) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((__mmask32{1} << n) - 1, p));
  }
  static POLYATTN_INLINE Vec dot_pairs(Vec sum, Vec a, Vec b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
  }
  // 16 units whose low halves are a[0..16) and whose high halves are b[0..16); absent rows are 0.
  static POLYATTN_INLINE Vec interleave(const BF16* a, const BF16* b, int n) {
    __mmask16 valid = __mmask16((1u << n) - 1);
    __m512i low = a ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(valid, a)) : _mm512_setzero_si512();
    if (!b) return _mm512_castsi512_ps(low);
    __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(valid, b));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  // Both for 32 whole columns.
  static POLYATTN_INLINE void interleave_two(const BF16* a, const BF16* b, Vec& low, Vec& high) {
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    low = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, zipped(0), y));
    high = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, zipped(16), y));
  }
  // 32 floats to 16 units of neighbours.
  static POLYATTN_INLINE Vec pairs(Vec low, Vec high) {
    return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  // 16 units (a[i], b[i]).
  static POLYATTN_INLINE Vec zip(Vec a, Vec b) {
    // clang-format off: pairs, eight in a line
    alignas(64) static constexpr uint16_t kOrder[] = {
         0, 16,  1, 17,  2, 18,  3, 19,  4, 20,  5, 21,  6, 22,  7, 23,
         8, 24,  9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    // clang-format on
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both));
  }

 private:
  static POLYATTN_INLINE Vec as_floats(Ints x) { return _mm512_castsi512_ps(x); }
  static POLYATTN_INLINE Ints unsign(Ints x) { return _mm512_xor_si512(x, _mm512_set1_epi8(int8_t(0x80))); }
  // Unsigned bytes of each 128 bits as words: the first eight, and the last.
  static POLYATTN_INLINE void pair_words(Ints bytes, Ints& a, Ints& b) {
    const __m512i none = _mm512_setzero_si512();
    a = _mm512_unpacklo_epi8(bytes, none);
    b = _mm512_unpackhi_epi8(bytes, none);
  }
  // Codes of each 128 bits as bfloat16: the first eight, and the last.
  static POLYATTN_INLINE void pair_eighths(__m512i codes, Vec& a, Vec& b) {
    __m512i low, high;
    eighths(codes, low, high);
    a = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));
    b = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
  }
  // Codes as bfloat16: the low bytes of 64, and the high ones. Each looks into a table of 128 bytes.
  static POLYATTN_INLINE void eighths(__m512i codes, __m512i& low, __m512i& high) {
    const auto part = [](const uint8_t* table) { return _mm512_load_si512(table); };
    low = _mm512_permutex2var_epi8(part(kEighthsBytes.low), codes, part(kEighthsBytes.low + 64));
    const __m512i size =
        _mm512_permutex2var_epi8(part(kEighthsBytes.high), codes, part(kEighthsBytes.high + 64));
    high = _mm512_ternarylogic_epi32(size, codes, _mm512_set1_epi8(int8_t(0x80)),
                                     0xf8);  // size | (codes & sign)
  }
  // 32 codes as bfloat16.
  static POLYATTN_INLINE __m512i eighths(__m256i codes) {
    __m512i low, high;
    eighths(_mm512_permutexvar_epi64(spread(), _mm512_castsi256_si512(codes)), low, high);
    return _mm512_unpacklo_epi8(low, high);
  }
  // Eight bytes of the first half and eight of the second for each 128 bits.
  static POLYATTN_INLINE __m512i spread() { return _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); }

  // Places of elements from `first` on of two vectors of 32, by turns.
  static POLYATTN_INLINE __m512i zipped(int first) {
    // clang-format off: pairs, eight in a line
    alignas(64) static constexpr uint16_t kPlaces[] = {
         0, 32,  1, 33,  2, 34,  3, 35,  4, 36,  5, 37,  6, 38,  7, 39,
         8, 40,  9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    // clang-format on
    return _mm512_add_epi16(_mm512_load_si512(kPlaces), _mm512_set1_epi16(int16_t(first)));
  }
};

}  // namespace polyattn::POLYATTN_NAMESPACE

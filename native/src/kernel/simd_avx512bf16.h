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
    __m512i low, high;
    eighths(_mm512_permutexvar_epi64(spread(), _mm512_loadu_si512(p)), low, high);
    a = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));
    b = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
  }
  // As for bfloat16, below.
  static POLYATTN_INLINE Vec interleave(const F8* a, const F8* b, int n) {
    const __m256i none = _mm256_setzero_si256();
    const __mmask16 valid = __mmask16((1u << n) - 1);
    const __m512i low = eighths(a ? _mm256_castsi128_si256(_mm_maskz_loadu_epi8(valid, a)) : none);
    const __m512i high = eighths(b ? _mm256_castsi128_si256(_mm_maskz_loadu_epi8(valid, b)) : none);
    return _mm512_castsi512_ps(_mm512_permutex2var_epi16(low, zipped(0), high));
  }
  // 64 columns.
  static POLYATTN_INLINE void interleave_four(const F8* a, const F8* b, Vec (&x)[4]) {
    // four columns of each sixteen for each 128 bits, where bytes of two and then pairs are put together
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i low[2], high[2];
    eighths(_mm512_permutexvar_epi32(order, _mm512_loadu_si512(a)), low[0], high[0]);
    eighths(_mm512_permutexvar_epi32(order, _mm512_loadu_si512(b)), low[1], high[1]);
    const __m512i first = _mm512_unpacklo_epi8(low[0], high[0]),
                  second = _mm512_unpacklo_epi8(low[1], high[1]);
    const __m512i third = _mm512_unpackhi_epi8(low[0], high[0]), last = _mm512_unpackhi_epi8(low[1], high[1]);
    x[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(first, second));
    x[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(first, second));
    x[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(third, last));
    x[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(third, last));
  }
  static POLYATTN_INLINE void interleave_two(const F8* a, const F8* b, Vec& low, Vec& high) {
    const __m512i x = eighths(_mm256_loadu_si256((const __m256i*)a));
    const __m512i y = eighths(_mm256_loadu_si256((const __m256i*)b));
    low = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, zipped(0), y));
    high = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, zipped(16), y));
  }

  // Sixteen sums of four products of bytes, or 64 bytes.
  using Ints = __m512i;
  static POLYATTN_INLINE Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
  static POLYATTN_INLINE Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static POLYATTN_INLINE Ints joined(Ints high, Ints low) {
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
  }
  static POLYATTN_INLINE Vec floats(Ints x) { return _mm512_cvtepi32_ps(x); }
  static POLYATTN_INLINE int32_t sum_ints(Ints x) { return _mm512_reduce_add_epi32(x); }
  // The larger sizes, NaN the largest of all; the largest of them.
  static POLYATTN_INLINE Ints larger_size(Ints most, Vec x) {
    return _mm512_max_epu32(most, _mm512_castps_si512(abs(x)));
  }
  static POLYATTN_INLINE float largest_size(Ints most) {
    return __builtin_bit_cast(float, _mm512_reduce_max_epu32(most));
  }
  // Adds the products of unsigned and of signed bytes. Of the intrinsic GCC 12 makes copies of the sums.
  static POLYATTN_INLINE Ints dot_bytes(Ints sum, Ints bytes, Ints others) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(others));
    return sum;
  }
  static POLYATTN_INLINE Ints four_bytes(const void* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
  }
  // 64 codes + 128; those from `n` on are 0 + 128.
  static POLYATTN_INLINE Ints unsigned_bytes(const int8_t* p, int n) {
    return unsign(n >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((__mmask64{1} << n) - 1, p));
  }
  // 32 / R codes + 128, repeated, for R rows at once: 1 or 2.
  template <int R>
  static POLYATTN_INLINE Ints repeated_bytes(const int8_t* p) {
    if constexpr (R == 2) return unsign(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)));
    return unsign(_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p)));
  }
  // The same of the first n codes, no more than there are; what stands for the others is 128.
  template <int R>
  static POLYATTN_INLINE Ints some_repeated_bytes(const int8_t* p, int n) {
    const __mmask32 valid = (__mmask32{1} << n) - 1;
    if constexpr (R == 2) return unsign(_mm512_broadcast_i32x4(_mm_maskz_loadu_epi8(__mmask16(valid), p)));
    return unsign(_mm512_broadcast_i64x4(_mm256_maskz_loadu_epi8(valid, p)));
  }
  // The planes of R rows in the lanes that meet such codes, from blocks of pack_bytes: the high ones of all
  // columns of the first row and then of the second, or of the first half of them and then of the second; then
  // the low ones.
  template <int R>
  static POLYATTN_INLINE Ints query_planes(const char* block) {
    const auto part = [&](int n) { return _mm256_loadu_si256((const __m256i*)(block + 64 * n)); };
    const __m256i high = _mm256_unpacklo_epi64(part(0), part(1));
    const __m256i low = _mm256_unpackhi_epi64(part(0), part(1));
    if constexpr (R == 2) return _mm512_inserti64x4(_mm512_castsi256_si512(high), low, 1);
    const __m256i more = _mm256_unpacklo_epi64(part(2), part(3));
    const __m256i less = _mm256_unpackhi_epi64(part(2), part(3));
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_permute2x128_si256(high, more, 0x20)),
                              _mm256_permute2x128_si256(low, less, 0x20), 1);
  }
  // Joins the planes and adds up the lanes of eight keys' sums: of keys 0 to 3 the first rows' (or halves'), then
  // the second ones'; then those of keys 4 to 7.
  static POLYATTN_INLINE Ints sum_keys(const Ints (&x)[8]) {
    Ints y[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      y[i] = joined(_mm512_shuffle_i32x4(x[i], x[i + 4], 0x44), _mm512_shuffle_i32x4(x[i], x[i + 4], 0xee));
    }
    const auto two = [](Ints a, Ints b) {
      return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    };
    const Ints a = two(y[0], y[1]), b = two(y[2], y[3]);
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  // The sums of sixteen keys from two of these: of the first rows (or halves), and of the second ones.
  static POLYATTN_INLINE void part_keys(Ints early, Ints late, Ints& first, Ints& second) {
    first = _mm512_shuffle_i32x4(early, late, 0x88);
    second = _mm512_shuffle_i32x4(early, late, 0xdd);
  }
  // Numbers as 256 * high + low, both signed bytes; adds them up.
  static POLYATTN_INLINE void split(Vec x, int8_t* high, int8_t* low, Ints& sum) {
    const __m512i whole = _mm512_cvtps_epi32(x);
    const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128((__m128i*)high, _mm512_cvtepi32_epi8(h));
    _mm_storeu_si128((__m128i*)low, _mm512_cvtepi32_epi8(whole));  // whole - 256 h, modulo 256
    sum = _mm512_add_epi32(sum, whole);
  }
  // Four rows of up to 64 codes + 128 as lanes of one column: of each 16 columns the V / 4 that `part` says.
  // Sums of all four are in order after turn_quarters().
  template <int V>
  static POLYATTN_INLINE void interleave_bytes(const int8_t* const (&rows)[4], int n, int part,
                                               Ints (&to)[V]) {
    __m512i x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) x[i] = unsigned_bytes(rows[i], n);
#pragma GCC unroll 2
    for (int i = 0; i < V; i += 2) {
      const bool upper = i + V * part >= 2;
      const __m512i first = upper ? _mm512_unpackhi_epi8(x[0], x[1]) : _mm512_unpacklo_epi8(x[0], x[1]);
      const __m512i second = upper ? _mm512_unpackhi_epi8(x[2], x[3]) : _mm512_unpacklo_epi8(x[2], x[3]);
      to[i] = _mm512_unpacklo_epi16(first, second);
      to[i + 1] = _mm512_unpackhi_epi16(first, second);
    }
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
  static POLYATTN_INLINE Ints unsign(Ints x) { return _mm512_xor_si512(x, _mm512_set1_epi8(int8_t(0x80))); }
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

// AVX-512 with the dot products of bfloat16 pairs and of bytes (every processor with the first has the second).
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
  // As for bfloat16, below.
  static POLYATTN_INLINE Vec interleave(const F8* a, const F8* b, int n) {
    const __m256i none = _mm256_setzero_si256();
    const __mmask16 valid = __mmask16((1u << n) - 1);
    const __m512i low = eighths(a ? _mm256_castsi128_si256(_mm_maskz_loadu_epi8(valid, a)) : none);
    const __m512i high = eighths(b ? _mm256_castsi128_si256(_mm_maskz_loadu_epi8(valid, b)) : none);
    return _mm512_castsi512_ps(_mm512_permutex2var_epi16(low, zipped(0), high));
  }
  static POLYATTN_INLINE void interleave_two(const F8* a, const F8* b, Vec& low, Vec& high) {
    const __m512i x = eighths(_mm256_loadu_si256((const __m256i*)a));
    const __m512i y = eighths(_mm256_loadu_si256((const __m256i*)b));
    low = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, zipped(0), y));
    high = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, zipped(16), y));
  }

  // Sixteen sums of four products of bytes.
  using Ints = __m512i;
  static POLYATTN_INLINE Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
  static POLYATTN_INLINE Vec floats(Ints x) { return _mm512_cvtepi32_ps(x); }
  static POLYATTN_INLINE int32_t sum_ints(Ints x) { return _mm512_reduce_add_epi32(x); }
  // Adds the products of unsigned bytes and the four signed ones at `four`. Of the intrinsic GCC 12 makes copies
  // of the sums, and a load of its own of what the instruction broadcasts.
  static POLYATTN_INLINE Ints dot_bytes(Ints sum, Vec bytes, const void* four) {
    asm("vpdpbusd %2%{1to16%}, %1, %0"
        : "+v"(sum)
        : "v"(_mm512_castps_si512(bytes)), "m"(*static_cast<const char (*)[4]>(four)));
    return sum;
  }
  // 64 codes + 128; those from `n` on are 0 + 128.
  static POLYATTN_INLINE Vec unsigned_bytes(const int8_t* p, int n) {
    const __m512i x = n >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((__mmask64{1} << n) - 1, p);
    return _mm512_castsi512_ps(_mm512_xor_si512(x, _mm512_set1_epi8(int8_t(0x80))));
  }
  // Numbers as 256 * high + low, both signed bytes; adds them up.
  static POLYATTN_INLINE void split(Vec x, int8_t* high, int8_t* low, Ints& sum_high, Ints& sum_low) {
    const __m512i whole = _mm512_cvtps_epi32(x);
    const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    const __m512i l = _mm512_sub_epi32(whole, _mm512_slli_epi32(h, 8));
    _mm_storeu_si128((__m128i*)high, _mm512_cvtepi32_epi8(h));
    _mm_storeu_si128((__m128i*)low, _mm512_cvtepi32_epi8(l));
    sum_high = _mm512_add_epi32(sum_high, h);
    sum_low = _mm512_add_epi32(sum_low, l);
  }
  // Four rows of up to 64 codes + 128 as lanes of one column: of each 16 columns the first or the second 8.
  static POLYATTN_INLINE void interleave_bytes(const int8_t* const (&rows)[4], int n, int half, Vec& a,
                                               Vec& b) {
    __m512i x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) x[i] = _mm512_castps_si512(unsigned_bytes(rows[i], n));
    const __m512i first = half ? _mm512_unpackhi_epi8(x[0], x[1]) : _mm512_unpacklo_epi8(x[0], x[1]);
    const __m512i second = half ? _mm512_unpackhi_epi8(x[2], x[3]) : _mm512_unpacklo_epi8(x[2], x[3]);
    a = _mm512_castsi512_ps(_mm512_unpacklo_epi16(first, second));
    b = _mm512_castsi512_ps(_mm512_unpackhi_epi16(first, second));
  }
  // Sums of 64 columns from the order of interleave_bytes to their own.
  static POLYATTN_INLINE void in_order(Vec (&x)[4]) {
    const Vec a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
    const Vec c = _mm512_shuffle_f32x4(x[0], x[1], 0xee), d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
    x[0] = _mm512_shuffle_f32x4(a, b, 0x88);
    x[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
    x[2] = _mm512_shuffle_f32x4(c, d, 0x88);
    x[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
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
  // 32 codes as bfloat16: the table of their sizes is as large as two looks into 64 entries.
  static POLYATTN_INLINE __m512i eighths(__m256i codes) {
    const __m512i x = _mm512_cvtepi8_epi16(codes);
    const uint16_t* const table = kEighths.bits;
    const auto part = [&](int first) { return _mm512_load_si512(table + first); };
    const __m512i low = _mm512_permutex2var_epi16(part(0), x, part(32));
    const __m512i high = _mm512_permutex2var_epi16(part(64), x, part(96));
    const __m512i size = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(x, _mm512_set1_epi16(64)), low, high);
    return _mm512_ternarylogic_epi32(size, x, _mm512_set1_epi16(int16_t(0x8000)), 0xf8);  // size | (x & sign)
  }

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

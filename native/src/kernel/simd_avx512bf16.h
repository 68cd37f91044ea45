// AVX-512 with the dot products of bfloat16 pairs.
#pragma once

#include "kernel/simd_avx512.h"

namespace polyattn::POLYATTN_NAMESPACE {

struct PairSimd : Simd {
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
    // clang-format off: pairs, eight in a line
    alignas(64) static constexpr uint16_t kLow[] = {
         0, 32,  1, 33,  2, 34,  3, 35,  4, 36,  5, 37,  6, 38,  7, 39,
         8, 40,  9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    // clang-format on
    const __m512i index = _mm512_load_si512(kLow);
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    low = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, index, y));
    high =
        _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, _mm512_add_epi16(index, _mm512_set1_epi16(16)), y));
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
};

}  // namespace polyattn::POLYATTN_NAMESPACE

// AVX-512 where AMX is, which Intel alone has.
#pragma once

#include "kernel/simd_avx512bf16.h"

namespace polyattn::POLYATTN_NAMESPACE {

struct TileSimd : PairSimd {
  // Into the first cache: what is in the second one already is read from there once more, and not twice more.
  static constexpr int kFetchHint = 3;

  // As in the other sets, to the bit. The fraction is one instruction, which is fast on Intel's processors, and the
  // last instruction takes the whole part of its operand by itself.
  template <int kDegree>
  static POLYATTN_INLINE Vec exp2(Vec x) {
    return _mm512_scalef_ps(power_of_fraction<Simd, kDegree>(fraction(x)), x);
  }
  // With the coefficients in registers.
  template <int kDegree>
  static POLYATTN_INLINE Vec exp2_by(const Vec (&c)[kDegree + 1], Vec x) {
    return _mm512_scalef_ps(polynomial<Simd, kDegree>(c, fraction(x)), x);
  }
  // Whether a lane is above `most` or NaN.
  static POLYATTN_INLINE bool any_beyond(Vec x, Vec most) {
    return _mm512_cmp_ps_mask(x, most, _CMP_NLE_UQ) != 0;
  }

 private:
  // 0 of infinities
  static POLYATTN_INLINE Vec fraction(Vec x) {
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
};

}  // namespace polyattn::POLYATTN_NAMESPACE

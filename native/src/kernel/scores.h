// What happens to scores between the product and the soft-max: scale, soft cap, bias, mask.
#pragma once

#include "kernel/exponential.h"
#include "kernel/mask.h"
#include "kernel/units.h"

namespace polyattn::POLYATTN_NAMESPACE {

// In which units scores reach the soft-max.
//   folded: times scale * log2(e), which was multiplied into the packed queries
//   raw: q . k as it is; the soft-max multiplies by scale * log2(e)
//   natural: final scores; needed by soft cap and bias, and by scales that are not positive
enum class Scores { folded, raw, natural };

inline bool has_adjustment(const Arguments& a) { return a.softcap > 0 || a.bias.data || a.slopes.data; }

template <class U>
inline Scores scores_of(const Arguments& a) {
  if (has_adjustment(a)) return Scores::natural;
  if (U::kValues == 1) return Scores::folded;
  return a.scale > 0 ? Scores::raw : Scores::natural;
}

// The units of a call, and the factors that lead from one to the next.
template <class U>
class ScoreUnits {
 public:
  explicit ScoreUnits(const Arguments& a) : kind(scores_of<U>(a)) {
    factor = kind == Scores::natural ? a.scale : a.scale * kLog2E;
    short_powers = U::kInTiles && !a.lse.data;
  }

  const Scores kind;
  // Whether nothing is left of probabilities and their sums but bfloat16: where no lse is made of the sums.
  bool short_powers;
  float factor;  // of the soft-max, for raw scores
  // By which queries are multiplied where they are packed, and what soft cap and bias need then.
  float of_queries() const { return U::kValues == 1 ? factor : 1.0f; }
  float adjusting() const { return U::kValues == 1 ? 1.0f : factor; }
};

// tanh, relatively exact near 0 (the polynomial of Cephes' tanhf), NaN for NaN.
template <class S>
POLYATTN_INLINE typename S::Vec tanh(typename S::Vec x) {
  using Vec = typename S::Vec;
  const Vec one = S::fill(1.0f), size = S::abs(x);
  Vec z = S::mul(x, x);
  Vec p = S::fill(-5.70498872745e-3f);
  p = S::fma(p, z, S::fill(2.06390887954e-2f));
  p = S::fma(p, z, S::fill(-5.37397155531e-2f));
  p = S::fma(p, z, S::fill(1.33314422036e-1f));
  p = S::fma(p, z, S::fill(-3.33332819422e-1f));
  const Vec near_zero = S::fma(S::mul(p, z), x, x);
  const Vec e = S::template exp2<5>(S::mul(size, S::fill(2 * kLog2E)));
  const Vec far = S::sub(one, S::div(S::fill(2.0f), S::add(e, one)));
  const Vec signed_far = S::less_select(x, S::zero(), S::sub(S::zero(), far), far);
  return S::less_select(size, S::fill(0.625f), near_zero, signed_far);
}

template <class S>
POLYATTN_INLINE typename S::Vec load_bias(const Bias& bias, int64_t index, int n) {
  constexpr int W = S::kLanes;
  auto take = [&](auto* p) -> typename S::Vec {
    p += index;
    if (bias.column == 0) return S::fill(to_float(*p));
    if (bias.column == 1) return n >= W ? S::load(p) : S::load_some(p, n);
    float values[W] = {};
    for (int i = 0; i < smaller(n, W); ++i) values[i] = to_float(p[i * bias.column]);
    return S::load(values);
  };
  switch (bias.dtype) {
    case DType::bf16:
      return take(static_cast<const BF16*>(bias.data));
    case DType::f16:
      return take(static_cast<const F16*>(bias.data));
    default:
      return take(static_cast<const float*>(bias.data));
  }
}

// `scores`: those rows of a strip for keys j0 to j0 + n - 1; `factor` makes them scale * q . k.
// `slope`, if wanted, receives d(score after the cap) / d(score before it).
template <class S>
inline void adjust(const Arguments& a, const Sequence& q, const Strip& s, Span rows, int64_t j0, int n,
                   float factor, float* scores, int64_t row, float* slope = nullptr) {
  using Vec = typename S::Vec;
  constexpr int W = S::kLanes;
  for (int64_t r = rows.low; r < rows.high; ++r) {
    for (int i = 0; i < n; i += W) {
      const int64_t at = (r - rows.low) * row + i;
      float* p = scores + at;
      Vec x = S::mul(S::load(p), S::fill(factor));
      if (a.softcap > 0) {
        const Vec bounded = tanh<S>(S::div(x, S::fill(a.softcap)));
        x = S::mul(bounded, S::fill(a.softcap));
        if (slope) S::store(slope + at, S::sub(S::fill(1.0f), S::mul(bounded, bounded)));
      }
      if (a.bias.data) {
        const int64_t index =
            q.b * a.bias.batch + s.head[r] * a.bias.head + s.t[r] * a.bias.row + (j0 + i) * a.bias.column;
        x = S::add(x, load_bias<S>(a.bias, index, n - i));
      }
      if (a.slopes.data) {
        const float m = a.slopes.data[q.b * a.slopes.batch + s.head[r] * a.slopes.head];
        const float distance = float(s.t[r] + q.kv_len - q.q_len - j0 - i);
        x = S::fma(S::fill(-m), S::abs(S::sub(S::fill(distance), S::ramp())), x);
      }
      S::store(p, x);
    }
  }
}

// Puts -inf where the word of a row has no bit, of those from columns.low on; as many as a multiple of the lanes.
template <class S>
inline void hide(const uint64_t* words, int rows, Span columns, float* scores, int64_t row) {
  const typename S::Vec nothing = S::fill(-kInfinity);
  for (int r = 0; r < rows; ++r) {
    for (int64_t i = columns.low; i < columns.high; i += S::kLanes) {
      float* p = scores + r * row + i - columns.low;
      S::store(p, S::select(words[r] >> i, S::load(p), nothing));
    }
  }
}

}  // namespace polyattn::POLYATTN_NAMESPACE

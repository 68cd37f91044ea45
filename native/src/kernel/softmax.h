// One step of the online soft-max (Milakov and Gimelshein, 2018): a row's scores become
// probabilities relative to its running maximum.
#pragma once

#include "kernel/scores.h"
#include "kernel/visit.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Where |maximum| is larger, a fused multiply-subtract against the rounded maximum would leave a
// residue that matters; the product is rounded first there, so that the maximum itself gives 0.
constexpr float kLargeScore = 65536.0f;

template <class S, class U>
POLYATTN_INLINE void store_probabilities(float* row, int i, typename S::Vec a, typename S::Vec b) {
  if constexpr (U::kValues == 1) {
    S::store(row + i, a);
    S::store(row + i + S::kLanes, b);
  } else {
    S::store(row + i / 2, S::pairs(a, b));  // behind what has been read
  }
}

// scores -> units of probabilities, in place; their sums, lane by lane, to `lanes`. The argument of
// the exponential is what `argument` makes of a score.
template <class S, class U, int kDegree, class Argument>
POLYATTN_INLINE void exponentials(float* row, int columns, float* lanes, Argument argument) {
  constexpr int W = S::kLanes;
  typename S::Vec sum0 = S::zero(), sum1 = S::zero();
  int i = 0;
  for (; i + 2 * W <= columns; i += 2 * W) {
    const typename S::Vec a = S::template exp2<kDegree>(argument(S::load(row + i)));
    const typename S::Vec b = S::template exp2<kDegree>(argument(S::load(row + i + W)));
    sum0 = S::add(sum0, a);
    sum1 = S::add(sum1, b);
    store_probabilities<S, U>(row, i, a, b);
  }
  if (i < columns) {
    const typename S::Vec a = S::template exp2<kDegree>(argument(S::load(row + i)));
    sum0 = S::add(sum0, a);
    if constexpr (U::kValues == 1) {
      S::store(row + i, a);
    } else {
      S::store(row + i / 2, S::pairs(a, S::zero()));
    }
  }
  S::store(lanes, S::add(sum0, sum1));
}

// Raises tops[0 .. W) to the largest of the scores, lane by lane. A NaN is passed over: its
// exponential is NaN.
template <class S>
POLYATTN_INLINE void raise(const float* row, int columns, float* tops) {
  typename S::Vec most = S::load(tops);
  for (int i = 0; i < columns; i += S::kLanes) most = S::max(S::load(row + i), most);
  S::store(tops, most);
}

// The running state of a strip's rows. Maxima of folded and raw scores are in units of log2, of
// natural ones as they are.
struct RowStates {
  float* maximum;
  float* sum;
};

// Scalar 2^x with the polynomial of the vectors.
template <class S, int kDegree>
POLYATTN_INLINE float exp2_scalar(float x) {
  float lanes[S::kLanes];
  S::store(lanes, S::template exp2<kDegree>(S::fill(x)));
  return lanes[0];
}

template <class S, class U, Scores kScores, int kDegree>
POLYATTN_INLINE void soften_row(float* row, int columns, float factor, float shift, float* lanes) {
  using Vec = typename S::Vec;
  if constexpr (kScores == Scores::folded) {
    const Vec m = S::fill(shift);
    exponentials<S, U, kDegree>(row, columns, lanes, [&](Vec s) { return S::sub(s, m); });
  } else if constexpr (kScores == Scores::natural) {
    const Vec m = S::fill(shift), unit = S::fill(kLog2E);
    exponentials<S, U, kDegree>(row, columns, lanes, [&](Vec s) { return S::mul(S::sub(s, m), unit); });
  } else if (shift > kLargeScore || shift < -kLargeScore) {
    const Vec m = S::fill(shift), f = S::fill(factor);
    exponentials<S, U, kDegree>(row, columns, lanes, [&](Vec s) { return S::sub(S::mul(s, f), m); });
  } else {
    const Vec m = S::fill(-shift), f = S::fill(factor);
    exponentials<S, U, kDegree>(row, columns, lanes, [&](Vec s) { return S::fma(s, f, m); });
  }
}

// Sums over lanes are taken for W rows at once, so that no row waits for its own.
template <class S, class Reduce>
POLYATTN_INLINE typename S::Vec across(const float* lanes, Reduce reduce) {
  typename S::Vec x[S::kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < S::kLanes; ++i) x[i] = S::load(lanes + i * S::kLanes);
  return reduce(x);
}

// A step for all rows of a strip. `scores`: rows of `stride` floats; `lanes`: their largest, W for
// each row, overwritten. `factor`: scale * log2(e), for raw scores. `shrink[r]` receives the factor
// by which older sums of row r must shrink. The arrays of `state` and `shrink` have room for kRows
// rows. kDegree: of probabilities; what older sums shrink by is always of degree 5.
template <class S, class U, Scores kScores, int kDegree>
__attribute__((noinline)) void soften(float* scores, int64_t stride, int rows, int columns, float factor,
                                      RowStates state, float* lanes, float* shrink) {
  using Vec = typename S::Vec;
  constexpr int W = S::kLanes;
  alignas(64) float shift[kRows];
  const int padded = int(round_up(rows, W));
  const Vec nothing = S::fill(-kInfinity), unit = S::fill(kScores == Scores::natural ? kLog2E : 1.0f);
  for (int r = 0; r < padded; r += W) {
    Vec top = across<S>(lanes + r * W, [](Vec(&x)[W]) { return S::lane_maxima(x); });
    if (kScores == Scores::raw) top = S::mul(top, S::fill(factor));
    const Vec before = S::load(state.maximum + r);
    const Vec maximum = S::max(top, before);
    // nothing seen yet: exp(-inf - 0)
    const Vec base = S::less_select(nothing, maximum, maximum, S::zero());
    const Vec change = S::less_select(before, maximum, S::mul(S::sub(before, base), unit), S::zero());
    S::store(shrink + r, S::less_select(before, maximum, S::template exp2<5>(change), S::fill(1.0f)));
    S::store(state.maximum + r, maximum);
    S::store(shift + r, base);
  }
  for (int r = 0; r < rows; ++r)
    soften_row<S, U, kScores, kDegree>(scores + r * stride, columns, factor, shift[r], lanes + r * W);
  for (int r = 0; r < padded; r += W) {
    const Vec sum = across<S>(lanes + r * W, [](Vec(&x)[W]) { return S::lane_sums(x); });
    S::store(state.sum + r, S::fma(S::load(state.sum + r), S::load(shrink + r), sum));
  }
}

template <class S, class U, Scores kScores>
inline void soften(const ScoreUnits<U>& units, float* scores, int64_t stride, int rows, int columns,
                   RowStates state, float* lanes, float* shrink) {
  if constexpr (U::kInTiles) {
    if (units.short_powers) {
      return soften<S, U, kScores, 3>(scores, stride, rows, columns, units.factor, state, lanes, shrink);
    }
  }
  soften<S, U, kScores, 5>(scores, stride, rows, columns, units.factor, state, lanes, shrink);
}

template <class S, class U>
inline void soften(const ScoreUnits<U>& units, float* scores, int64_t stride, int rows, int columns,
                   RowStates state, float* lanes, float* shrink) {
  if constexpr (U::kValues == 1) {
    if (units.kind == Scores::folded) {
      return soften<S, U, Scores::folded>(units, scores, stride, rows, columns, state, lanes, shrink);
    }
  } else if (units.kind == Scores::raw) {
    return soften<S, U, Scores::raw>(units, scores, stride, rows, columns, state, lanes, shrink);
  }
  soften<S, U, Scores::natural>(units, scores, stride, rows, columns, state, lanes, shrink);
}

// A tile's products of queries and keys as the soft-max takes them, and what they raise the rows' maxima to,
// lane by lane. `words`: nullptr where nothing is masked.
template <class S, class U>
inline void settle(const Arguments& a, const Sequence& q, const Strip& s, const Tile& tile,
                   const ScoreUnits<U>& units, const uint64_t* words, float* scores, float* tops) {
  if (units.kind == Scores::natural)
    adjust<S>(a, q, s, {0, s.count}, tile.j0, tile.keys, units.adjusting(), scores, kScoreRow);
  if (words) hide<S>(words, s.count, {0, tile.columns}, scores, kScoreRow);
  for (int r = 0; r < s.count; ++r) raise<S>(scores + r * kScoreRow, tile.columns, tops + r * S::kLanes);
}

template <class S>
POLYATTN_INLINE void scale_row(float* row, int64_t columns, float factor) {
  const typename S::Vec f = S::fill(factor);
  for (int64_t i = 0; i < columns; i += S::kLanes) S::store(row + i, S::mul(S::load(row + i), f));
}

}  // namespace polyattn::POLYATTN_NAMESPACE

// One step of the online soft-max (Milakov and Gimelshein, 2018): a row's scores become
// probabilities relative to its running maximum.
#pragma once

#include "kernel/scores.h"

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

// scores -> units of probabilities, in place; returns their sum. The argument of the exponential
// is what `argument` makes of a score.
template <class S, class U, class Argument>
POLYATTN_INLINE float exponentials(float* row, int columns, Argument argument) {
  constexpr int W = S::kLanes;
  typename S::Vec sum0 = S::zero(), sum1 = S::zero();
  int i = 0;
  for (; i + 2 * W <= columns; i += 2 * W) {
    const typename S::Vec a = S::template exp2<U::kDegree>(argument(S::load(row + i)));
    const typename S::Vec b = S::template exp2<U::kDegree>(argument(S::load(row + i + W)));
    sum0 = S::add(sum0, a);
    sum1 = S::add(sum1, b);
    store_probabilities<S, U>(row, i, a, b);
  }
  if (i < columns) {
    const typename S::Vec a = S::template exp2<U::kDegree>(argument(S::load(row + i)));
    sum0 = S::add(sum0, a);
    if constexpr (U::kValues == 1) {
      S::store(row + i, a);
    } else {
      S::store(row + i / 2, S::pairs(a, S::zero()));
    }
  }
  return S::sum(S::add(sum0, sum1));
}

template <class S>
POLYATTN_INLINE float row_maximum(const float* row, int columns) {
  constexpr int W = S::kLanes;
  typename S::Vec m0 = S::fill(-kInfinity), m1 = m0;
  int i = 0;
  for (; i + 2 * W <= columns; i += 2 * W) {  // a NaN score is passed over; its exponential is NaN
    m0 = S::max(S::load(row + i), m0);
    m1 = S::max(S::load(row + i + W), m1);
  }
  if (i < columns) m0 = S::max(S::load(row + i), m0);
  return S::largest(S::max(m0, m1));
}

struct RowState {
  float maximum;  // of folded and raw scores in units of log2, of natural ones as they are
  float sum;
};

// Scalar 2^x with the polynomial of the vectors.
template <class S, int kDegree>
POLYATTN_INLINE float exp2_scalar(float x) {
  float lanes[S::kLanes];
  S::store(lanes, S::template exp2<kDegree>(S::fill(x)));
  return lanes[0];
}

// `factor`: scale * log2(e), for raw scores. Returns the factor by which older sums shrink.
template <class S, class U, Scores kScores>
POLYATTN_INLINE float softmax_row(float* row, int columns, float factor, RowState& state) {
  float top = row_maximum<S>(row, columns);
  if (kScores == Scores::raw) top *= factor;
  const float before = state.maximum;
  const float maximum = top > before ? top : before;
  const float shift = maximum == -kInfinity ? 0.0f : maximum;  // nothing seen yet: exp(-inf - 0)
  float sum;
  if constexpr (kScores == Scores::folded) {
    const typename S::Vec m = S::fill(shift);
    sum = exponentials<S, U>(row, columns, [&](typename S::Vec s) { return S::sub(s, m); });
  } else if constexpr (kScores == Scores::natural) {
    const typename S::Vec m = S::fill(shift), unit = S::fill(kLog2E);
    sum = exponentials<S, U>(row, columns, [&](typename S::Vec s) { return S::mul(S::sub(s, m), unit); });
  } else if (shift > kLargeScore || shift < -kLargeScore) {
    const typename S::Vec m = S::fill(shift), f = S::fill(factor);
    sum = exponentials<S, U>(row, columns, [&](typename S::Vec s) { return S::sub(S::mul(s, f), m); });
  } else {
    const typename S::Vec m = S::fill(-shift), f = S::fill(factor);
    sum = exponentials<S, U>(row, columns, [&](typename S::Vec s) { return S::fma(s, f, m); });
  }
  float shrink = 1.0f;
  if (maximum != before) {
    const float unit = kScores == Scores::natural ? kLog2E : 1.0f;
    shrink = before == -kInfinity ? 0.0f : exp2_scalar<S, 5>((before - shift) * unit);
    state.maximum = maximum;
  }
  state.sum = state.sum * shrink + sum;
  return shrink;
}

template <class S>
POLYATTN_INLINE void scale_row(float* row, int64_t columns, float factor) {
  const typename S::Vec f = S::fill(factor);
  for (int64_t i = 0; i < columns; i += S::kLanes) S::store(row + i, S::mul(S::load(row + i), f));
}

}  // namespace polyattn::POLYATTN_NAMESPACE

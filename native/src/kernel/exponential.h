// Polynomials for 2^r, r in [0, 1): least largest relative error, by Remez' exchange.
#pragma once

#include "kernel/elements.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Degree 5: 1.6e-7 with its rounding. Degree 3: 7.5e-5, for probabilities of which nothing is left
// but their rounding to bfloat16 (3.9e-3): in the backward pass, where none are summed, and in the
// forward pass in tiles, where they limit, if outputs of bfloat16 are all that is made of the sums.
constexpr float kPower5[] = {0.99999994f,   0.693153083f,   0.240153611f,
                             0.0558263175f, 0.00898933969f, 0.00187757669f};
constexpr float kPower3[] = {0.999925196f, 0.695833564f, 0.226067156f, 0.0780245215f};

template <class S, int kDegree>
POLYATTN_INLINE typename S::Vec polynomial(const typename S::Vec (&c)[kDegree + 1], typename S::Vec r) {
  typename S::Vec p = c[kDegree];
#pragma GCC unroll 8
  for (int i = kDegree - 1; i >= 0; --i) p = S::fma(p, r, c[i]);
  return p;
}

template <class S, int kDegree>
POLYATTN_INLINE typename S::Vec power_of_fraction(typename S::Vec r) {
  static_assert(kDegree == 5 || kDegree == 3);
  const float* c = kDegree == 5 ? kPower5 : kPower3;
  typename S::Vec p = S::fill(c[kDegree]);
#pragma GCC unroll 8
  for (int i = kDegree - 1; i >= 0; --i) p = S::fma(p, r, S::fill(c[i]));
  return p;
}

}  // namespace polyattn::POLYATTN_NAMESPACE

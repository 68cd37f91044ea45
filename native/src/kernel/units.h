// What one 32-bit unit of a matrix operand holds, and the multiply-add that takes it.
//
// Both operands of every product are arrays of 32-bit units: one float, or two neighbouring
// bfloat16 along the summed dim. Packing and addressing are the same for both.
#pragma once

#include "kernel/elements.h"

namespace polyattn::POLYATTN_NAMESPACE {

struct FloatUnit {
  static constexpr int kValues = 1;  // values in a unit
  static constexpr int kDegree = 5;  // of the exponential in the backward pass
  template <class S>
  static POLYATTN_INLINE typename S::Vec dot(typename S::Vec sum, typename S::Vec a, typename S::Vec b) {
    return S::fma(a, b, sum);
  }
};

struct PairUnit {
  static constexpr int kValues = 2;
  static constexpr int kDegree = 3;
  template <class S>
  static POLYATTN_INLINE typename S::Vec dot(typename S::Vec sum, typename S::Vec a, typename S::Vec b) {
    return S::dot_pairs(sum, a, b);
  }
};

}  // namespace polyattn::POLYATTN_NAMESPACE

// Lane i of the result joins the lanes of x[i], for instruction sets without a shorter way.
#pragma once

#include "kernel/elements.h"

namespace polyattn::POLYATTN_NAMESPACE {

template <class S, class Join>
POLYATTN_INLINE typename S::Vec across_lanes(typename S::Vec (&x)[S::kLanes], Join join) {
  S::transpose(x);
#pragma GCC unroll 8
  for (int width = S::kLanes / 2; width > 0; width /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i) x[i] = join(x[i], x[i + width]);
  }
  return x[0];
}

}  // namespace polyattn::POLYATTN_NAMESPACE

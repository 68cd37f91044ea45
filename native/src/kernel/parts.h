// Parts of a thread's memory, one behind the other, each from a line of the cache on.
#pragma once

#include <cstddef>

#include "fences.h"

namespace polyattn::POLYATTN_NAMESPACE {

class MemoryParts {
 public:
  // Without memory it only counts.
  explicit MemoryParts(float* base) : base_(base) {}

  float* take(size_t floats) {
    float* const part = base_ + used_;
    used_ += (floats + 15) / 16 * 16;
    if (kFence > 0 && base_) close_off(base_ + used_, kFence);
    used_ += kFence / sizeof(float);
    return part;
  }

  size_t bytes() const { return used_ * sizeof(float); }

 private:
  float* base_;
  size_t used_ = 0;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

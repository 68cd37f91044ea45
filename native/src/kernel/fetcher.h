// Memory that a thread needs next, fetched a few lines at a time while it multiplies. Queries, keys and values are read
// from memory once and outputs written once, and memory has nothing to do meanwhile.
#pragma once

#include "kernel/elements.h"
#include "memory_habits.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Rows of memory, in the order in which they are fetched.
class FetchQueue {
 public:
  void clear() { count_ = next_ = 0, left_ = 0; }
  bool any() const { return left_ > 0; }

  // Rows of `bytes` bytes, `stride` bytes from one to the next. What there is no room for is not fetched.
  void add(const void* at, int64_t stride, int64_t rows, int64_t bytes) {
    if (!fetch_meanwhile) return;
    const char* from = static_cast<const char*>(at);
    if (stride == bytes) {
      rows = blocks_of(rows * bytes, kStep);
      stride = bytes = kStep;
    }
    for (; rows > 0 && bytes > 0 && count_ < kMost; bytes -= kStep, from += kStep)
      range_[count_++] = {from, stride, rows};
    if (left_ == 0) open();
  }

  POLYATTN_INLINE void step() {
    __builtin_prefetch(at_, 0, 2);
    __builtin_prefetch(at_ + kLine, 0, 2);
    at_ += stride_;
    if (--left_ == 0) open();
  }

 private:
  static constexpr int kMost = 32;
  static constexpr int64_t kLine = 64, kStep = 2 * kLine;

  struct Range {
    const char* at;
    int64_t stride, rows;
  };

  void open() {
    if (next_ == count_) return clear();
    at_ = range_[next_].at, stride_ = range_[next_].stride, left_ = range_[next_].rows;
    ++next_;
  }

  const char* at_ = nullptr;
  int64_t stride_ = 0, left_ = 0;
  int count_ = 0, next_ = 0;
  Range range_[kMost];
};

// `soon`: what the running visit and the next one need; `later`: the next chunk or item, where there is nothing else.
struct Fetcher {
  FetchQueue soon, later;

  // As much as a core has on its way from memory at once.
  void some() {
    FetchQueue& queue = soon.any() ? soon : later;
    for (int i = 0; i < 8 && queue.any(); ++i) queue.step();
  }
};

}  // namespace polyattn::POLYATTN_NAMESPACE

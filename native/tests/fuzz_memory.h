// What an input of the fuzz target is made of: its bytes, hostile numbers, memory of an exact size.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <memory>
#include <vector>

#include "numbers.h"
#include "polyattn/arguments.h"

namespace polyattn::testing {

// Of fuzz_arguments.cpp, for the program around it.
extern bool fuzzed_passes[2];  // forward, backward
extern int64_t accepted_calls;

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t next() { return at_ < size_ ? data_[at_++] : 0; }
  int64_t below(int64_t count) { return next() % count; }
  bool chance(int of_256) { return next() < of_256; }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
};

inline int64_t hostile(Bytes& bytes, int64_t ordinary) {
  constexpr int64_t smallest = std::numeric_limits<int64_t>::min();
  constexpr int64_t largest = std::numeric_limits<int64_t>::max();
  constexpr int64_t one = 1;
  const int64_t choices[] = {0,         -1,        1,         smallest,    largest,       largest - 1,
                             one << 31, one << 48, one << 62, -kUnbounded, kUnbounded + 1};
  const int64_t which = bytes.below(16);
  if (which < 11) return choices[which];
  if (which == 11) return static_cast<int64_t>(uint64_t{0} - static_cast<uint64_t>(ordinary));
  return static_cast<int64_t>(static_cast<uint64_t>(ordinary) + static_cast<uint64_t>(bytes.below(9) - 4));
}

struct Span {
  int64_t size, stride;
};

// Allocations that end with the call; none is larger than kLimit elements.
class Heap {
 public:
  static constexpr int64_t kLimit = 1 << 16;

  // Memory for exactly the elements that the spans reach, filled by `bytes`, and told by `extent`;
  // nullptr when that is too much, or a size is negative. The result points at element 0, wherever
  // negative strides put it.
  void* make(std::initializer_list<Span> spans, int64_t width, DType dtype, Bytes& bytes, bool values,
             Extent& extent) {
    double low = 0, high = 0;  // exact below kLimit, and far above it where not
    bool empty = false;
    extent = {};
    for (const Span& span : spans) {
      if (span.size < 0) return nullptr;
      empty |= span.size == 0;
      const double reach = static_cast<double>(span.size - 1) * static_cast<double>(span.stride);
      if (span.size > 1) (reach < 0 ? low : high) += reach;
    }
    if (high - low >= kLimit) return nullptr;
    const int64_t count = empty ? 0 : static_cast<int64_t>(high - low) + 1;
    blocks_.emplace_back(std::malloc(static_cast<size_t>(std::max<int64_t>(count * width, 1))), &std::free);
    uint8_t* block = static_cast<uint8_t*>(blocks_.back().get());
    for (int64_t i = 0; i < count * width; ++i) block[i] = 0;
    for (int64_t i = 0; values && i < count; ++i) {
      static constexpr double odd[] = {NAN, INFINITY, -INFINITY, 3e38, -3e38, 1e-40, -0.0};
      const int64_t byte = bytes.next();
      put(dtype, block, i, byte < 7 ? odd[byte] : static_cast<double>(byte - 128) / 50);
    }
    if (empty) return block;
    extent = {(static_cast<int64_t>(high) + 1) * width, -static_cast<int64_t>(low) * width};
    return block - static_cast<int64_t>(low) * width;
  }

 private:
  std::vector<std::unique_ptr<void, decltype(&std::free)>> blocks_;
};

}  // namespace polyattn::testing

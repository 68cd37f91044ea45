// Heap arrays of exactly the size that is told, with everything around the used elements watched.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "numbers.h"
#include "polyattn/arguments.h"

namespace polyattn::testing {

// Under the address sanitizer an array ends where its allocation ends; otherwise bytes of kCanary
// follow it. `front` bytes of kCanary come before it, which also varies the alignment.
class Buffer {
 public:
  static constexpr uint8_t kCanary = 0xa5;
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kBack = 0;
#else
  static constexpr size_t kBack = 256;
#endif

  Buffer(size_t bytes, size_t front)
      : front_(front), used_(bytes), size_(front + bytes + kBack),
        memory_(static_cast<uint8_t*>(std::malloc(size_ > 0 ? size_ : 1))) {
    reset();
  }
  ~Buffer() { std::free(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return memory_ + front_; }
  void reset() { std::memset(memory_, kCanary, size_); }
  std::vector<uint8_t> bytes() const { return {memory_, memory_ + size_}; }
  size_t front() const { return front_; }
  size_t size() const { return used_; }  // bytes from data() on

 private:
  size_t front_, used_, size_;
  uint8_t* memory_;
};

// An array (batch, head, row, column) and its place in memory.
struct Tensor {
  Array array;
  DType dtype = DType::f32;
  int64_t sizes[4] = {};
  const Buffer* buffer = nullptr;

  int64_t count() const { return sizes[0] * sizes[1] * sizes[2] * sizes[3]; }
  int64_t offset(int64_t b, int64_t n, int64_t t) const {
    return b * array.batch + n * array.head + t * array.row;
  }
  // Calls visit(element's index in memory, its number in contiguous order).
  template <class Visit>
  void each(const Visit& visit) const {
    int64_t number = 0;
    for (int64_t b = 0; b < sizes[0]; ++b) {
      for (int64_t n = 0; n < sizes[1]; ++n) {
        for (int64_t t = 0; t < sizes[2]; ++t) {
          for (int64_t h = 0; h < sizes[3]; ++h) visit(offset(b, n, t) + h, number++);
        }
      }
    }
  }
  double at(int64_t index) const { return get(dtype, array.data, index); }

  // Whether every byte around the elements is still a canary.
  bool surroundings_untouched() const {
    std::vector<uint8_t> bytes = buffer->bytes();
    const size_t width = static_cast<size_t>(size_of(dtype));
    each([&](int64_t index, int64_t) {
      std::memset(bytes.data() + buffer->front() + static_cast<size_t>(index) * width, Buffer::kCanary,
                  width);
    });
    for (const uint8_t byte : bytes) {
      if (byte != Buffer::kCanary) return false;
    }
    return true;
  }
};

// Strides from the last dimension to the first, 0 for sizes of 1; returns the elements.
inline int64_t contiguous(const int64_t (&sizes)[4], int64_t* const (&strides)[4]) {
  int64_t count = 1;
  for (int i = 0; i < 4; ++i) {
    *strides[i] = sizes[i] == 1 ? 0 : count;
    count *= sizes[i];
  }
  return count;
}

}  // namespace polyattn::testing

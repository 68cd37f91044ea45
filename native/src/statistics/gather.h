// The elements of a tensor in order, wherever they lie: how many bytes one has, one of them as a number, and
// runs of them brought together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "statistics/statistics.h"

namespace polyattn {

inline int64_t bytes_of(Element element) {
  switch (element) {
    case Element::i8:
    case Element::u8:
      return 1;
    case Element::bf16:
    case Element::f16:
    case Element::i16:
      return 2;
    case Element::f32:
    case Element::i32:
      return 4;
    case Element::f64:
    case Element::i64:
      return 8;
  }
  return 0;
}

inline int64_t count_of(const Tensor& t) {
  int64_t count = 1;
  for (int i = 0; i < t.dims; ++i) count *= t.sizes[i];
  return count;
}

// The same elements in the same order with as few dimensions as possible, at least one.
inline Tensor joined(const Tensor& t) {
  Tensor made = t;
  made.dims = 0;
  for (int i = 0; i < t.dims; ++i) {
    if (t.sizes[i] == 1) continue;
    const int last = made.dims - 1;
    if (last >= 0 && made.strides[last] == t.sizes[i] * t.strides[i]) {
      made.sizes[last] *= t.sizes[i];
      made.strides[last] = t.strides[i];
    } else {
      made.sizes[made.dims] = t.sizes[i];
      made.strides[made.dims] = t.strides[i];
      ++made.dims;
    }
  }
  if (made.dims == 0) {
    made.dims = 1;
    made.sizes[0] = made.strides[0] = 1;
  }
  return made;
}

// Walks the elements of a tensor in order, from any of them, and copies them to where they lie
// next to each other.
template <class T>
class Gather {
 public:
  Gather(const Tensor& t, int64_t first) : t_(t), last_(t.dims - 1) {
    for (int i = last_; i >= 0; --i) {
      at_[i] = first % t.sizes[i];
      first /= t.sizes[i];
    }
  }

  void copy(T* out, int64_t count) {
    while (count > 0) {
      const int64_t row = t_.sizes[last_], rows = count / row;
      const bool whole = last_ > 0 && at_[last_] == 0 && rows > 1;
      const int64_t done = whole ? row * copy_rows(out, rows) : copy_row(out, count);
      out += done;
      count -= done;
    }
  }

 private:
  static int64_t size_of(int64_t stride) { return stride < 0 ? -stride : stride; }

  const T* here() const {
    int64_t offset = 0;
    for (int i = 0; i <= last_; ++i) offset += at_[i] * t_.strides[i];
    return static_cast<const T*>(t_.data) + offset;
  }

  void forward(int dim, int64_t by) {
    at_[dim] += by;
    for (; dim > 0 && at_[dim] == t_.sizes[dim]; --dim) {
      at_[dim] = 0;
      ++at_[dim - 1];
    }
  }

  static void copy_line(T* out, const T* from, int64_t stride, int64_t count) {
    if (stride == 1) {
      std::memcpy(out, from, static_cast<size_t>(count) * sizeof(T));
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = from[i * stride];
    }
  }

  // Up to the end of the innermost dimension.
  int64_t copy_row(T* out, int64_t count) {
    const int64_t left = t_.sizes[last_] - at_[last_], run = left < count ? left : count;
    copy_line(out, here(), t_.strides[last_], run);
    forward(last_, run);
    return run;
  }

  // Whole rows, up to the end of the dimension before; those of a transposed tensor column by column,
  // as they lie in memory.
  int64_t copy_rows(T* out, int64_t rows) {
    const int64_t left = t_.sizes[last_ - 1] - at_[last_ - 1], taken = left < rows ? left : rows;
    const T* from = here();
    const int64_t row = t_.sizes[last_], down = t_.strides[last_ - 1], along = t_.strides[last_];
    if (size_of(down) < size_of(along)) {
      for (int64_t j = 0; j < row; ++j) {
        for (int64_t i = 0; i < taken; ++i) out[i * row + j] = from[i * down + j * along];
      }
    } else {
      for (int64_t i = 0; i < taken; ++i) copy_line(out + i * row, from + i * down, along, row);
    }
    forward(last_ - 1, taken);
    return taken;
  }

  const Tensor& t_;
  const int last_;
  int64_t at_[kMaxDims];
};

inline bool lies_together(const Tensor& t) { return t.dims == 1 && t.strides[0] == 1; }

inline double float_of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double x;
  if (exponent == 31) {
    x = fraction != 0 ? __builtin_nan("") : __builtin_huge_val();
  } else {
    x = exponent == 0 ? fraction * 0x1p-24 : (1024 + fraction) * __builtin_ldexp(1.0, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -x : x;
}

template <class T>
T read(const void* data, int64_t offset) {
  T x;
  std::memcpy(&x, static_cast<const char*>(data) + offset * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return x;
}

inline double element_at(const Tensor& t, int64_t index) {
  int64_t offset = 0;
  for (int i = t.dims - 1; i >= 0; --i) {
    offset += index % t.sizes[i] * t.strides[i];
    index /= t.sizes[i];
  }
  switch (t.element) {
    case Element::f32:
      return read<float>(t.data, offset);
    case Element::bf16: {
      const uint32_t bits = uint32_t{read<uint16_t>(t.data, offset)} << 16;
      return read<float>(&bits, 0);
    }
    case Element::f16:
      return float_of_half(read<uint16_t>(t.data, offset));
    case Element::f64:
      return read<double>(t.data, offset);
    case Element::i8:
      return read<int8_t>(t.data, offset);
    case Element::u8:
      return read<uint8_t>(t.data, offset);
    case Element::i16:
      return read<int16_t>(t.data, offset);
    case Element::i32:
      return read<int32_t>(t.data, offset);
    case Element::i64:
      return static_cast<double>(read<int64_t>(t.data, offset));
  }
  return 0;
}

}  // namespace polyattn

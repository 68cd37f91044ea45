#include "reach.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace polyattn {
namespace {

// Adds (size - 1) * stride to the end that it moves; false when that leaves 64 bits.
bool move(const Dimension& dimension, int64_t& low, int64_t& high) {
  int64_t step = 0;
  if (__builtin_mul_overflow(dimension.size - 1, dimension.stride, &step)) return false;
  int64_t& end = step < 0 ? low : high;
  return !__builtin_add_overflow(end, step, &end);
}

}  // namespace

const char* complain(const char* form, ...) {
  static thread_local char text[320];
  va_list numbers;
  va_start(numbers, form);
  std::vsnprintf(text, sizeof text, form, numbers);
  va_end(numbers);
  return text;
}

const char* check_reach(const char* name, std::initializer_list<Dimension> dimensions, int64_t columns,
                        int64_t width, const Extent& extent) {
  int64_t low = 0, high = columns - 1, span = 0;
  bool empty = columns <= 0, within = true;
  for (const Dimension& dimension : dimensions) {
    within &= dimension.stride >= -kMaxStride && dimension.stride <= kMaxStride;
    empty |= dimension.size <= 0;
    if (within && dimension.size > 1) within = move(dimension, low, high);
  }
  if (!within || __builtin_sub_overflow(high, low, &span) || span >= kMaxExtent / width) {
    return complain("%s's strides are beyond 2**48 elements or reach beyond 2**61 bytes", name);
  }
  const int64_t first = -(extent.before / width), last = extent.bytes / width - 1;
  if (empty || (low >= first && high <= last)) return nullptr;
  return complain(
      "%s: got sizes and strides that reach elements %lld to %lld, expected elements %lld to %lld, "
      "which are all that its memory holds",
      name, static_cast<long long>(low), static_cast<long long>(high), static_cast<long long>(first),
      static_cast<long long>(last));
}

bool overlapping(Dimension (&dimensions)[3], int64_t row_elements) {
  for (Dimension& dimension : dimensions) {
    dimension.stride = dimension.size <= 1 ? 0 : std::abs(dimension.stride);
  }
  const auto order = [](Dimension& inner, Dimension& outer) {
    if (inner.stride > outer.stride) std::swap(inner, outer);
  };
  order(dimensions[0], dimensions[1]);
  order(dimensions[1], dimensions[2]);
  order(dimensions[0], dimensions[1]);
  int64_t covered = row_elements;
  for (const Dimension& dimension : dimensions) {
    if (dimension.size <= 1) continue;
    if (dimension.stride < covered) return true;
    covered += (dimension.size - 1) * dimension.stride;
  }
  return false;
}

}  // namespace polyattn

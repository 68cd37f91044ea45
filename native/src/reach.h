// Which elements of an array a call touches, against those that its memory holds.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "polyattn/arguments.h"

namespace polyattn {

// Holds for dimensions of size 1 too, so that a kernel may form addresses a few rows ahead.
constexpr int64_t kMaxStride = int64_t{1} << 48;
// Byte offsets stay far from the end of the address space's arithmetic.
constexpr int64_t kMaxExtent = int64_t{1} << 61;

struct Dimension {
  int64_t size, stride;
};

// A complaint with numbers in it, valid until the thread's next one. Ordinary calls make none.
__attribute__((format(printf, 1, 2))) const char* complain(const char* form, ...);

// Returns nullptr when every element of the array lies within its memory, else the complaint.
// `columns`: how many elements lie side by side at each place; `width`: the bytes of an element.
const char* check_reach(const char* name, std::initializer_list<Dimension> dimensions, int64_t columns,
                        int64_t width, const Extent& extent);

// Whether two rows of an array that is written can share elements: threads write rows in any order.
bool overlapping(Dimension (&dimensions)[3], int64_t row_elements);

}  // namespace polyattn

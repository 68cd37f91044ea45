// What a product takes, however it is computed.
#pragma once

#include "kernel/elements.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Operands that lie in several pieces along the summed dim.
struct Piece {
  const float* a;
  const float* b;
  int64_t count;  // units
};

// Element (row, unit) of A lies at row * a_row + unit * a_step, (unit, column) of B at unit * b_row + column.
struct Strides {
  int64_t a_row, a_step, b_row, c_row;
};

// What becomes of the sums. `set_max` also raises tops[row * lanes ..] to the largest of each lane.
enum class Into { set, add, set_max };

}  // namespace polyattn::POLYATTN_NAMESPACE

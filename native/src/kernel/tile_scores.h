// Scores of 32 rows of up to 64 elements by a matrix unit. Where what they are made of and what they become is in the
// first cache, loads and stores of tiles take longer than the products: the rows' tiles stay in the unit, while those
// of keys pass.
#pragma once

#include "kernel/operands.h"
#include "kernel/units.h"

namespace polyattn::POLYATTN_NAMESPACE {

template <class U>
class TileScores {
  static constexpr int kSide = kTileUnits;

 public:
  static constexpr int kRows = 2 * kSide, kMostUnits = 2 * kSide;

  // c = a @ b, of whole tiles: `units` and `columns` are multiples.
  void run(const float* a, const float* b, const Strides& s, int64_t units, int64_t columns, float* c) {
    units > kSide ? rows<2>(a, b, s, columns, c) : rows<1>(a, b, s, columns, c);
  }

 private:
  template <int kWide>
  POLYATTN_INLINE void rows(const float* a, const float* b, const Strides& s, int64_t columns, float* c) {
    const float* const below = a + kSide * s.a_row;
    tiles_.template load<2>(a, s.a_row);
    tiles_.template load<3>(below, s.a_row);
    if constexpr (kWide > 1) {
      tiles_.template load<4>(a + kSide, s.a_row);
      tiles_.template load<5>(below + kSide, s.a_row);
    }
    for (int64_t column = 0; column < columns; column += kSide) {
      tiles_.template zero<0>();
      tiles_.template zero<1>();
      tiles_.template load<6>(b + column, s.b_row);
      tiles_.template dot<0, 2, 6>();
      tiles_.template dot<1, 3, 6>();
      if constexpr (kWide > 1) {
        tiles_.template load<7>(b + column + kSide * s.b_row, s.b_row);
        tiles_.template dot<0, 4, 7>();
        tiles_.template dot<1, 5, 7>();
      }
      tiles_.template store<0>(c + column, s.c_row);
      tiles_.template store<1>(c + column + kSide * s.c_row, s.c_row);
    }
  }

  typename U::Tiles tiles_;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

// Products by a matrix unit: two by two tiles of sums stay in it while the summed dim runs, and four
// products meet four loads. Tiles 0 to 3 are sums, 4 and 5 rows of A, 6 and 7 columns of B.
//
// The operands lie in memory as the vectors take them: what is packed for products of pairs along
// registers is row for row what a tile of B wants, and rows of units are tiles of A.
#pragma once

#include "kernel/operands.h"
#include "kernel/units.h"

namespace polyattn::POLYATTN_NAMESPACE {

template <class S, class U, Into kInto>
class TileProduct {
  static constexpr int kSide = kTileUnits;  // rows, units and columns of a tile
  static constexpr int kMostTurned = 2 * kSide;

 public:
  __attribute__((noinline)) void run(const Piece* pieces, int count, Strides s, int64_t rows, int64_t columns,
                                     float* c) {
    static_assert(S::kLanes == kSide && kInto != Into::set_max);
    for (int64_t r = 0; r < rows; r += 2 * kSide) {
      const int64_t here = smaller<int64_t>(rows - r, 2 * kSide);
      if (s.a_step == 1) {
        panels(pieces, count, r, s, here, columns, c + r * s.c_row);
      } else {
        const Piece turned = turn(*pieces, s, r, here);  // there is one piece
        panels(&turned, 1, 0, {kMostTurned, 1, s.b_row, s.c_row}, here, columns, c + r * s.c_row);
      }
    }
  }

 private:
  // Up to 32 rows of A that lie in columns, with up to 32 units, as rows.
  Piece turn(const Piece& piece, const Strides& s, int64_t row, int64_t rows) {
    for (int64_t r = 0; r < rows; r += kSide) {
      for (int64_t k = 0; k < piece.count; k += kSide) {
        typename S::Vec x[kSide];
#pragma GCC unroll 16
        for (int i = 0; i < kSide; ++i) x[i] = S::load(piece.a + (row + r) * s.a_row + (k + i) * s.a_step);
        S::transpose(x);
#pragma GCC unroll 16
        for (int i = 0; i < kSide; ++i) S::store(turned_ + (r + i) * kMostTurned + k, x[i]);
      }
    }
    return {turned_, piece.b, piece.count};
  }

  // Up to 32 rows, from `row` of A on, which are the first of C.
  void panels(const Piece* pieces, int count, int64_t row, const Strides& s, int64_t rows, int64_t columns,
              float* c) {
    int64_t column = 0;
    for (; column < columns; column += 2 * kSide) {
      const bool wide = columns - column > kSide;
      if (rows > kSide) {
        wide ? block<2, 2>(pieces, count, row, s, rows, column, c + column)
             : block<2, 1>(pieces, count, row, s, rows, column, c + column);
      } else {
        wide ? block<1, 2>(pieces, count, row, s, rows, column, c + column)
             : block<1, 1>(pieces, count, row, s, rows, column, c + column);
      }
    }
  }

  template <int R, int C>
  void block(const Piece* pieces, int count, int64_t row, const Strides& s, int64_t rows, int64_t column,
             float* c) {
    const int64_t last = rows - (R - 1) * kSide;  // rows of the last tile that there are
    begin<R, C>(c, s.c_row, last);
    for (int p = 0; p < count; ++p) {
      const float* a = pieces[p].a + row * s.a_row;
      const float* b = pieces[p].b + column;
      for (int64_t k = 0; k < pieces[p].count; k += kSide) {
        load_a<R>(a + k, s.a_row, last);
        tiles_.template load<6>(b + k * s.b_row, s.b_row);
        if constexpr (C > 1) tiles_.template load<7>(b + k * s.b_row + kSide, s.b_row);
        tiles_.template dot<0, 4, 6>();
        if constexpr (C > 1) tiles_.template dot<1, 4, 7>();
        if constexpr (R > 1) tiles_.template dot<2, 5, 6>();
        if constexpr (R > 1 && C > 1) tiles_.template dot<3, 5, 7>();
      }
    }
    end<R, C>(c, s.c_row, last);
  }

  // Whole tiles are loaded from the operand, what has fewer rows from a copy: behind it lies other memory.
  template <int R>
  POLYATTN_INLINE void load_a(const float* a, int64_t a_row, int64_t last) {
    if constexpr (R > 1) tiles_.template load<4>(a, a_row);
    const float* from = a + (R - 1) * kSide * a_row;
    if (last < kSide) {
      copy_rows(from, a_row, last, cut_, kSide);
      tiles_.template load<3 + R>(cut_, kSide);
    } else {
      tiles_.template load<3 + R>(from, a_row);
    }
  }

  template <int R, int C>
  POLYATTN_INLINE void begin(const float* c, int64_t c_row, int64_t last) {
    if constexpr (kInto != Into::add) {
      tiles_.template zero<0>();
      if constexpr (C > 1) tiles_.template zero<1>();
      if constexpr (R > 1) tiles_.template zero<2>();
      if constexpr (R > 1 && C > 1) tiles_.template zero<3>();
      return;
    }
    if constexpr (R > 1) {
      tiles_.template load<0>(c, c_row);
      if constexpr (C > 1) tiles_.template load<1>(c + kSide, c_row);
    }
    const float* from = c + (R - 1) * kSide * c_row;
    if (last < kSide) {
      copy_rows(from, c_row, last, cut_, kSide);
      tiles_.template load<2 * R - 2>(cut_, kSide);
      if constexpr (C > 1) {
        copy_rows(from + kSide, c_row, last, cut_, kSide);
        tiles_.template load<2 * R - 1>(cut_, kSide);
      }
    } else {
      tiles_.template load<2 * R - 2>(from, c_row);
      if constexpr (C > 1) tiles_.template load<2 * R - 1>(from + kSide, c_row);
    }
  }

  template <int R, int C>
  POLYATTN_INLINE void end(float* c, int64_t c_row, int64_t last) {
    if constexpr (R > 1) {
      tiles_.template store<0>(c, c_row);
      if constexpr (C > 1) tiles_.template store<1>(c + kSide, c_row);
    }
    float* to = c + (R - 1) * kSide * c_row;
    if (last < kSide) {
      tiles_.template store<2 * R - 2>(cut_, kSide);
      copy_rows(cut_, kSide, last, to, c_row);
      if constexpr (C > 1) {
        tiles_.template store<2 * R - 1>(cut_, kSide);
        copy_rows(cut_, kSide, last, to + kSide, c_row);
      }
    } else {
      tiles_.template store<2 * R - 2>(to, c_row);
      if constexpr (C > 1) tiles_.template store<2 * R - 1>(to + kSide, c_row);
    }
  }

  static POLYATTN_INLINE void copy_rows(const float* from, int64_t from_row, int64_t rows, float* to,
                                        int64_t to_row) {
    for (int64_t r = 0; r < rows; ++r) S::store(to + r * to_row, S::load(from + r * from_row));
  }

  typename U::Tiles tiles_;
  alignas(64) float turned_[2 * kSide * kMostTurned];
  alignas(64) float cut_[kSide * kSide];
};

}  // namespace polyattn::POLYATTN_NAMESPACE

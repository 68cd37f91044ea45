// The register block: kRowBlock rows by kColumnBlock vectors of sums stay in registers while the
// summed dim runs; one broadcast of A meets a row of B. With a fetcher, what is needed next is fetched between pieces.
#pragma once

#include "kernel/fetcher.h"
#include "kernel/operands.h"

namespace polyattn::POLYATTN_NAMESPACE {

template <class S, int R, int C>
struct Sums {
  typename S::Vec v[R][C];
};

// sums[r][c] += sum_k a[r * a_row + k * a_step] * b[k * b_row + c], in units.
template <class S, class U, int R, int C>
POLYATTN_INLINE void accumulate(Sums<S, R, C>& sums, const float* a, int64_t a_row, int64_t a_step,
                                const float* b, int64_t b_row, int64_t count) {
  using Vec = typename S::Vec;
  for (int64_t k = 0; k < count; ++k) {
    Vec row[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) row[c] = S::load(b + c * S::kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      Vec x = S::fill(a[r * a_row]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums.v[r][c] = U::template dot<S>(sums.v[r][c], x, row[c]);
    }
    a += a_step;
    b += b_row;
  }
}

template <class S, class U, int R, int C, Into kInto>
POLYATTN_INLINE void block(const Piece* pieces, int count, Strides s, int64_t row, int64_t column, float* c,
                           float* tops, Fetcher* fetcher) {
  using Vec = typename S::Vec;
  Sums<S, R, C> sums;
  c += row * s.c_row + column;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i)
      sums.v[r][i] = kInto == Into::add ? S::load(c + r * s.c_row + i * S::kLanes) : S::zero();
  }
  for (int p = 0; p < count; ++p) {
    if (fetcher) fetcher->some();
    accumulate<S, U, R, C>(sums, pieces[p].a + row * s.a_row, s.a_row, s.a_step, pieces[p].b + column,
                           s.b_row, pieces[p].count);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) S::store(c + r * s.c_row + i * S::kLanes, sums.v[r][i]);
    if constexpr (kInto == Into::set_max) {
      float* top = tops + (row + r) * S::kLanes;
      Vec most = S::load(top);  // a NaN is passed over
#pragma GCC unroll 8
      for (int i = 0; i < C; ++i) most = S::max(sums.v[r][i], most);
      S::store(top, most);
    }
  }
}

template <class S, class U, int C, Into kInto>
__attribute__((noinline)) void column_of_blocks(const Piece* pieces, int count, Strides s, int64_t rows,
                                                int64_t column, float* c, float* tops, Fetcher* fetcher) {
  int64_t r = 0;
  for (; r + S::kRowBlock <= rows; r += S::kRowBlock)
    block<S, U, S::kRowBlock, C, kInto>(pieces, count, s, r, column, c, tops, fetcher);
  if (r + 4 <= rows) {
    block<S, U, 4, C, kInto>(pieces, count, s, r, column, c, tops, fetcher);
    r += 4;
  }
  if (r + 2 <= rows) {
    block<S, U, 2, C, kInto>(pieces, count, s, r, column, c, tops, fetcher);
    r += 2;
  }
  if (r < rows) block<S, U, 1, C, kInto>(pieces, count, s, r, column, c, tops, fetcher);
}

template <class S, class U, Into kInto>
inline void multiply_vectors(const Piece* pieces, int count, Strides s, int64_t rows, int64_t columns,
                             float* c, float* tops, Fetcher* fetcher = nullptr) {
  constexpr int64_t kPanel = int64_t{S::kColumnBlock} * S::kLanes;
  int64_t column = 0;
  for (; column + kPanel <= columns; column += kPanel)
    column_of_blocks<S, U, S::kColumnBlock, kInto>(pieces, count, s, rows, column, c, tops, fetcher);
  if constexpr (S::kColumnBlock > 2) {
    if (column + 2 * S::kLanes <= columns) {
      column_of_blocks<S, U, 2, kInto>(pieces, count, s, rows, column, c, tops, fetcher);
      column += 2 * S::kLanes;
    }
  }
  for (; column < columns; column += S::kLanes)
    column_of_blocks<S, U, 1, kInto>(pieces, count, s, rows, column, c, tops, fetcher);
}

}  // namespace polyattn::POLYATTN_NAMESPACE

// The most multiply-adds that this instruction set can do: operands never leave registers.
#pragma once

#include "kernel/units.h"

namespace polyattn::POLYATTN_NAMESPACE {

template <class S, class U>
inline double spin(int64_t iterations) {
  constexpr int R = S::kRowBlock, C = S::kColumnBlock;
  typename S::Vec sums[R][C], column[C], row = S::fill(1.0f);
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) column[c] = S::fill(0.0f);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[r][c] = S::fill(float(r * C + c));
  }
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[r][c] = U::template dot<S>(sums[r][c], row, column[c]);
    }
    asm volatile("" : POLYATTN_REGISTER(row));  // a fresh operand, so that nothing leaves the loop
  }
  typename S::Vec total = S::zero();
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) total = S::add(total, sums[r][c]);
  }
  volatile float used = S::sum(total);
  (void)used;
  return 2.0 * double(R * C * S::kLanes * U::kValues) * double(iterations);
}

// The same from tiles.
template <class U>
inline double spin_tiles(int64_t iterations) {
  alignas(64) float tile[kTileUnits * kTileUnits] = {};
  [[maybe_unused]] const typename U::Session session;
  typename U::Tiles tiles;
  tiles.template zero<0>();
  tiles.template zero<1>();
  tiles.template zero<2>();
  tiles.template zero<3>();
  tiles.template load<4>(tile, kTileUnits);
  tiles.template load<5>(tile, kTileUnits);
  tiles.template load<6>(tile, kTileUnits);
  tiles.template load<7>(tile, kTileUnits);
  for (int64_t i = 0; i < iterations; ++i) {
    tiles.template dot<0, 4, 6>();
    tiles.template dot<1, 4, 7>();
    tiles.template dot<2, 5, 6>();
    tiles.template dot<3, 5, 7>();
  }
  tiles.template store<0>(tile, kTileUnits);
  volatile float used = tile[0];
  (void)used;
  constexpr double kOperations = 2.0 * kTileUnits * kTileUnits * kTileUnits * U::kValues;
  return 4 * kOperations * double(iterations);
}

}  // namespace polyattn::POLYATTN_NAMESPACE

// What one 32-bit unit of a matrix operand holds, and the multiply-add that takes it.
//
// Both operands of every product are arrays of 32-bit units: one float, or two neighbouring
// bfloat16 along the summed dim. Packing and addressing are the same for both.
#pragma once

#include "kernel/elements.h"

namespace polyattn::POLYATTN_NAMESPACE {

// What a thread holds while it multiplies; only products of tiles need something.
struct NoSession {};

struct FloatUnit {
  static constexpr bool kInTiles = false;
  using Session = NoSession;
  static constexpr int kValues = 1;  // values in a unit
  static constexpr int kDegree = 5;  // of the exponential in the backward pass
  template <class S>
  static POLYATTN_INLINE typename S::Vec dot(typename S::Vec sum, typename S::Vec a, typename S::Vec b) {
    return S::fma(a, b, sum);
  }
};

struct PairUnit {
  static constexpr bool kInTiles = false;
  using Session = NoSession;
  static constexpr int kValues = 2;
  static constexpr int kDegree = 3;
  template <class S>
  static POLYATTN_INLINE typename S::Vec dot(typename S::Vec sum, typename S::Vec a, typename S::Vec b) {
    return S::dot_pairs(sum, a, b);
  }
};

// Pairs that a matrix unit multiplies, 16 rows of 16 units at a time (matmul_tiles.h). A tile is always
// whole: what is summed is padded with zeros, what is not with anything.
template <class Unit>
struct TileUnit : PairUnit {
  static constexpr bool kInTiles = true;
  using Tiles = Unit;
  using Session = typename Unit::Session;
};

constexpr int kTileUnits = 16;

// Units along a summed dim.
template <class U>
POLYATTN_INLINE int64_t units_of(int64_t dim) {
  const int64_t units = blocks_of(dim, U::kValues);
  return U::kInTiles ? round_up(units, kTileUnits) : units;
}

// To how many keys a tile's columns are rounded up, which are columns of its scores and summed with its
// values; how many query rows are multiplied at once; and how many keys, where they are summed.
template <class S, class U>
constexpr int kColumnGrain = U::kInTiles ? kTileUnits * U::kValues : S::kLanes;
template <class S, class U>
constexpr int kRowGrain = U::kInTiles ? 2 * kTileUnits : S::kRowBlock;
template <class U>
constexpr int kSumGrain = U::kInTiles ? kTileUnits * U::kValues : U::kValues;

}  // namespace polyattn::POLYATTN_NAMESPACE

// The product of all passes, from registers or, for units that a matrix unit multiplies, from tiles.
#pragma once

#include "kernel/matmul_tiles.h"
#include "kernel/matmul_vectors.h"
#include "kernel/units.h"

namespace polyattn::POLYATTN_NAMESPACE {

// c = [c +] sum over pieces of a @ b; columns a multiple of the lanes. In tiles, the units of a piece are
// a multiple of kTileUnits, and nobody asks for maxima or has a fetcher.
template <class S, class U, Into kInto>
inline void multiply(const Piece* pieces, int count, Strides s, int64_t rows, int64_t columns, float* c,
                     float* tops = nullptr, Fetcher* fetcher = nullptr) {
  if constexpr (U::kInTiles) {
    TileProduct<S, U, kInto> product;  // its memory is not cleared
    product.run(pieces, count, s, rows, columns, c);
  } else {
    multiply_vectors<S, U, kInto>(pieces, count, s, rows, columns, c, tops, fetcher);
  }
}

}  // namespace polyattn::POLYATTN_NAMESPACE

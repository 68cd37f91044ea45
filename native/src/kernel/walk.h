// In which order a chunk's tiles are met by the few rows of one or of several items.
#pragma once

#include "kernel/division.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Calls `each` for what `count` items, at most kMostTogether, visit of a chunk from key `begin` on: for so many keys in
// `turn` with an item, a tile's number, the first of its keys and how many.
template <class Each>
POLYATTN_INLINE void walk(const Visit* visits, int count, int64_t begin, int turn, Each each) {
  int at[kMostTogether] = {};
  for (int64_t j = begin; j < begin + kChunkKeys; j += kTile) {
    int keys = 0;
    for (int i = 0; i < count; ++i) {
      while (at[i] < visits[i].tiles && visits[i].tile[at[i]].j0 < j) ++at[i];
      if (at[i] < visits[i].tiles && visits[i].tile[at[i]].j0 == j) {
        keys = larger(keys, visits[i].tile[at[i]].keys);
      }
    }
    for (int from = 0; from < keys; from += turn) {
      for (int i = 0; i < count; ++i) {
        if (at[i] >= visits[i].tiles) continue;
        const Tile& tile = visits[i].tile[at[i]];
        if (tile.j0 == j && from < tile.keys) each(i, at[i], from, smaller(tile.keys - from, turn));
      }
    }
  }
}

// Calls `each` for tiles that follow one another: with the number of the first one and how many keys they have.
template <class Each>
POLYATTN_INLINE void by_runs(const Visit& visit, Each each) {
  for (int n = 0, end; n < visit.tiles; n = end) {
    for (end = n + 1; end < visit.tiles && visit.tile[end].j0 == visit.tile[end - 1].j0 + kTile;) ++end;
    each(n, visit.tile[end - 1].j0 + visit.tile[end - 1].keys - visit.tile[n].j0);
  }
}

}  // namespace polyattn::POLYATTN_NAMESPACE

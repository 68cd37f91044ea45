// Keys or values of few query rows as rows of tiles, sixteen at a time, and what is fetched meanwhile.
#pragma once

#include <type_traits>

#include "kernel/key_rows.h"
#include "kernel/units.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Up to kTile keys or values, and what is fetched meanwhile. They lie `offset` elements behind at[i], and `stride`
// elements from each other but at the ends of pages.
template <class C>
struct FewKeys {
  const C* const* at;
  int64_t offset, stride;
  bool paged;
  int count;
  Ahead<C> ahead;
};

// Where a tile is loaded from, and bytes from a row to the next.
struct TilePlace {
  const void* at;
  int64_t bytes;
};

// Sixteen keys or values, from an element on of which `left` are there.
template <class C>
struct TileRows {
  static constexpr int kSide = kTileUnits;

  const C* first;
  const C* const* at;
  int64_t offset, stride, left;
  bool even;  // all lie `stride` elements from each other: not at the ends of pages, nor behind the last
  const C* const* ahead;
  int64_t further;

  POLYATTN_INLINE TileRows(const FewKeys<C>& keys, int n, int64_t element, int64_t dim)
      : at(keys.at + n * kSide), offset(keys.offset + element), stride(keys.stride), left(dim - element) {
    first = at[0] + offset;
    even = (n + 1) * kSide <= keys.count;
    for (int i = 1; keys.paged && i < kSide; ++i) even &= at[i] - at[0] == i * stride;
    ahead = keys.ahead.here() ? keys.ahead.rows + n * kSide : nullptr;
    further = keys.ahead.offset + element;
  }

  // Fetches into the second cache, with the t-th of T tiles, the T-th part of rows that are read later.
  template <int T, int t>
  POLYATTN_INLINE void fetch(int wide) const {
    if (!ahead) return;
#pragma GCC unroll 16
    for (int i = kSide * t / T; i < kSide * (t + 1) / T; ++i) {
      const C* const row = ahead[i] + further;
#pragma GCC unroll 4
      for (int n = 0; n < T * wide; n += 64 / int{sizeof(C)}) __builtin_prefetch(row + n, 0, 2);
    }
  }
};

// Calls `run` with the number of tiles that elements are, `wide` in each and kMost tiles at most, as a type's value.
template <int kMost, class Run>
POLYATTN_INLINE void by_tiles(int64_t elements, int wide, Run run) {
  if constexpr (kMost > 3) {
    if (elements > 3 * wide) return run(std::integral_constant<int, 4>());
    if (elements > 2 * wide) return run(std::integral_constant<int, 3>());
  }
  if (elements > wide) return run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, 1>());
}

// Calls `run` with 0 to N - 1, as types' values.
template <int N, class Run>
POLYATTN_INLINE void each(Run run) {
  run(std::integral_constant<int, 0>());
  if constexpr (N > 1) run(std::integral_constant<int, 1>());
  if constexpr (N > 2) run(std::integral_constant<int, 2>());
  if constexpr (N > 3) run(std::integral_constant<int, 3>());
}

}  // namespace polyattn::POLYATTN_NAMESPACE

// Keys or values of few query rows as rows of tiles, sixteen at a time, and what is fetched meanwhile.
#pragma once

#include <type_traits>

#include "kernel/even_rows.h"
#include "kernel/units.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Some keys or values, up to a chunk, and what is fetched meanwhile: ahead(j) while those from the j-th on are met. They
// lie `stride` elements from each other but at the ends of pages.
template <class Rows, class AheadOf>
struct FewKeys {
  Rows rows;
  AheadOf ahead;
  int64_t stride;
  bool paged;
  int count;
};

// Where a tile is loaded from, and bytes from a row to the next.
struct TilePlace {
  const void* at;
  int64_t bytes;
};

// Sixteen keys or values, from an element on of which `left` are there.
template <class Rows, class AheadOf>
struct TileRows {
  using C = typename Rows::Element;
  static constexpr int kSide = kTileUnits;

  const FewKeys<Rows, AheadOf>& keys;
  int64_t from, element, left;
  const C* first;
  decltype(keys.ahead(0)) next;
  bool even;  // all lie `stride` elements from each other: not at the ends of pages, nor behind the last

  POLYATTN_INLINE TileRows(const FewKeys<Rows, AheadOf>& few, int n, int64_t element, int64_t dim)
      : keys(few), from(int64_t{n} * kSide), element(element), left(dim - element),
        first(few.rows[from] + element), next(few.ahead(from)) {
    even = from + kSide <= keys.count;
    if constexpr (!Rows::kEven) {
      for (int i = 1; keys.paged && i < kSide; ++i) even &= row(i) - first == i * keys.stride;
    }
  }

  // The last one stands for those behind it.
  POLYATTN_INLINE const C* row(int i) const {
    return keys.rows[smaller<int64_t>(from + i, keys.count - 1)] + element;
  }

  // Fetches into the second cache, with the t-th of T tiles, the T-th part of rows that are read later.
  template <int T, int t>
  POLYATTN_INLINE void fetch(int wide) const {
    constexpr int kFirst = kSide * t / T, kEnd = kSide * (t + 1) / T;
    if (!next.here(kEnd - 1)) return;
#pragma GCC unroll 16
    for (int i = kFirst; i < kEnd; ++i) {
      const C* const row = next.of(i) + element;
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

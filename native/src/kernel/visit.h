// Which tiles of a chunk of keys a strip of rows must visit.
#pragma once

#include "kernel/mask.h"
#include "kernel/units.h"

namespace polyattn::POLYATTN_NAMESPACE {

constexpr int kChunk = 8;  // tiles
constexpr int64_t kChunkKeys = kChunk * kTile;
// Between rows of arrays as wide as a chunk: a power of two would put them all into a few sets of the
// first cache.
constexpr int64_t kScoreRow = kChunkKeys + 16;

struct Tile {
  int64_t j0;
  int keys, columns;  // columns: rounded up to the grain
  int slot;           // in the packed chunk
  int first;          // column of its scores, of all that are visited
};

struct Visit {
  int tiles = 0, columns = 0;
  Tile tile[kChunk];
  bool mixed[kChunk];
};

// Passes over tiles whose blocks no row of a strip sees: of a long call most, and to ask all of the mask for each of
// them takes as long as a tenth of the products.
class UnseenBlocks {
 public:
  UnseenBlocks(const Arguments& a, const Sequence& q, const Strip& s) {
    for (int i = 0; i < a.terms; ++i) {
      const Term& term = a.term[i];
      if (term.kind == TermKind::either || term.kind == TermKind::complement) return;  // others may see them
    }
    for (int i = 0; i < a.terms && term_ == nullptr; ++i) {
      const Term& term = a.term[i];
      if (term.kind == TermKind::blocks && (s.one_head || term.head == 0)) term_ = &term;
    }
    if (term_ == nullptr) return;
    const int64_t line = s.t_low / term_->block_q;
    lines_ = s.t_high / term_->block_q - line + 1;
    bits_ = term_->bytes + q.b * term_->batch + s.head[0] * term_->head + line * term_->row;
  }

  // Keys j0 to j1 - 1 of a tile; false: ask all of the mask.
  bool hold(int64_t j0, int64_t j1) const {
    if (term_ == nullptr) return false;
    const int64_t size = term_->block_k, first = size == kTile ? j0 / kTile : j0 / size;
    const int64_t last = size == kTile ? first : (j1 - 1) / size;
    for (int64_t r = 0; r < lines_; ++r) {
      const uint8_t* const line = bits_ + r * term_->row;
      for (int64_t c = first; c <= last; ++c) {
        if (line[c * term_->column] != 0) return false;
      }
    }
    return true;
  }

 private:
  const Term* term_ = nullptr;
  const uint8_t* bits_ = nullptr;
  int64_t lines_ = 0;
};

// The next tiles from key `begin` on that are visited, at most kChunk, of those up to `end`; returns the key at
// which to go on. Tiles are packed from key `origin` on. `bits`: kRows words for each visited tile; set where it
// is mixed.
template <class S, class U>
inline int64_t plan_some(const Arguments& a, const Sequence& q, const Strip& s, int64_t origin, int64_t begin,
                         int64_t end, uint64_t* bits, Visit* visit) {
  int64_t j = begin;
  const UnseenBlocks unseen(a, q, s);
  for (; j < end && visit->tiles < kChunk; j += kTile) {
    if (unseen.hold(j, smaller(j + kTile, end))) continue;
    Tile tile;
    tile.j0 = j;
    tile.keys = int(smaller<int64_t>(kTile, end - j));
    tile.columns = int(round_up(tile.keys, kColumnGrain<S, U>));
    tile.slot = int((j - origin) / kTile);
    uint64_t* own = bits + int64_t{visit->tiles} * kRows;
    Cover seen = cover(a, q, s, j, j + tile.keys);
    if (seen == Cover::mixed) seen = words<S>(a, q, s, j, tile.keys, own);
    if (seen == Cover::empty) continue;
    if (seen == Cover::full && tile.keys < tile.columns) {  // the padding of the last tile
      for (int r = 0; r < s.count; ++r) own[r] = low_bits(tile.keys);
      seen = Cover::mixed;
    }
    tile.first = visit->columns;
    visit->tile[visit->tiles] = tile;
    visit->mixed[visit->tiles++] = seen == Cover::mixed;
    visit->columns += tile.columns;
  }
  return j;
}

// The same for a whole chunk, keys begin to end - 1.
template <class S, class U>
inline void plan(const Arguments& a, const Sequence& q, const Strip& s, int64_t begin, int64_t end,
                 uint64_t* bits, Visit* visit) {
  plan_some<S, U>(a, q, s, begin, begin, end, bits, visit);
}

// The keys of a tile, from a multiple of `grain` to another, outside of which rows first to end - 1
// see nothing.
inline Span seen_keys(const uint64_t* words, int64_t first, int64_t end, int64_t grain, int64_t columns) {
  uint64_t any = 0;
  for (int64_t r = first; r < end; ++r) any |= words[r];
  if (any == 0) return {0, 0};
  const int64_t low = __builtin_ctzll(any) / grain * grain;
  return {low, smaller(round_up(64 - __builtin_clzll(any), grain), columns)};
}

// Copies packed rows, with 0 in those whose bit is not set.
template <class U>
inline void clean(const float* packed, int64_t units, int64_t columns, uint64_t bits, float* to) {
  for (int64_t u = 0; u < units; ++u) {
    uint32_t keep = 0;
    for (int i = 0; i < U::kValues; ++i) {
      const uint32_t part = U::kValues == 1 ? 0xffffffffu : 0xffffu << 16 * i;
      if (bits >> (u * U::kValues + i) & 1) keep |= part;
    }
    for (int64_t c = 0; c < columns; ++c)
      to[u * columns + c] = float_of(bits_of(packed[u * columns + c]) & keep);
  }
}

}  // namespace polyattn::POLYATTN_NAMESPACE

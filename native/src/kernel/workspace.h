// The memory in which a thread runs an item, or the few rows of several items.
#pragma once

#include "kernel/block_softmax.h"
#include "kernel/key_rows.h"
#include "kernel/parts.h"

namespace polyattn::POLYATTN_NAMESPACE {

// A thread's memory: O(tile).
struct Workspace {
  float *q, *k, *v, *cleaned, *scores, *out;
  RowStates state;
  uint64_t* words;
  Strip* strips;
  const void **keys_at, **values_at, **next_keys, **next_values;  // for few rows
  float *key_scales, *value_scales;                               // for few rows of keys that are codes
  float* decoded;                                                 // of such keys, a tile's rows
  Fetcher* fetcher = nullptr;                                     // the thread's

  static size_t layout(const Arguments& a, const Division& d, int64_t k_units, float* base, Workspace* w) {
    MemoryParts parts(base);
    const auto take = [&](size_t floats) { return parts.take(floats); };
    const size_t items = size_t(d.together);
    const int64_t held = d.by_strips ? smaller<int64_t>(d.rows, kRows) : d.rows;  // rows at a time
    const int64_t whole = round_up(held, kBlockRows);
    const int64_t of_q = larger<int64_t>(held, kTileUnits);  // see few_tiles.h
    float* q = take(larger(items * size_t(of_q), size_t(whole)) * size_t(d.q_units));
    float* k = take(size_t(d.kept * kTile * k_units));
    float* v = take(size_t(d.kept * kTile * d.v_columns));
    float* cleaned = take(size_t(kChunkKeys * d.v_columns));
    // of a strip, also of kMostTogether times kFewRows rows
    float* scores = take(size_t(kRows * kScoreRow));
    float* out = take(larger(items * size_t(held), size_t(whole)) * size_t(d.v_columns));
    // whole strips, of which the soft-max steps through vectors of rows
    const size_t rows = items * size_t(round_up(held, kRows));
    float* maximum = take(rows);
    float* sum = take(rows);
    uint64_t* words =
        reinterpret_cast<uint64_t*>(take(size_t(d.together * kRows * kChunk) * (d.by_strips ? 4 : 2)));
    Strip* strips = reinterpret_cast<Strip*>(take(sizeof(Strip) / 4 * kMostStrips * 2));
    const void** keys_at = reinterpret_cast<const void**>(take(size_t(kLocatedRows) * 2));
    const void** values_at = reinterpret_cast<const void**>(take(size_t(kLocatedRows) * 2));
    const void** next_keys = reinterpret_cast<const void**>(take(size_t(kChunkKeys) * 2));
    const void** next_values = reinterpret_cast<const void**>(take(size_t(kChunkKeys) * 2));
    const bool coded = a.quantised.codes != Codes::none;
    float* key_scales = take(coded ? items * size_t(d.kept * kTile) : 0);
    float* value_scales = take(coded ? items * size_t(kChunkKeys) : 0);
    float* decoded = take(coded ? size_t(kTile * larger(a.head_dim, a.value_dim)) : 0);
    const RowStates state{maximum, sum};
    if (w) {
      *w = {q,      k,       v,         cleaned,   scores,      out,        state,        words,
            strips, keys_at, values_at, next_keys, next_values, key_scales, value_scales, decoded};
    }
    return parts.bytes();
  }

  // The memory of the i-th item of those that a thread runs together.
  Workspace of(const Division& d, int i) const {
    Workspace own = *this;
    if (i == 0) return own;
    own.q += i * larger<int64_t>(d.rows, kTileUnits) * d.q_units;
    own.out += i * d.rows * d.v_columns;
    own.state.maximum += i * round_up(d.rows, kRows);
    own.state.sum += i * round_up(d.rows, kRows);
    own.scores += i * kFewRows * kScoreRow;
    own.words += i * kRows * kChunk;
    own.strips += i;
    own.key_scales += i * kChunkKeys;
    own.value_scales += i * kChunkKeys;
    return own;
  }
};

}  // namespace polyattn::POLYATTN_NAMESPACE

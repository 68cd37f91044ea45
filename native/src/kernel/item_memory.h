// An item's operands: where they lie, how they are packed into a thread's memory, and which of them are fetched before
// they are packed.
#pragma once

#include "kernel/few_rows.h"
#include "kernel/forward_strip.h"
#include "kernel/pack.h"

namespace polyattn::POLYATTN_NAMESPACE {

// T: of queries and outputs; C: of keys and values as they are stored.
template <class S, class U, class T, class C>
class ItemMemory {
 public:
  ItemMemory(const Arguments& a, const Division& d, const ScoreUnits<U>& units,
             const ForwardStrip<S, U, C>& strip)
      : a_(a), d_(d), units_(units), strip_(strip) {}

  // The keys that a strip's rows may see.
  Span seen_by(const Item& item, const Strip& s) const { return span(a_, item.q, s.t_low, s.t_high); }

  Span keys_of(const Item& item, const Strip* strips) const {
    Span keys{item.q.kv_len, 0};
    for (int i = 0; i < item.strips; ++i) {
      const Span s = seen_by(item, strips[i]);
      if (s.empty()) continue;
      keys.low = smaller(keys.low, s.low);
      keys.high = larger(keys.high, s.high);
    }
    return keys;
  }

  void pack_queries(const Item& item, const Strip& s, float* to) const {
    if (!d_.heads_as_rows) {
      pack_plain<S, U>(row_of<const T>(a_.q, item, s.head[0], s.t[0]), a_.q.row, s.count, a_.head_dim,
                       units_.of_queries(), to, d_.q_units);
      return;
    }
    for (int r = 0; r < s.count; ++r) {
      pack_plain<S, U>(row_of<const T>(a_.q, item, s.head[r], s.t[r]), 0, 1, a_.head_dim, units_.of_queries(),
                       to + r * d_.q_units, d_.q_units);
    }
  }

  // The tiles of a visit that are not packed yet. packed[slot]: whether one is.
  void pack_tiles(Workspace& w, const Item& item, const Visit& visit, bool careful, bool* packed) const {
    for (int n = 0; n < visit.tiles; ++n) {
      const Tile& tile = visit.tile[n];
      if (packed[tile.slot]) continue;
      packed[tile.slot] = true;
      pack_keys(w, item, tile);
      if (careful || !strip_.values_lie_packed(item, tile)) pack_values(w, item, tile);
    }
  }

  // Values of a tile as few rows take them that are run again.
  void pack_stored_values(Workspace& w, const Item& item, const Tile& tile) const {
    auto value = [&](int64_t j) { return strip_.key_row(a_.v, item, tile.j0 + j); };
    pack_value_rows<C>(w, tile, value, ahead(a_.v));
  }

  // Keys low to high - 1 and their values.
  void fetch_tiles(FetchQueue& to, const Item& item, int64_t low, int64_t high) const {
    if (a_.pages.table || low >= high) return;
    constexpr int64_t kSize = sizeof(C);
    to.add(strip_.key_row(a_.k, item, low), a_.k.row * kSize, high - low, a_.head_dim * kSize);
    to.add(strip_.key_row(a_.v, item, low), a_.v.row * kSize, high - low, a_.value_dim * kSize);
  }

  // A strip's rows of queries or outputs.
  void fetch_rows(FetchQueue& to, const Item& item, const Strip& s, const Array& x, int64_t dim) const {
    if (d_.heads_as_rows) return;
    constexpr int64_t kSize = sizeof(T);
    to.add(row_of<const T>(x, item, s.head[0], s.t[0]), x.row * kSize, s.count, dim * kSize);
  }

  // What an item begins with.
  void fetch_item(FetchQueue& to, const Item& item, const Strip* strips) const {
    const Span keys = keys_of(item, strips);
    fetch_rows(to, item, strips[0], a_.q, a_.head_dim);
    fetch_tiles(to, item, keys.low, smaller(keys.high, keys.low / kTile * kTile + kChunkKeys));
  }

 private:
  void pack_keys(Workspace& w, const Item& item, const Tile& tile) const {
    float* const to = w.k + tile.slot * kTile * strip_.k_units();
    const auto pack = [&](auto key, int64_t fetched) {
      pack_transposed<S, U, T>(key, tile.keys, tile.columns, a_.head_dim, to, kTile, fetched);
    };
    if constexpr (kCoded<C>) {
      pack(decoded(w, a_.k, nullptr, item, tile, a_.head_dim), 0);  // scores get the scales
    } else {
      pack([&](int64_t j) { return strip_.key_row(a_.k, item, tile.j0 + j); }, ahead(a_.k));
    }
  }

  void pack_values(Workspace& w, const Item& item, const Tile& tile) const {
    if constexpr (kCoded<C>) {
      pack_value_rows<T>(w, tile, decoded(w, a_.v, &a_.quantised.v, item, tile, a_.value_dim), 0);
    } else {
      auto value = [&](int64_t j) { return strip_.key_row(a_.v, item, tile.j0 + j); };
      pack_value_rows<T>(w, tile, value, ahead(a_.v));
    }
  }

  template <class E, class Row>
  void pack_value_rows(Workspace& w, const Tile& tile, Row row, int64_t fetched) const {
    pack_rows<S, U, E>(row, tile.keys, tile.columns, a_.value_dim, strip_.packed_values(w, tile),
                       d_.v_columns, fetched);
  }

  // The codes of a tile as numbers, times their scales where there are some: where row j of them lies.
  auto decoded(Workspace& w, const Array& x, const Scales* scales, const Item& item, const Tile& tile,
               int64_t dim) const {
    alignas(64) float own[kTile];
    for (float& scale : own) scale = 1;
    if (scales) spread_scales(a_, *scales, item, tile.j0, tile.j0 + tile.keys, own);
    T* const rows = reinterpret_cast<T*>(w.decoded);
    for (int j = 0; j < tile.keys; ++j)
      decode_row<S>(strip_.key_row(x, item, tile.j0 + j), dim, own[j], rows + j * dim);
    return [rows, dim](int64_t j) -> const T* { return rows + j * dim; };
  }

  int64_t ahead(const Array& x) const { return a_.pages.table ? 0 : 32 * x.row; }

  const Arguments& a_;
  const Division& d_;
  const ScoreUnits<U>& units_;
  const ForwardStrip<S, U, C>& strip_;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

// Items of few query rows against a chunk of keys: scores, one step of the soft-max, sums of values.
//
// Several items may walk together, where the heads of a key lie side by side: each few keys are met by all
// items in turn, so that memory is read from end to end.
#pragma once

#include "kernel/few.h"
#include "kernel/workspace.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Keys that an item meets before it is the next one's turn.
constexpr int kTurn = 8;

template <class S, class U, class T>
class FewRows {
 public:
  FewRows(const Arguments& a, const Division& d, const ScoreUnits<U>& units) : a_(a), d_(d), units_(units) {}

  void pack_query(const T* row, float* to) const {
    pack_few<S, U>(row, a_.head_dim, units_.of_queries(), to);
  }

  // Probabilities of keys that lie within keys[i] and within `begin` to `end` - 1, in the scores of item i
  // of `count`; its older sums shrink to the new maxima. visits[i] tells of which keys.
  void probabilities(Workspace& w, const Item* items, const Span* keys, int count, int64_t begin, int64_t end,
                     Visit* visits) const {
    int64_t last = begin;
    for (int i = 0; i < count; ++i) {
      Workspace own = w.of(d_, i);
      visits[i] = Visit();
      const int64_t low = larger(begin, keys[i].low / kTile * kTile), high = smaller(end, keys[i].high);
      if (low < high) plan<S, U>(a_, items[i].q, own.strips[0], low, high, own.words, &visits[i]);
      last = larger(last, keys[i].high);
    }
    locate(a_, a_.k, items[0].q, begin, last, reinterpret_cast<const T**>(w.keys_at));
    locate(a_, a_.v, items[0].q, begin, last, reinterpret_cast<const T**>(w.values_at));
    walk(visits, count, begin, [&](int i, const Tile& tile, int64_t from, int64_t here) {
      const Workspace own = w.of(d_, i);
      const T* const* at = reinterpret_cast<const T* const*>(w.keys_at) + (tile.j0 - begin) + from;
      by_few(own.strips[0].count, [&](auto rows, int r) {
        few_scores<S, U, T, rows.value>(own.q + r * d_.q_units, d_.q_units, at, items[i].kv_head * a_.k.head,
                                        here, r == 0, a_.head_dim,
                                        own.scores + r * kScoreRow + tile.first + from, kScoreRow);
      });
    });
    for (int i = 0; i < count; ++i) {
      Workspace own = w.of(d_, i);
      if (visits[i].tiles > 0) soften_item(own, items[i], visits[i]);
    }
  }

  // Adds the values to the items' sums, after probabilities().
  void values(Workspace& w, const Item* items, const Visit* visits, int count, int64_t begin) const {
    walk(visits, count, begin, [&](int i, const Tile& tile, int64_t from, int64_t here) {
      Workspace own = w.of(d_, i);
      const T* const* at = reinterpret_cast<const T* const*>(w.values_at) + (tile.j0 - begin) + from;
      const float* p = own.scores + (tile.first + from) / U::kValues;
      by_few(own.strips[0].count, [&](auto rows, int r) {
        few_values<S, U, T, rows.value>(p + r * kScoreRow, kScoreRow, at, items[i].kv_head * a_.v.head, here,
                                        r == 0, a_.value_dim, own.out + r * d_.v_columns, d_.v_columns);
      });
    });
  }

 private:
  // Calls `each` for all visited tiles in turn: with an item, a tile, the first of its keys and how many.
  template <class Each>
  static POLYATTN_INLINE void walk(const Visit* visits, int count, int64_t begin, Each each) {
    const int turn = count > 1 ? kTurn : kTile;
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
          if (tile.j0 == j && from < tile.keys) each(i, tile, from, smaller(tile.keys - from, turn));
        }
      }
    }
  }

  void soften_item(Workspace& w, const Item& item, const Visit& visit) const {
    const Strip& s = w.strips[0];
    alignas(64) float tops[2 * kFewRows * S::kLanes], shrink[kRows];  // whole vectors of rows
    for (int i = 0; i < 2 * kFewRows; ++i) S::store(tops + i * S::kLanes, S::fill(-kInfinity));
    for (int n = 0; n < visit.tiles; ++n) {
      const uint64_t* words = visit.mixed[n] ? w.words + int64_t{n} * kRows : nullptr;
      settle<S>(a_, item.q, s, visit.tile[n], units_, words, w.scores + visit.tile[n].first, tops);
    }
    soften<S, U>(units_, w.scores, kScoreRow, s.count, visit.columns, w.state, tops, shrink);
    for (int r = 0; r < s.count; ++r) {
      if (shrink[r] != 1.0f) scale_row<S>(w.out + r * d_.v_columns, d_.v_columns, shrink[r]);
    }
  }

  const Arguments& a_;
  const Division& d_;
  const ScoreUnits<U>& units_;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

// One strip of query rows against one chunk of keys in the forward pass: scores of the tiles that it
// visits, one step of the soft-max over all of them, and the sums of values.
#pragma once

#include "kernel/forward_blocks.h"
#include "memory_habits.h"

namespace polyattn::POLYATTN_NAMESPACE {

// C: of keys and values as they are stored.
template <class S, class U, class C>
class ForwardStrip {
 public:
  ForwardStrip(const Arguments& a, const Division& d, const ScoreUnits<U>& units)
      : a_(a), d_(d), units_(units), k_units_(units_of<U>(a.head_dim)) {}

  int64_t k_units() const { return k_units_; }

  const C* key_row(const Array& x, const Item& item, int64_t j) const {
    const C* base = static_cast<const C*>(x.data) + item.kv_head * x.head;
    if (!a_.pages.table) return base + item.q.b * x.batch + (item.q.kv_base + j) * x.row;
    const int64_t page = a_.pages.table[item.q.b * a_.pages.row + j / a_.pages.page_size];
    return base + page * x.batch + j % a_.pages.page_size * x.row;
  }

  float* packed_values(const Workspace& w, const Tile& tile) const {
    return w.v + tile.slot * (kTile / U::kValues) * d_.v_columns;
  }

  // Whether a tile's values lie in memory as they would be packed: also from a line of the cache on, else each vector
  // is read from two.
  bool values_lie_packed(const Item& item, const Tile& tile) const {
    if constexpr (!std::is_same_v<C, float> || U::kValues != 1) return false;
    return !a_.pages.table && a_.v.row == d_.v_columns && a_.value_dim == d_.v_columns &&
           tile.keys == tile.columns && reinterpret_cast<uintptr_t>(key_row(a_.v, item, tile.j0)) % 64 == 0;
  }

  // Rows of strip `s`, which are the `place`-th of the workspace. `first`: there are no sums of values yet.
  void strip(Workspace& w, const Item& item, const Strip& s, int place, const Visit& visit, bool first,
             bool careful) const {
    if constexpr (U::kInTiles) {
      ForwardBlocks<S, U, C>(a_, d_, units_, w, item, s, place, visit, careful).run();
    } else {
      whole_strip(w, item, s, place, visit, first, careful);
    }
  }

  // Each row with values of its own, in which what it does not see is 0. `kByVectors`: in the order of sums
  // that few rows have, whose products are of vectors in every set.
  template <bool kByVectors = false>
  void values_by_row(const Workspace& w, const Strip& s, const Visit& visit, float* out) const {
    const int64_t size = kTile / U::kValues * d_.v_columns;
    for (int r = 0; r < s.count; ++r) {
      Piece pieces[kChunk];
      const float* p = w.scores + r * kScoreRow;
      for (int n = 0; n < visit.tiles; ++n) {
        const Tile& tile = visit.tile[n];
        const float* v = packed_values(w, tile);
        if (visit.mixed[n]) {
          float* own = w.cleaned + n * size;
          clean<U>(v, tile.columns / U::kValues, d_.v_columns, w.words[int64_t{n} * kRows + r], own);
          v = own;
        }
        const int64_t units = tile.columns / U::kValues;
        pieces[n] = {p, v, units};
        p += units;
      }
      const Strides strides{kScoreRow, 1, d_.v_columns, d_.v_columns};
      float* const to = out + r * d_.v_columns;
      if constexpr (kByVectors) {
        multiply_vectors<S, U, Into::add>(pieces, visit.tiles, strides, 1, d_.v_columns, to, nullptr);
      } else {
        multiply<S, U, Into::add>(pieces, visit.tiles, strides, 1, d_.v_columns, to);
      }
    }
  }

 private:
  // All rows against all tiles, one product after the other.
  void whole_strip(Workspace& w, const Item& item, const Strip& s, int place, const Visit& visit, bool first,
                   bool careful) const {
    const int64_t row = int64_t{place} * kRows;
    const float* q = w.q + row * d_.q_units;
    float* out = w.out + row * d_.v_columns;
    alignas(64) float tops[kRows * S::kLanes], shrink[kRows];
    for (int i = 0; i < kRows; ++i) S::store(tops + i * S::kLanes, S::fill(-kInfinity));
    for (int n = 0; n < visit.tiles; ++n) {
      w.fetcher->some();
      score_tile(w, item, s, q, visit, n, w.scores + visit.tile[n].first, tops);
    }
    const RowStates state{w.state.maximum + row, w.state.sum + row};
    soften<S, U>(units_, w.scores, kScoreRow, s.count, visit.columns, state, tops, shrink);
    for (int r = 0; !first && r < s.count; ++r) {
      if (shrink[r] != 1.0f) scale_row<S>(out + r * d_.v_columns, d_.v_columns, shrink[r]);
    }
    if (!careful) return values(w, item, s, visit, first, out);
    if (first) std::memset(out, 0, size_t(s.count * d_.v_columns) * sizeof(float));
    values_by_row(w, s, visit, out);
  }

  // Who fetches between register blocks, not only between tiles.
  static Fetcher* between(const Workspace& w) { return fetch_between_blocks ? w.fetcher : nullptr; }

  // Scores of one tile, as the soft-max takes them, and what they raise the rows' maxima to.
  void score_tile(Workspace& w, const Item& item, const Strip& s, const float* q, const Visit& visit, int n,
                  float* to, float* tops) const {
    const Tile& tile = visit.tile[n];
    const Strides strides{d_.q_units, 1, kTile, kScoreRow};
    const Piece piece{q, w.k + tile.slot * kTile * k_units_, k_units_};
    if (visit.mixed[n]) {
      // nothing is computed that no row of a register block sees; what is left there gets hidden
      const uint64_t* words = w.words + int64_t{n} * kRows;
      for (int64_t r = 0; r < s.count; r += kRowGrain<S, U>) {
        const int64_t end = smaller<int64_t>(r + kRowGrain<S, U>, s.count);
        const Span seen = seen_keys(words, r, end, S::kLanes, tile.columns);
        const Piece part{q + r * d_.q_units, piece.b + seen.low, k_units_};
        multiply<S, U, Into::set>(&part, 1, strides, end - r, seen.high - seen.low,
                                  to + r * kScoreRow + seen.low, nullptr, between(w));
      }
    } else if (kCoded<C> || units_.kind == Scores::natural) {
      multiply<S, U, Into::set>(&piece, 1, strides, s.count, tile.columns, to, nullptr, between(w));
    } else {
      multiply<S, U, Into::set_max>(&piece, 1, strides, s.count, tile.columns, to, tops, between(w));
      return;
    }
    settle_tile(w, item, s, visit, n, to, tops);
  }

  void settle_tile(Workspace& w, const Item& item, const Strip& s, const Visit& visit, int n, float* to,
                   float* tops) const {
    const Tile& tile = visit.tile[n];
    if constexpr (kCoded<C>) {
      const float* scales = w.key_scales + tile.slot * kTile;
      for (int r = 0; r < s.count; ++r) scale_columns<S>(to + r * kScoreRow, scales, tile.columns);
    }
    settle<S>(a_, item.q, s, tile, units_, visit.mixed[n] ? w.words + int64_t{n} * kRows : nullptr, to, tops);
  }

  const float* values_of(const Workspace& w, const Item& item, const Tile& tile) const {
    if (!values_lie_packed(item, tile)) return packed_values(w, tile);
    return reinterpret_cast<const float*>(key_row(a_.v, item, tile.j0));
  }

  // Of a tile, the values that rows first to end - 1 see, and their probabilities.
  Piece piece_of(const Workspace& w, const Item& item, const Visit& visit, int n, int64_t first,
                 int64_t end) const {
    const Tile& tile = visit.tile[n];
    Span seen{0, tile.columns};
    if (visit.mixed[n])
      seen = seen_keys(w.words + int64_t{n} * kRows, first, end, kSumGrain<U>, tile.columns);
    const int64_t low = seen.low / U::kValues;
    const float* const p = w.scores + first * kScoreRow + tile.first / U::kValues;
    return {p + low, values_of(w, item, tile) + low * d_.v_columns, seen.high / U::kValues - low};
  }

  // `anew`: to nothing.
  void add_pieces(const Workspace& w, const Piece* pieces, int count, int64_t first, int64_t end, bool anew,
                  float* out) const {
    const Strides strides{kScoreRow, 1, d_.v_columns, d_.v_columns};
    const int64_t rows = end - first;
    float* const to = out + first * d_.v_columns;
    anew ? multiply<S, U, Into::set>(pieces, count, strides, rows, d_.v_columns, to, nullptr, between(w))
         : multiply<S, U, Into::add>(pieces, count, strides, rows, d_.v_columns, to, nullptr, between(w));
  }

  void values(const Workspace& w, const Item& item, const Strip& s, const Visit& visit, bool anew,
              float* out) const {
    bool mixed = false;
    for (int n = 0; n < visit.tiles; ++n) mixed |= visit.mixed[n];
    if (tile_by_tile && !mixed) return values_by_tile(w, item, s, visit, anew, out);
    const int64_t step = mixed ? kRowGrain<S, U> : s.count;
    for (int64_t r = 0; r < s.count; r += step) {
      w.fetcher->some();
      const int64_t end = smaller<int64_t>(r + step, s.count);
      Piece pieces[kChunk];
      int count = 0;
      for (int n = 0; n < visit.tiles; ++n) {
        pieces[count] = piece_of(w, item, visit, n, r, end);
        if (pieces[count].count > 0) ++count;
      }
      add_pieces(w, pieces, count, r, end, anew, out);
    }
  }

  // The same sums to the bit; values stay in the first cache while the rows pass.
  void values_by_tile(const Workspace& w, const Item& item, const Strip& s, const Visit& visit, bool anew,
                      float* out) const {
    for (int n = 0; n < visit.tiles; ++n) {
      w.fetcher->some();
      const Piece piece = piece_of(w, item, visit, n, 0, s.count);
      add_pieces(w, &piece, 1, 0, s.count, anew && n == 0, out);
    }
  }

  const Arguments& a_;
  const Division& d_;
  const ScoreUnits<U>& units_;
  const int64_t k_units_;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

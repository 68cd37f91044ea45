// One strip of query rows against one chunk of keys in the forward pass: scores of the tiles that it
// visits, one step of the soft-max over all of them, and the sums of values.
#pragma once

#include "kernel/division.h"
#include "kernel/few.h"
#include "kernel/matmul.h"
#include "kernel/softmax.h"
#include "kernel/visit.h"

namespace polyattn::POLYATTN_NAMESPACE {

// A thread's memory: O(tile).
struct Workspace {
  float *q, *k, *v, *cleaned, *scores, *out;
  RowStates state;
  uint64_t* words;
  Strip* strips;

  static size_t layout(const Division& d, int64_t k_units, float* base, Workspace* w) {
    size_t used = 0;
    auto take = [&](size_t floats) {
      float* p = base + used;
      used += (floats + 15) / 16 * 16;
      return p;
    };
    float* q = take(size_t(d.rows * d.q_units));
    float* k = take(size_t(kChunkKeys * k_units));
    float* v = take(size_t(kChunkKeys * d.v_columns));
    float* cleaned = take(size_t(kChunkKeys * d.v_columns));
    float* scores = take(size_t(kRows * kScoreRow));
    float* out = take(size_t(d.rows * d.v_columns));
    // whole strips, of which the soft-max steps through vectors of rows
    const size_t rows = size_t(round_up(d.rows, kRows));
    float* maximum = take(rows);
    float* sum = take(rows);
    uint64_t* words = reinterpret_cast<uint64_t*>(take(size_t(kRows * kChunk) * 2));
    Strip* strips = reinterpret_cast<Strip*>(take(sizeof(Strip) / 4 * kMostStrips));
    const RowStates state{maximum, sum};
    if (w) *w = {q, k, v, cleaned, scores, out, state, words, strips};
    return used * sizeof(float);
  }
};

template <class S, class U, class T>
class ForwardStrip {
 public:
  ForwardStrip(const Arguments& a, const Division& d)
      : a_(a), d_(d), scores_(scores_of<U>(a)), k_units_(blocks_of(a.head_dim, U::kValues)) {
    factor_ = scores_ == Scores::natural ? a.scale : a.scale * kLog2E;
    adjusting_ = U::kValues == 1 ? 1.0f : factor_;
  }

  Scores scores() const { return scores_; }
  int64_t k_units() const { return k_units_; }
  // By which queries are multiplied where they are packed.
  float q_factor() const { return U::kValues == 1 ? factor_ : 1.0f; }

  static bool few(const Item& item) { return item.rows <= kFewRows; }

  const T* key_row(const Array& x, const Item& item, int64_t j) const {
    const T* base = static_cast<const T*>(x.data) + item.kv_head * x.head;
    if (!a_.pages.table) return base + item.q.b * x.batch + (item.q.kv_base + j) * x.row;
    const int64_t page = a_.pages.table[item.q.b * a_.pages.row + j / a_.pages.page_size];
    return base + page * x.batch + j % a_.pages.page_size * x.row;
  }

  float* packed_values(const Workspace& w, const Tile& tile) const {
    return w.v + tile.slot * (kTile / U::kValues) * d_.v_columns;
  }

  void strip(Workspace& w, const Item& item, int index, const Visit& visit, bool careful) const {
    const Strip& s = w.strips[index];
    const float* q = w.q + int64_t{index} * kRows * d_.q_units;
    alignas(64) float tops[kRows * S::kLanes];
    for (int i = 0; i < kRows; ++i) S::store(tops + i * S::kLanes, S::fill(-kInfinity));
    int offset = 0;
    for (int n = 0; n < visit.tiles; ++n) {
      score_tile(w, item, s, q, visit, n, w.scores + offset, tops);
      offset += visit.tile[n].columns;
    }
    float* out = w.out + int64_t{index} * kRows * d_.v_columns;
    alignas(64) float shrink[kRows];
    const RowStates state{w.state.maximum + int64_t{index} * kRows, w.state.sum + int64_t{index} * kRows};
    soften_rows(w.scores, s.count, visit.columns, state, tops, shrink);
    for (int r = 0; r < s.count; ++r) {
      if (shrink[r] != 1.0f) scale_row<S>(out + r * d_.v_columns, d_.v_columns, shrink[r]);
    }
    if (careful) {
      values_by_row(w, s, visit, out);
    } else if (few(item)) {
      values_of_few(w, item, s, visit, out);
    } else {
      values(w, s, visit, out);
    }
  }

 private:
  // Scores of one tile, as the soft-max takes them, and what they raise the rows' maxima to.
  void score_tile(Workspace& w, const Item& item, const Strip& s, const float* q, const Visit& visit, int n,
                  float* to, float* tops) const {
    const Tile& tile = visit.tile[n];
    const Strides strides{d_.q_units, 1, kTile, kScoreRow};
    const Piece piece{q, w.k + tile.slot * kTile * k_units_, k_units_};
    if (few(item)) {
      auto key = [&](int64_t j) { return key_row(a_.k, item, tile.j0 + j); };
      by_few(s.count, [&](auto rows, int r) {
        few_scores<S, U, T, rows.value>(q + r * d_.q_units, d_.q_units, key, tile.keys, a_.head_dim,
                                        few_ahead(a_.k, r), to + r * kScoreRow, kScoreRow);
      });
    } else if (visit.mixed[n]) {
      // nothing is computed that no row of a register block sees; what is left there gets hidden
      const uint64_t* words = w.words + int64_t{n} * kRows;
      for (int64_t r = 0; r < s.count; r += S::kRowBlock) {
        const int64_t end = smaller<int64_t>(r + S::kRowBlock, s.count);
        const Span seen = seen_keys(words, r, end, S::kLanes, tile.columns);
        const Piece part{q + r * d_.q_units, piece.b + seen.low, k_units_};
        multiply<S, U, Into::set>(&part, 1, strides, end - r, seen.high - seen.low,
                                  to + r * kScoreRow + seen.low);
      }
    } else if (scores_ == Scores::natural) {
      multiply<S, U, Into::set>(&piece, 1, strides, s.count, tile.columns, to);
    } else {
      multiply<S, U, Into::set_max>(&piece, 1, strides, s.count, tile.columns, to, tops);
      return;
    }
    if (scores_ == Scores::natural) adjust<S>(a_, item.q, s, tile.j0, tile.keys, adjusting_, to, kScoreRow);
    if (visit.mixed[n]) hide<S>(w.words + int64_t{n} * kRows, s.count, tile.columns, to, kScoreRow);
    for (int r = 0; r < s.count; ++r) raise<S>(to + r * kScoreRow, tile.columns, tops + r * S::kLanes);
  }

  void soften_rows(float* scores, int rows, int columns, RowStates state, float* tops, float* shrink) const {
    switch (scores_) {
      case Scores::folded:
        return soften<S, U, Scores::folded>(scores, kScoreRow, rows, columns, factor_, state, tops, shrink);
      case Scores::raw:
        return soften<S, U, Scores::raw>(scores, kScoreRow, rows, columns, factor_, state, tops, shrink);
      default:
        return soften<S, U, Scores::natural>(scores, kScoreRow, rows, columns, factor_, state, tops, shrink);
    }
  }

  void values(const Workspace& w, const Strip& s, const Visit& visit, float* out) const {
    bool mixed = false;
    for (int n = 0; n < visit.tiles; ++n) mixed |= visit.mixed[n];
    const int64_t step = mixed ? S::kRowBlock : s.count;
    for (int64_t r = 0; r < s.count; r += step) {
      const int64_t end = smaller<int64_t>(r + step, s.count);
      Piece pieces[kChunk];
      int count = 0;
      const float* p = w.scores + r * kScoreRow;
      for (int n = 0; n < visit.tiles; ++n) {
        const Tile& tile = visit.tile[n];
        Span seen{0, tile.columns};
        if (visit.mixed[n]) seen = seen_keys(w.words + int64_t{n} * kRows, r, end, U::kValues, tile.columns);
        const int64_t low = seen.low / U::kValues;
        if (!seen.empty()) {
          pieces[count++] = {p + low, packed_values(w, tile) + low * d_.v_columns,
                             seen.high / U::kValues - low};
        }
        p += tile.columns / U::kValues;
      }
      multiply<S, U, Into::add>(pieces, count, {kScoreRow, 1, d_.v_columns, d_.v_columns}, end - r,
                                d_.v_columns, out + r * d_.v_columns);
    }
  }

  void values_of_few(const Workspace& w, const Item& item, const Strip& s, const Visit& visit,
                     float* out) const {
    const float* p = w.scores;
    for (int n = 0; n < visit.tiles; ++n) {
      const Tile& tile = visit.tile[n];
      auto value = [&](int64_t j) { return key_row(a_.v, item, tile.j0 + j); };
      by_few(s.count, [&](auto rows, int r) {
        few_values<S, U, T, rows.value>(p + r * kScoreRow, kScoreRow, value, tile.keys, a_.value_dim,
                                        few_ahead(a_.v, r), out + r * d_.v_columns, d_.v_columns);
      });
      p += tile.columns / U::kValues;
    }
  }

  int64_t few_ahead(const Array& x, int r) const { return a_.pages.table || r > 0 ? 0 : kAheadRows * x.row; }

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
      multiply<S, U, Into::add>(pieces, visit.tiles, {kScoreRow, 1, d_.v_columns, d_.v_columns}, 1,
                                d_.v_columns, out + r * d_.v_columns);
    }
  }

  const Arguments& a_;
  const Division& d_;
  const Scores scores_;
  const int64_t k_units_;
  float factor_, adjusting_;  // the last: for what soft cap and bias need
};

}  // namespace polyattn::POLYATTN_NAMESPACE

// An item of the forward pass from its operands to its output. Its keys come in chunks of kChunk tiles,
// which are packed once and met by every strip of the item.
#pragma once

#include "kernel/few_rows.h"
#include "kernel/forward_strip.h"
#include "kernel/pack.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Which part of an item's keys is run, of how many; and whether the same thread ran the one before it, or runs the
// next one: what few rows read first was fetched then, or may be.
struct Part {
  int64_t split, splits;
  bool follows = false, goes_on = false;
};

// T: of queries and outputs; C: of keys and values as they are stored.
template <class S, class U, class T, class C>
class ForwardItem {
 public:
  ForwardItem(const Arguments& a, const Division& d)
      : a_(a), d_(d), units_(a), strip_(a, d, units_), few_(a, d, units_) {}

  Scores scores() const { return units_.kind; }
  int64_t k_units() const { return strip_.k_units(); }

  // Runs an item over a part of its keys; leaves sums in w.out and w.state.
  // `careful`: a masked value that is not finite would reach rows as 0 * NaN, so each row gets
  // values of its own in which what it does not see is 0; same products, same order.
  void attend(Workspace& w, const Item& item, const Part& part, bool careful) const {
    const Span keys = keys_of(w, item, part);
    if constexpr (kMeetsFew) {
      if (few(item) && !keys.empty() && !part.follows) few_.fetch(&item, 1, keys);
    }
    begin(w, item);
    if (keys.empty()) return;
    const int64_t step = few(item) ? kChunkKeys : d_.kept * kTile;
    const int64_t low = keys.low / kTile * kTile;
    // what a strip meets in one step must not depend on its item, whose size may depend on the threads
    const int64_t first = d_.kept > kChunk && !few(item) ? low / step * step : low;
    for (int64_t next = first + step, j = low; j < keys.high; j = next, next += step) {
      const int64_t end = smaller(next, keys.high);
      if constexpr (kMeetsFew) {
        if (few(item)) {
          chunk_of_few(w, item, keys, part.goes_on, j, end, careful);
          continue;
        }
      }
      chunk(w, item, j, end, careful);
    }
  }

  // Whether an output that is NaN may be so for no other reason than how it was computed.
  bool doubtful(const Item& item) const {
    return a_.terms > 0 || (kFewInTiles<U, C> && few(item) && few_.in_tiles(item.rows));
  }

  bool by_strips(const Item& item) const { return d_.by_strips && !few(item); }

  // Runs the strips of an item one by one, from their queries to their output, in memory that a first cache
  // holds; false if an output is NaN.
  bool attend_by_strips(Workspace& w, const Item& item, bool careful) const {
    bool packed[kMostKept] = {}, fine = true;
    const Span keys = item_span(w, item);
    if constexpr (kCoded<C>) spread_scales(a_, a_.quantised.k, item, 0, keys.high, w.key_scales);
    for (int i = 0; i < item.strips; ++i) {
      Workspace own = w;
      own.strips += i;
      begin_rows(own, own.strips->count);
      pack_strip(item, *own.strips, own.q);
      meet(own, item, 0, 0, keys.high, careful, packed);
      fine &= finish_strip(own, item, *own.strips, 0, 0);
    }
    return fine;
  }

  // The same for the first `count` items of a workspace, of few rows, which walk over their keys together.
  void attend_together(Workspace& w, const Item* items, int count, const Part& part) const {
    Span keys[kMostTogether], all{kUnbounded, 0};
    for (int i = 0; i < count; ++i) {
      keys[i] = keys_of(w.of(d_, i), items[i], part);
      if (keys[i].empty()) continue;
      all.low = smaller(all.low, keys[i].low / kTile * kTile);
      all.high = larger(all.high, keys[i].high);
    }
    if constexpr (kMeetsFew) {
      if (!all.empty() && !part.follows) few_.fetch(items, count, all);
    }
    for (int i = 0; i < count; ++i) {
      Workspace own = w.of(d_, i);
      begin(own, items[i]);
    }
    for (int64_t j = all.low; j < all.high; j += kChunkKeys) {
      Visit visits[kMostTogether];
      if constexpr (kMeetsFew) {
        const int64_t end = smaller(j + kChunkKeys, all.high);
        const Met met = few_.probabilities(w, items, keys, count, part.goes_on, j, end, false, visits);
        few_.values(w, items, visits, met);
      }
    }
  }

  // Normalises and writes; false if an output is NaN. `careful`: how the item was run.
  bool finish(const Workspace& w, const Item& item, bool careful) const {
    const int64_t split = few(item) && !careful ? apart<S, U, T>(a_.value_dim) : 0;
    bool fine = true;
    for (int i = 0; i < item.strips; ++i)
      fine &= finish_strip(w, item, w.strips[i], int64_t{i} * kRows, split);
    return fine;
  }

 private:
  // Whether few rows meet keys as they are stored.
  static constexpr bool kMeetsFew = !kCoded<C> || U::kValues == 1 || HasUnitsOf<S, C>;
  static bool few(const Item& item) { return kMeetsFew && item.rows <= kFewRows; }

  // An item before its first key.
  void begin(Workspace& w, const Item& item) const {
    begin_rows(w, item.rows);
    for (int i = 0; i < item.strips; ++i)
      pack_strip(item, w.strips[i], w.q + int64_t{i} * kRows * d_.q_units);
  }

  Span keys_of(const Workspace& w, const Item& item, const Part& part) const {
    const Span all = item_span(w, item);
    if (part.splits == 1 || all.empty()) return all;
    const int64_t size = round_up(blocks_of(all.high - all.low, part.splits), kTile);
    const int64_t first = all.low / kTile * kTile + part.split * size;
    const bool last = part.split == part.splits - 1;
    return {larger(all.low, first), last ? all.high : smaller(all.high, first + size)};
  }

  void begin_rows(Workspace& w, int64_t rows) const {
    static_assert(kRows % S::kLanes == 0);
    float *const maximum = w.state.maximum, *const sum = w.state.sum;
    for (int64_t r = 0; r < round_up(rows, kRows); r += S::kLanes) {
      S::store(maximum + r, S::fill(-kInfinity));
      S::store(sum + r, S::zero());
    }
    std::memset(w.out, 0, size_t(rows * d_.v_columns) * 4);
  }

  template <class E>
  E* row_of(const Array& x, const Item& item, int64_t head, int64_t t) const {
    return static_cast<E*>(x.data) + item.q.b * x.batch + head * x.head + (item.q.q_base + t) * x.row;
  }

  Span item_span(const Workspace& w, const Item& item) const {
    Span keys{item.q.kv_len, 0};
    for (int i = 0; i < item.strips; ++i) {
      const Span s = span(a_, item.q, w.strips[i].t_low, w.strips[i].t_high);
      if (s.empty()) continue;
      keys.low = smaller(keys.low, s.low);
      keys.high = larger(keys.high, s.high);
    }
    return keys;
  }

  void pack_strip(const Item& item, const Strip& s, float* to) const {
    if (few(item)) {
      for (int r = 0; r < s.count; ++r)
        few_.pack_query(row_of<const T>(a_.q, item, s.head[r], s.t[r]), to, r, s.count);
      return;
    }
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

  void chunk(Workspace& w, const Item& item, int64_t begin, int64_t end, bool careful) const {
    bool packed[kMostKept] = {};
    if constexpr (kCoded<C>) spread_scales(a_, a_.quantised.k, item, begin, end, w.key_scales);
    for (int i = 0; i < item.strips; ++i) meet(w, item, i, begin, end, careful, packed);
  }

  // A strip against keys begin to end - 1. packed[slot]: whether a tile is, which is done where it is not.
  void meet(Workspace& w, const Item& item, int index, int64_t begin, int64_t end, bool careful,
            bool* packed) const {
    for (int64_t j = begin; j < end;) {
      Visit visit;
      j = plan_some<S, U>(a_, item.q, w.strips[index], begin, j, end, w.words, &visit);
      if (visit.tiles == 0) continue;
      for (int n = 0; n < visit.tiles; ++n) {
        const Tile& tile = visit.tile[n];
        if (packed[tile.slot]) continue;
        packed[tile.slot] = true;
        pack_keys(w, item, tile);
        if (careful || !strip_.values_lie_packed(item, tile)) pack_values(w, item, tile);
      }
      strip_.strip(w, item, index, visit, careful);
    }
  }

  void chunk_of_few(Workspace& w, const Item& item, const Span& keys, bool goes_on, int64_t begin,
                    int64_t end, bool careful) const {
    Visit visit;
    const Met met = few_.probabilities(w, &item, &keys, 1, goes_on, begin, end, careful, &visit);
    // a code of int8 is never NaN, and probabilities have the scales in them
    if (!careful || std::is_same_v<C, int8_t>) return few_.values(w, &item, &visit, met);
    if (few_.in_tiles(item.rows)) return few_.values(w, &item, &visit, met, true);
    for (int n = 0; n < visit.tiles; ++n) {
      const Tile& tile = visit.tile[n];
      auto value = [&](int64_t j) { return strip_.key_row(a_.v, item, tile.j0 + j); };
      pack_value_rows<C>(w, tile, value, ahead(a_.v));
    }
    if (visit.tiles > 0) strip_.template values_by_row<true>(w, w.strips[0], visit, w.out);
  }

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

  // `row`: the first of the strip's in the workspace.
  bool finish_strip(const Workspace& w, const Item& item, const Strip& s, int64_t row, int64_t split) const {
    bool fine = true;
    for (int r = 0; r < s.count; ++r, ++row) {
      fine &= finish_row(item, s.head[r], s.t[r], w.state.maximum[row], w.state.sum[row],
                         w.out + row * d_.v_columns, split);
    }
    return fine;
  }

  bool finish_row(const Item& item, int64_t head, int64_t t, float maximum, float sum, const float* sums,
                  int64_t split) const {
    // natural scores are kept as they are: the largest floats times log2(e) are infinite
    const bool natural = units_.kind == Scores::natural;
    const float to_log2 = natural ? kLog2E : 1.0f;
    float shrink = 1.0f;
    for (int64_t m = 0; a_.sinks && m < a_.sink_count; ++m) {
      const float sink = a_.sinks[head * a_.sink_count + m] * (natural ? 1.0f : kLog2E);
      if (sink > maximum) {
        const float factor = maximum == -kInfinity ? 0.0f : exp2_scalar<S, 5>((maximum - sink) * to_log2);
        if (sum != 0) sum *= factor;  // NaN stays
        shrink *= factor;
        maximum = sink;
      }
      if (sink != -kInfinity) sum += exp2_scalar<S, 5>((sink - maximum) * to_log2);
    }
    T* out = row_of<T>(a_.out, item, head, t);
    const float factor = sum == 0 ? 0.0f : shrink / sum;
    typename S::Vec seen = S::zero();
    const typename S::Vec f = S::fill(factor);
    int64_t c = 0;
    if constexpr (kApart<U, T>) {
      for (; c < split; c += 2 * S::kLanes) {
        typename S::Vec x = sum == 0 ? S::zero() : S::mul(S::load(sums + c), f);
        typename S::Vec y = sum == 0 ? S::zero() : S::mul(S::load(sums + c + S::kLanes), f);
        seen = S::fma(y, S::zero(), S::fma(x, S::zero(), seen));
        S::put_together(x, y);
        S::store(out + c, x);
        S::store(out + c + S::kLanes, y);
      }
    }
    for (; c < a_.value_dim; c += S::kLanes) {
      typename S::Vec x = sum == 0 ? S::zero() : S::mul(S::load(sums + c), f);
      if (a_.value_dim - c >= S::kLanes) {
        S::store(out + c, x);
      } else {
        S::store_some(out + c, x, int(a_.value_dim - c));
      }
      seen = S::fma(x, S::zero(), seen);  // NaN for NaN and infinities
    }
    if (a_.lse.data) {
      *row_of<float>(a_.lse, item, head, t) =
          sum == 0 ? -kInfinity : maximum * (natural ? 1.0f : kLn2) + __builtin_logf(sum);
    }
    return !S::any_nan(seen);
  }

  const Arguments& a_;
  const Division& d_;
  const ScoreUnits<U> units_;
  const ForwardStrip<S, U, C> strip_;
  const FewRows<S, U, T, C> few_;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

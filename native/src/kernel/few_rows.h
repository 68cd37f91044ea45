// Items of few query rows against a chunk of keys: scores, one step of the soft-max, sums of values.
//
// Several items may walk together, where the heads of a key lie side by side: each few keys are met by all
// items in turn, so that memory is read from end to end.
//
// Codes are multiplied as they are stored. The scales of keys go into the scores, those of values into the
// probabilities.
#pragma once

#include "kernel/few.h"
#include "kernel/few_byte_tiles.h"
#include "kernel/few_fetching.h"
#include "kernel/few_quarters.h"
#include "kernel/few_tiles.h"
#include "kernel/few_words.h"
#include "kernel/walk.h"
#include "kernel/workspace.h"
#include "memory_habits.h"

namespace polyattn::POLYATTN_NAMESPACE {

// T: of queries and outputs; C: of keys and values as they are stored.
template <class S, class U, class T, class C>
class FewRows {
 public:
  FewRows(const Arguments& a, const Division& d, const ScoreUnits<U>& units)
      : a_(a), d_(d), units_(units), keys_(a.k.row, sizeof(C)), values_(a.v.row, sizeof(C)) {}

  // Row r of an item of `rows`, whose queries begin at `to`.
  void pack_query(const T* row, float* to, int r, int rows) const {
    if constexpr (kTiles) {
      if (in_tiles(rows)) return pack_column<S, U>(row, a_.head_dim, to, r);
    }
    if constexpr (kByteTiles) {
      if (words() && in_tiles(rows))
        return FewByteTiles<S, U>::pack(row, a_.head_dim, units_.of_queries(), to, room(), r);
    }
    if constexpr (kWords) {
      if (words())
        return pack_words<S>(row, a_.head_dim, units_.of_queries(), to + r * d_.q_units, d_.q_units);
    }
    if constexpr (kRepeats<S, U, C>) {
      if (rows > 1) return pack_beside<S, U>(row, a_.head_dim, units_.of_queries(), to, d_.q_units, r, rows);
    }
    pack_few<S, U, C>(row, a_.head_dim, units_.of_queries(), to + r * d_.q_units);
  }

  // Fetches the first keys of a part of `count` items, unless there are so few that looking ahead takes longer.
  void fetch(const Item* items, int count, const Span& keys) const {
    if (count == 1 && keys.high - keys.low <= kRowsAtOnce) return;
    const bool pages = by_pages(count, keys.high - keys.low);
    const int64_t some = pages ? kAheadBlock : smaller(keys.high - keys.low, ahead(count));
    const int64_t offset = items[0].kv_head * a_.k.head, more = (count - 1) * a_.k.head;
    const auto fetch_row = [&](const C* row) { prefetch_row<S::kFetchHint>(row, more + a_.head_dim); };
    if (even(items[0].rows)) {
      const C* const first = even_row<C>(a_.k, items[0].q, keys.low) + offset;
      const EvenAhead<C> wanted{first, &keys_.of(pages), some};
      for (int64_t j = 0; j < some; ++j) fetch_row(wanted.of(j));
      return;
    }
    const C* rows[kAheadBlock];
    locate(a_, a_.k, items[0].q, keys.low, keys.low + some, rows);
    const int places = pages ? keys_.of(true).power : 0;
    for (int64_t j = 0; j < some; ++j) fetch_row(rows[in_turn(j, places)] + offset);
  }

  // Probabilities of keys that lie within keys[i] and within `begin` to `end` - 1, in the scores of item i
  // of `count`; its older sums shrink to the new maxima. visits[i] tells of which keys. `careful`: what is
  // masked is 0 also where its scale is not finite. `goes_on`: the keys behind keys[i] are met next.
  Met probabilities(Workspace& w, const Item* items, const Span* keys, int count, bool goes_on, int64_t begin,
                    int64_t end, bool careful, Visit* visits) const {
    int64_t last = begin;
    int tiles = 0;
    for (int i = 0; i < count; ++i) {
      Workspace own = w.of(d_, i);
      visits[i] = Visit();
      const int64_t low = larger(begin, keys[i].low / kTile * kTile), high = smaller(end, keys[i].high);
      if (low < high) plan<S, U>(a_, items[i].q, own.strips[0], low, high, own.words, &visits[i]);
      last = larger(last, keys[i].high);
      tiles += visits[i].tiles;
    }
    if (tiles == 0) return {begin, begin, end, last, Fetching::nothing, count};
    // the last keys fetch the first values, and the last values the keys of the next chunk
    const int64_t stop = smaller(end, last);
    const bool fetches = count > 1 || stop - begin > kRowsAtOnce || begin > keys[0].low;
    const Fetching fetching = !fetches                        ? Fetching::nothing
                              : by_pages(count, stop - begin) ? Fetching::pages
                                                              : Fetching::rows;
    const Met met{begin, stop, end, goes_on ? items[0].q.kv_len : last, fetching, count};
    if (!even(items[0].rows)) look_up(w, items[0].q, items[0].rows, met);
    if constexpr (kCoded<C>) {
      for (int i = 0; i < count; ++i) {
        Workspace own = w.of(d_, i);
        spread_scales(a_, a_.quantised.k, items[i], begin, end, own.key_scales);
        spread_scales(a_, a_.quantised.v, items[i], begin, end, own.value_scales);
      }
    }
    Workspace owns[kMostTogether];
    for (int i = 0; i < count; ++i) owns[i] = w.of(d_, i);
    walk(visits, count, begin, turn(), [&](int i, int n, int64_t from, int64_t here) {
      const Workspace& own = owns[i];
      const Tile& tile = visits[i].tile[n];
      const int64_t place = tile.j0 - begin + from, offset = items[i].kv_head * a_.k.head;
      float* const to = own.scores + tile.first + from;
      const int count_of_rows = own.strips[0].count;
      const auto meet_in_tiles = [&]([[maybe_unused]] const auto& keys, [[maybe_unused]] const auto& next) {
        if constexpr (kTiles) {
          FewTiles<S, U, C> products;  // its memory is not cleared
          products.scores(own.q, count_of_rows, tile_keys(a_.k, keys, here, next), a_.head_dim, to,
                          kScoreRow);
          scale(to, own.key_scales + place, here, count_of_rows);
        }
      };
      const auto meet = [&](const auto& keys, const auto& next) {
        if (kTiles && in_tiles(count_of_rows)) return meet_in_tiles(keys, next);
        if constexpr (kByteTiles) {
          if (words() && in_tiles(count_of_rows)) {
            FewByteTiles<S, U> products;
            return products.scores(own.q, room(), count_of_rows, tile_keys(a_.k, keys, here, next),
                                   a_.head_dim, own.key_scales + place, to, kScoreRow);
          }
        }
        by_few(count_of_rows, [&](auto rows, int r) {
          scores<rows.value>(own.q + r * d_.q_units, keys, here, next(0).where(r == 0),
                             own.key_scales + place, to + r * kScoreRow);
        });
      };
      if (even(items[i].rows)) {
        const EvenRun<C> now = run(a_.k, keys_, items[i], begin, stop),
                         then = run(a_.v, values_, items[i], begin, stop);
        return meet(now.rows.from_row(place), [&](int64_t j) { return ahead_of(now, then, place + j, met); });
      }
      const C* const* const at = reinterpret_cast<const C* const*>(w.keys_at);
      if (in_sixteens(count_of_rows)) {
        const PageRows<C> now{at, a_.k.row, offset};
        return meet_in_tiles(now.from_row(place),
                             [&](int64_t j) { return ahead_of(now, place + j, met, keys_); });
      }
      const LocatedRows<C> now{at, offset};
      const Ahead<C> next = ahead_of(now, w.next_keys, place, met);
      meet(LocatedRows<C>{at + place, offset}, [&](int64_t j) { return next.from_row(j); });
    });
    for (int i = 0; i < count; ++i) {
      Workspace own = w.of(d_, i);
      if (visits[i].tiles == 0) continue;
      soften_item(own, items[i], visits[i]);
      if constexpr (kCoded<C>) weigh(own, visits[i], begin, careful);
    }
    return met;
  }

  // Adds the values to the items' sums, after probabilities(), of what it says was met. `careful`: as there, for
  // values in tiles.
  void values(Workspace& w, const Item* items, const Visit* visits, const Met& met,
              bool careful = false) const {
    Workspace owns[kMostTogether];
    for (int i = 0; i < met.count; ++i) owns[i] = w.of(d_, i);
    const auto each = [&](int i, int n, int64_t from, int64_t here) {
      const Workspace& own = owns[i];
      const Tile& tile = visits[i].tile[n];
      const int64_t place = tile.j0 - met.begin + from;
      const float* p = own.scores + (tile.first + from) / U::kValues;
      const auto meet_in_tiles = [&]([[maybe_unused]] const auto& values, [[maybe_unused]] const auto& next) {
        const Care care{careful, own.words + int64_t{n} * kRows, visits[i].mixed + n, from};
        if constexpr (kTiles) tile_values(own, p, care, tile_keys(a_.v, values, here, next));
      };
      const auto meet = [&](const auto& values, const auto& next) {
        if (kTiles && in_tiles(own.strips[0].count)) return meet_in_tiles(values, next);
        if constexpr (kByteTiles) {
          if (words() && in_tiles(own.strips[0].count)) {
            FewByteTiles<S, U> products;
            return products.values(p, kScoreRow, own.strips[0].count, tile_keys(a_.v, values, here, next),
                                   a_.value_dim, own.out, d_.v_columns);
          }
        }
        by_few(own.strips[0].count, [&](auto rows, int r) {
          row_values<rows.value>(p + r * kScoreRow, values, here, next(0).where(r == 0),
                                 own.out + r * d_.v_columns);
        });
      };
      if (even(items[i].rows)) {
        const EvenRun<C> now = run(a_.v, values_, items[i], met.begin, met.stop);
        const EvenRun<C> then = run(a_.k, keys_, items[i], met.end, met.last);
        return meet(now.rows.from_row(place), [&](int64_t j) { return ahead_of(now, then, place + j, met); });
      }
      const C* const* const at = reinterpret_cast<const C* const*>(w.values_at);
      const int64_t offset = items[i].kv_head * a_.v.head;
      if (in_sixteens(own.strips[0].count)) {
        const PageRows<C> now{at, a_.v.row, offset};
        return meet_in_tiles(now.from_row(place),
                             [&](int64_t j) { return ahead_of(now, place + j, met, values_); });
      }
      const LocatedRows<C> now{at, offset};
      const Ahead<C> next = ahead_of(now, w.next_values, place, met);
      meet(LocatedRows<C>{at + place, offset}, [&](int64_t j) { return next.from_row(j); });
    };
    if (kTiles && d_.together == 1 && in_tiles(items[0].rows)) {
      by_runs(visits[0], [&](int n, int64_t keys) { each(0, n, 0, keys); });
    } else {
      walk(visits, met.count, met.begin, turn(), each);
    }
  }

  // Whether an item of so many rows meets keys in tiles, whose products take the same time for one row and for all.
  static bool in_tiles(int64_t rows) { return (kTiles || kByteTiles) && rows > 2; }

 private:
  static constexpr bool kTiles = kFewInTiles<U, C>;
  // Codes that may be multiplied as integers; whether a call's are.
  static constexpr bool kWords = std::is_same_v<C, int8_t> && U::kValues == 1 && MultipliesWords<S>;
  static constexpr bool kByteTiles = kWords && HasByteTiles<U>;
  bool words() const { return !a_.quantised.exact && a_.head_dim <= kMostSummed; }

  // Keys that an item meets before it is the next one's turn, of several.
  static constexpr int kTurn = kByteTiles ? kTile : kTiles ? 32 : S::kLanes > 8 ? 16 : 8;

  // As many too for one of them alone, which is run again so: sums are rounded at the end of a turn.
  int turn() const { return d_.together > 1 ? kTurn : kTile; }

  // Floats of an item's queries where they are columns of tiles.
  int64_t room() const { return kTileUnits * d_.q_units; }

  // How many rows before they are read rows are fetched. A row of `count` heads that are met together is longer.
  static constexpr int64_t ahead(int count) {
    constexpr int64_t kAhead = kCoded<C> ? kAheadCodes : S::kAheadRows;
    static_assert(kAhead <= kAheadCodes && S::kLanes <= kRowsAtOnce);  // so many rows are located
    return count > 1 ? smaller<int64_t>(kTurn, kAhead) : kAhead;
  }

  // Whether rows that so many query rows meet lie evenly, and nothing needs them to be looked up.
  bool even(int64_t rows) const {
    return !a_.pages.table && (!words_in_use() || (kByteTiles && in_tiles(rows)));
  }
  // (Where rows are computed and not looked up, one row on codes of int8 takes up to a tenth longer.)
  bool words_in_use() const {
    if constexpr (kWords) return words();
    return false;
  }

  // Rows of keys begin to end - 1, if there are any, of an item's head.
  static EvenRun<C> run(const Array& x, const FetchOrders& orders, const Item& item, int64_t begin,
                        int64_t end) {
    const C* const first = even_row<C>(x, item.q, begin) + item.kv_head * x.head;
    return {{first, x.row}, larger<int64_t>(end - begin, 0), &orders};
  }
  static EvenAhead<C> ahead_of(const EvenRun<C>& now, const EvenRun<C>& next, int64_t place, const Met& met) {
    return POLYATTN_NAMESPACE::ahead_of(now, next, place, met.fetching, ahead(met.count));
  }
  static Ahead<C> ahead_of(const LocatedRows<C>& rows, const void* const* next, int64_t place,
                           const Met& met) {
    return POLYATTN_NAMESPACE::ahead_of(rows, next, place, met.fetching, ahead(met.count));
  }
  static PageAhead<C> ahead_of(const PageRows<C>& rows, int64_t place, const Met& met,
                               const FetchOrders& orders) {
    return POLYATTN_NAMESPACE::ahead_of(rows, place, met.fetching, ahead(met.count), orders.of(true).power);
  }

  // Whether so many query rows take keys in pages sixteen at a time.
  bool in_sixteens(int64_t rows) const { return kTiles && in_tiles(rows) && lie_in_sixteens(a_); }

  // Where the rows of a chunk lie, and those that are fetched meanwhile.
  void look_up(Workspace& w, const Sequence& q, int64_t rows, const Met& met) const {
    const int64_t more = met.fetching == Fetching::pages     ? kAheadBlock
                         : met.fetching == Fetching::nothing ? 0
                                                             : kAheadCodes;
    const C **const keys = reinterpret_cast<const C**>(w.keys_at),
                    **const values = reinterpret_cast<const C**>(w.values_at);
    if (in_sixteens(rows)) {
      locate_sixteens(a_, a_.k, a_.v, q, met.begin, met.stop, met.begin, met.stop, more, keys);
      locate_sixteens(a_, a_.v, a_.k, q, met.begin, met.stop, met.end, met.last, more, values);
      return;
    }
    locate(a_, a_.k, a_.v, q, met.begin, met.stop, met.begin, met.stop, more, keys);
    locate(a_, a_.v, a_.k, q, met.begin, met.stop, met.end, met.last, more, values);
    if (met.fetching == Fetching::pages) order_pages(w);
  }

  // What a whole chunk fetches, by pages.
  void order_pages(Workspace& w) const {
    order_by_pages(reinterpret_cast<const C* const*>(w.keys_at), a_.k.row * int64_t{sizeof(C)},
                   reinterpret_cast<const C**>(w.next_keys));
    order_by_pages(reinterpret_cast<const C* const*>(w.values_at), a_.v.row * int64_t{sizeof(C)},
                   reinterpret_cast<const C**>(w.next_values));
  }

  // Whether some keys of `count` items are fetched from several pages in turn. Of several heads that lie side by
  // side rows are in several pages anyway, and codes of fp8 are computed more slowly than they are read.
  static bool by_pages(int count, int64_t keys) {
    return S::kPagesInTurn && pages_in_turn && !std::is_same_v<C, F8> && count == 1 && keys >= kChunkKeys;
  }

  // Scores of R rows, with the keys' scales in them.
  template <int R, class Rows, class Next>
  POLYATTN_INLINE void scores(const float* q, const Rows& rows, int64_t keys, const Next& next,
                              const float* scales, float* to) const {
    if constexpr (kWords && !Rows::kEven) {
      if (words())
        return few_word_scores<S, R>(q, d_.q_units, rows, keys, next, a_.head_dim, scales, to, kScoreRow);
    }
    if constexpr (kUnitsOfCodes<U, C>) {
      few_code_scores<S, R>(
          UnitSums<S, U>(), q, d_.q_units, rows, keys, next, a_.head_dim,
          [to](int r, int64_t j, typename S::Vec x) { S::store(to + r * kScoreRow + j, x); });
    } else if constexpr (kRepeats<S, U, C> && R > 1) {
      few_repeated_scores<S, U, R>(q, rows, keys, next, a_.head_dim, to, kScoreRow);
    } else {
      few_scores<S, U, R>(q, d_.q_units, rows, keys, next, a_.head_dim, to, kScoreRow);
    }
    scale(to, scales, keys, R);
  }

  static POLYATTN_INLINE void scale(float* scores, const float* scales, int64_t keys, int rows) {
    if constexpr (kCoded<C>) {
      for (int r = 0; r < rows; ++r) scale_columns<S>(scores + r * kScoreRow, scales, keys);
    }
  }

  // The values of some keys into the sums of R rows.
  template <int R, class Rows, class Next>
  POLYATTN_INLINE void row_values(const float* p, const Rows& rows, int64_t keys, const Next& next,
                                  float* out) const {
    if constexpr (kWords && !Rows::kEven) {
      if (words())
        return few_word_values<S, R>(p, kScoreRow, rows, keys, next, a_.value_dim, out, d_.v_columns);
    }
    few_values<S, U, R>(p, kScoreRow, rows, keys, next, a_.value_dim, out, d_.v_columns);
  }

  // The same in tiles for all rows; each by itself where what they see of a tile differs.
  template <class Values>
  void tile_values(const Workspace& own, const float* p, const Care& care, const Values& values) const {
    FewTiles<S, U, C> products;
    const auto some = [&](int r, int rows, const Care& of_rows) {
      products.values(p + r * kScoreRow, kScoreRow, rows, values, of_rows, a_.value_dim,
                      own.out + r * d_.v_columns, d_.v_columns);
    };
    const int rows = own.strips[0].count;
    if (!care.mixed_within(values.count)) return some(0, rows, {care.careful, nullptr, nullptr, 0});
    for (int r = 0; r < rows; ++r) some(r, 1, {true, care.words + r, care.mixed, care.from});
  }
  template <class Rows, class AheadOf>
  FewKeys<Rows, AheadOf> tile_keys(const Array& x, const Rows& rows, int64_t keys,
                                   const AheadOf& ahead) const {
    return {rows, ahead, x.row, a_.pages.table != nullptr, int(keys)};
  }

  // The values' scales into the probabilities.
  void weigh(const Workspace& w, const Visit& visit, int64_t begin, bool careful) const {
    for (int n = 0; n < visit.tiles; ++n) {
      const Tile& tile = visit.tile[n];
      const uint64_t* words = w.words + int64_t{n} * kRows;
      for (int r = 0; r < w.strips[0].count; ++r) {
        const uint64_t seen = careful && visit.mixed[n] ? words[r] : ~uint64_t{0};
        weigh_row(w.scores + r * kScoreRow + tile.first / U::kValues, w.value_scales + (tile.j0 - begin),
                  tile.columns, seen);
      }
    }
  }

  // A row of a tile; its probabilities may be pairs.
  static void weigh_row(float* p, const float* scales, int columns, uint64_t seen) {
    constexpr int W = S::kLanes;
    const auto weighed = [&](const auto* from, int i) {
      return S::select(seen >> i, S::mul(S::load(from + i), S::load(scales + i)), S::zero());
    };
    if constexpr (U::kValues == 1) {
      for (int i = 0; i < columns; i += W) S::store(p + i, weighed(p, i));
    } else {
      const BF16* const pairs = reinterpret_cast<const BF16*>(p);
      for (int i = 0; i < columns; i += 2 * W) {
        const bool both = i + W < columns;
        const typename S::Vec low = weighed(pairs, i), high = both ? weighed(pairs, i + W) : S::zero();
        S::store_some(p + i / 2, S::pairs(low, high), both ? W : W / 2);
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
  const FetchOrders keys_, values_;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

// An item of the forward pass from its operands to its output: of few query rows, alone or with others, or of many.
#pragma once

#include "kernel/many_rows.h"

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
      : a_(a), d_(d), units_(a), strip_(a, d, units_), few_(a, d, units_), memory_(a, d, units_, strip_),
        outputs_(a, d, units_), many_(a, d, memory_, strip_, outputs_) {}

  Scores scores() const { return units_.kind; }
  int64_t k_units() const { return strip_.k_units(); }
  static bool few(const Item& item) { return kMeetsFew && item.rows <= kFewRows; }

  // Runs an item over a part of its keys; leaves sums in w.out and w.state.
  // `careful`: a masked value that is not finite would reach rows as 0 * NaN, so each row gets
  // values of its own in which what it does not see is 0; same products, same order.
  void attend(Workspace& w, const Item& item, const Part& part, bool careful) const {
    const Span keys = keys_of(w, item, part);
    if (!few(item)) {
      many_.attend(w, item, keys, false, {}, careful);
      return;
    }
    if constexpr (kMeetsFew) {
      if (!keys.empty() && !part.follows) few_.fetch(&item, 1, keys);
      begin(w, item);
      for (int64_t j = keys.low / kTile * kTile; j < keys.high; j += kChunkKeys)
        chunk_of_few(w, item, keys, part.goes_on, j, smaller(j + kChunkKeys, keys.high), careful);
    }
  }

  // Runs an item of many rows over all of its keys and writes its outputs; false if one is NaN.
  bool attend_whole(Workspace& w, const Item& item, const Upcoming& upcoming, bool careful) const {
    return many_.attend(w, item, memory_.keys_of(item, w.strips), true, upcoming, careful);
  }

  // Whether an output that is NaN may be so for no other reason than how it was computed.
  bool doubtful(const Item& item) const {
    return a_.terms > 0 || (kFewInTiles<U, C> && few(item) && few_.in_tiles(item.rows));
  }

  // The same as attend() for the first `count` items of a workspace, of few rows, which walk over their keys together.
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
      for (int i = 0; i < count; ++i) {
        Workspace own = w.of(d_, i);
        begin(own, items[i]);
      }
      for (int64_t j = all.low; j < all.high; j += kChunkKeys) {
        Visit visits[kMostTogether];
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
      fine &= outputs_.write(w, item, w.strips[i], int64_t{i} * kRows, split);
    return fine;
  }

 private:
  // Whether few rows meet keys as they are stored.
  static constexpr bool kMeetsFew = !kCoded<C> || U::kValues == 1 || HasUnitsOf<S, C>;

  Span keys_of(const Workspace& w, const Item& item, const Part& part) const {
    const Span all = memory_.keys_of(item, w.strips);
    if (part.splits == 1 || all.empty()) return all;
    const int64_t size = round_up(blocks_of(all.high - all.low, part.splits), kTile);
    const int64_t first = all.low / kTile * kTile + part.split * size;
    const bool last = part.split == part.splits - 1;
    return {larger(all.low, first), last ? all.high : smaller(all.high, first + size)};
  }

  // An item of few rows, which are one strip, before its first key.
  void begin(Workspace& w, const Item& item) const {
    for (int r = 0; r < kRows; r += S::kLanes) {
      S::store(w.state.maximum + r, S::fill(-kInfinity));
      S::store(w.state.sum + r, S::zero());
    }
    std::memset(w.out, 0, size_t(item.rows * d_.v_columns) * sizeof(float));
    const Strip& s = *w.strips;
    for (int r = 0; r < s.count; ++r) {
      const T* const query = row_of<const T>(a_.q, item, s.head[r], s.t[r]);
      few_.pack_query(query, w.q, r, s.count);
    }
  }

  void chunk_of_few(Workspace& w, const Item& item, const Span& keys, bool goes_on, int64_t begin,
                    int64_t end, bool careful) const {
    Visit visit;
    const Met met = few_.probabilities(w, &item, &keys, 1, goes_on, begin, end, careful, &visit);
    // a code of int8 is never NaN, and probabilities have the scales in them
    if (!careful || std::is_same_v<C, int8_t>) return few_.values(w, &item, &visit, met);
    if (few_.in_tiles(item.rows)) return few_.values(w, &item, &visit, met, true);
    for (int n = 0; n < visit.tiles; ++n) memory_.pack_stored_values(w, item, visit.tile[n]);
    if (visit.tiles > 0) strip_.template values_by_row<true>(w, *w.strips, visit, w.out);
  }

  const Arguments& a_;
  const Division& d_;
  const ScoreUnits<U> units_;
  const ForwardStrip<S, U, C> strip_;
  const FewRows<S, U, T, C> few_;
  const ItemMemory<S, U, T, C> memory_;
  const Outputs<S, U, T> outputs_;
  const ManyRows<S, U, T, C> many_;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

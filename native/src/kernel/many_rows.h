// Items of many query rows. Their keys come in chunks, which are packed once and met by all strips of an item; a strip
// is begun before its first keys and written behind its last ones. What is needed next is fetched meanwhile.
#pragma once

#include "kernel/item_memory.h"
#include "kernel/outputs.h"

namespace polyattn::POLYATTN_NAMESPACE {

// The item that a thread runs next, and its strips, if it is known.
struct Upcoming {
  const Item* item = nullptr;
  const Strip* strips = nullptr;
};

// T: of queries and outputs; C: of keys and values as they are stored.
template <class S, class U, class T, class C>
class ManyRows {
 public:
  ManyRows(const Arguments& a, const Division& d, const ItemMemory<S, U, T, C>& memory,
           const ForwardStrip<S, U, C>& strip, const Outputs<S, U, T>& outputs)
      : a_(a), d_(d), memory_(memory), strip_(strip), outputs_(outputs) {}

  // Runs an item over some of its keys. `whole`: over all that it has, and outputs are written; false if one is NaN.
  // Else sums are left in w.out and w.state.
  bool attend(Workspace& w, const Item& item, const Span& keys, bool whole, const Upcoming& upcoming,
              bool careful) const {
    Progress progress;
    progress.whole = whole;
    w.fetcher->soon.clear();
    w.fetcher->later.clear();
    if (!keys.empty()) {
      d_.by_strips ? strip_by_strip(w, item, keys, upcoming, careful, progress)
                   : by_chunks(w, item, keys, upcoming, careful, progress);
    }
    for (int i = 0; i < item.strips; ++i) {
      begin_up_to(w, item, i, progress);
      if (whole) end(w, item, i, progress);
    }
    return progress.fine;
  }

 private:
  // How far an item's strips are.
  struct Progress {
    int begun = 0;
    uint64_t met = 0, ended = 0;  // a bit for each: it has met keys, and it is written
    bool whole = false, fine = true;
  };
  static_assert(kMostStrips <= 64);

  // A visit that is planned, of strip `strip`.
  struct Planned {
    Visit visit;
    int strip;
    uint64_t* words;
  };

  // Where a strip's rows are: strips that are run one by one share the memory of one.
  int place(int index) const { return d_.by_strips ? 0 : index; }

  void begin_up_to(Workspace& w, const Item& item, int index, Progress& p) const {
    for (; p.begun <= index; ++p.begun) {
      if (d_.by_strips && p.begun > 0) end(w, item, p.begun - 1, p);
      begin(w, item, p.begun);
    }
  }

  // The first sums of values are not added to others.
  void begin(Workspace& w, const Item& item, int index) const {
    const int64_t row = int64_t{place(index)} * kRows;
    for (int r = 0; r < kRows; r += S::kLanes) {
      S::store(w.state.maximum + row + r, S::fill(-kInfinity));
      S::store(w.state.sum + row + r, S::zero());
    }
    const Strip& s = w.strips[index];
    memory_.pack_queries(item, s, w.q + row * d_.q_units);
  }

  static bool is_first(int index, Progress& p) {
    const bool met = p.met >> index & 1;
    p.met |= uint64_t{1} << index;
    return !met;
  }

  void end(Workspace& w, const Item& item, int index, Progress& p) const {
    if (p.ended >> index & 1) return;
    p.ended |= uint64_t{1} << index;
    p.fine &= outputs_.write(w, item, w.strips[index], int64_t{place(index)} * kRows, 0);
  }

  void by_chunks(Workspace& w, const Item& item, const Span& keys, const Upcoming& upcoming, bool careful,
                 Progress& p) const {
    const int64_t step = d_.kept * kTile, low = keys.low / kTile * kTile;
    // what a strip meets in one step must not depend on its item, whose size may depend on the threads
    const int64_t first = d_.kept > kChunk ? low / step * step : low;
    FetchQueue& later = w.fetcher->later;
    for (int64_t next = first + step, j = low; j < keys.high; j = next, next += step) {
      const int64_t end = smaller(next, keys.high);
      later.clear();
      if (end < keys.high) {
        memory_.fetch_tiles(later, item, end, smaller(end + kChunkKeys, keys.high));
      } else if (upcoming.item) {
        memory_.fetch_item(later, *upcoming.item, upcoming.strips);
      }
      chunk(w, item, j, end, careful, p);
    }
  }

  // All strips against keys begin to end - 1.
  void chunk(Workspace& w, const Item& item, int64_t begin, int64_t end, bool careful, Progress& p) const {
    bool packed[kMostKept] = {};
    if constexpr (kCoded<C>) spread_scales(a_, a_.quantised.k, item, begin, end, w.key_scales);
    for (int i = 0; i < item.strips; ++i) {
      const Span seen = memory_.seen_by(item, w.strips[i]);
      const int64_t low = larger(begin, seen.low / kTile * kTile);
      const int64_t high = smaller(end, round_up(seen.high, kTile));
      const bool last = p.whole && end >= seen.high;
      if (low < high) {
        begin_up_to(w, item, i, p);
        FetchQueue& soon = w.fetcher->soon;
        soon.clear();
        if (last) memory_.fetch_rows(soon, item, w.strips[i], a_.out, a_.value_dim);
        if (p.begun == i + 1 && p.begun < item.strips)
          memory_.fetch_rows(soon, item, w.strips[p.begun], a_.q, a_.head_dim);
        meet(w, item, i, begin, {low, high}, careful, packed, p);
      }
      if (last && p.begun > i) this->end(w, item, i, p);
    }
  }

  // A strip against some keys of a chunk from key `begin` on. packed[slot]: whether a tile is, which is done where it
  // is not.
  void meet(Workspace& w, const Item& item, int index, int64_t begin, const Span& keys, bool careful,
            bool* packed, Progress& p) const {
    for (int64_t j = keys.low; j < keys.high;) {
      Visit visit;
      j = plan_some<S, U>(a_, item.q, w.strips[index], begin, j, keys.high, w.words, &visit);
      if (visit.tiles == 0) continue;
      memory_.pack_tiles(w, item, visit, careful, packed);
      strip_.strip(w, item, w.strips[index], index, visit, is_first(index, p), careful);
    }
  }

  // Strips one by one, from their queries to their outputs, in memory that a first cache holds; all keys stay packed.
  // A visit is planned while the one before is still to be run, and what it needs is fetched meanwhile.
  void strip_by_strip(Workspace& w, const Item& item, const Span& keys, const Upcoming& upcoming,
                      bool careful, Progress& p) const {
    bool packed[kMostKept] = {};
    if constexpr (kCoded<C>) spread_scales(a_, a_.quantised.k, item, 0, keys.high, w.key_scales);
    if (upcoming.item) memory_.fetch_item(w.fetcher->later, *upcoming.item, upcoming.strips);
    Planned two[2] = {{{}, 0, w.words}, {{}, 0, w.words + kRows * kChunk}};
    int strip = 0, at = 0;
    int64_t key = 0;
    for (bool here = plan(w, item, keys, &strip, &key, two[at]); here; at ^= 1) {
      const Planned& now = two[at];
      Planned& next = two[at ^ 1];
      begin_up_to(w, item, now.strip, p);
      memory_.pack_tiles(w, item, now.visit, careful, packed);
      here = plan(w, item, keys, &strip, &key, next);
      fetch(w, item, now.strip, here ? &next : nullptr, packed);
      Workspace own = w;
      own.words = now.words;
      strip_.strip(own, item, w.strips[now.strip], 0, now.visit, is_first(now.strip, p), careful);
    }
  }

  // The next visit, from key *key of strip *strip on; false if there is none.
  bool plan(const Workspace& w, const Item& item, const Span& keys, int* strip, int64_t* key,
            Planned& to) const {
    for (; *strip < item.strips; ++*strip, *key = 0) {
      if (*key >= keys.high) continue;
      to.visit = Visit{};
      to.strip = *strip;
      *key = plan_some<S, U>(a_, item.q, w.strips[*strip], 0, *key, keys.high, to.words, &to.visit);
      if (to.visit.tiles > 0) return true;
    }
    return false;
  }

  // Where strip `strip` is written after the visit that is run now, and what the next visit needs.
  void fetch(Workspace& w, const Item& item, int strip, const Planned* next, const bool* packed) const {
    FetchQueue& soon = w.fetcher->soon;
    soon.clear();
    const bool stays = next && next->strip == strip;
    if (!stays) memory_.fetch_rows(soon, item, w.strips[strip], a_.out, a_.value_dim);
    if (!next) return;
    if (!stays) memory_.fetch_rows(soon, item, w.strips[next->strip], a_.q, a_.head_dim);
    for (int n = 0; n < next->visit.tiles; ++n) {
      const Tile& tile = next->visit.tile[n];
      if (!packed[tile.slot]) memory_.fetch_tiles(soon, item, tile.j0, tile.j0 + tile.keys);
    }
  }

  const Arguments& a_;
  const Division& d_;
  const ItemMemory<S, U, T, C>& memory_;
  const ForwardStrip<S, U, C>& strip_;
  const Outputs<S, U, T>& outputs_;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

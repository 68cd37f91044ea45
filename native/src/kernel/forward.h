// The forward pass: items of query rows, each visiting the tiles of keys that its mask leaves.
//
// An item is up to `rows` query rows that share keys and values. Its keys come in chunks of
// kChunk tiles, which are packed once and met by every strip of kRows rows of the item. How rows
// and keys are divided depends on the problem alone, never on the number of threads, so that the
// result does not either.
#pragma once

#include "kernel/few.h"
#include "kernel/softmax.h"
#include "kernel/visit.h"
#include "threads.h"

namespace polyattn::POLYATTN_NAMESPACE {

constexpr int kMostStrips = 16;

// How a call is divided, and the sizes of packed operands in units.
struct Division {
  int64_t group;       // query heads that share a key/value head
  bool heads_as_rows;  // rows of an item run over the group's heads, then over t
  int64_t rows, items_per_head, heads, items;
  int64_t splits;  // parts of the keys, merged at the end
  int64_t q_units, v_columns;
};

// Of packed sequences the longest: a division by their total would be mostly empty items.
inline int64_t longest(const int64_t* cu, int64_t batch, int64_t length) {
  if (!cu) return length;
  int64_t most = 0;
  for (int64_t b = 0; b < batch; ++b) most = larger(most, cu[b + 1] - cu[b]);
  return most;
}

template <class S, class U>
inline Division divide(const Arguments& a) {
  Division d;
  const int64_t q_len = longest(a.cu_q, a.batch, a.q_len), kv_len = longest(a.cu_kv, a.batch, a.kv_len);
  d.group = a.q_heads / a.kv_heads;
  d.heads_as_rows = d.group > 1 && q_len < kRows && !a.cu_q;
  d.heads = a.batch * (d.heads_as_rows ? a.kv_heads : a.q_heads);
  const int64_t rows = d.heads_as_rows ? q_len * d.group : q_len;
  d.rows = kRows * (larger(a.head_dim, a.value_dim) > 128 ? 2 : 8);
  bool sparse = false;
  for (int i = 0; i < a.terms; ++i) sparse |= a.term[i].kind == TermKind::blocks;
  if (sparse) d.rows = kRows * kMostStrips;  // few strips meet a tile, so more share its packing
  while (d.rows > kRows && d.heads * blocks_of(rows, d.rows) < (sparse ? 32 : 64)) d.rows /= 2;
  d.rows = smaller(d.rows, round_up(rows, 16));
  d.items_per_head = blocks_of(rows, d.rows);
  d.items = d.heads * d.items_per_head;
  // parts of 1,024 keys at most of long sequences, of 512 at least
  const int64_t most = larger<int64_t>(kv_len / 512, 1), long_parts = kv_len / 1024;
  d.splits =
      d.items >= 32 ? 1 : smaller(larger(blocks_of(64, d.items), smaller<int64_t>(long_parts, 64)), most);
  d.q_units = round_up(blocks_of(a.head_dim, U::kValues), S::kLanes);
  d.v_columns = round_up(a.value_dim, S::kLanes);
  return d;
}

// One thread for what takes some twenty microseconds; waking others takes a few. Else all that may
// be used, also if there are fewer tasks: libgomp ends its workers when fewer are asked for.
// Few rows are bound by reading keys and values, and a second thread pays from 40,000 numbers on; short
// ones are bound by packing these.
inline int worthwhile(const Arguments& a, int64_t tasks) {
  const double read =
      double(a.batch) * double(a.kv_heads) * double(a.kv_len) * double(a.head_dim + a.value_dim);
  const int64_t rows = a.q_heads / a.kv_heads * a.q_len;
  const double work = rows <= kFewRows ? read * 24 : read * double(rows) * (a.q_len <= 32 ? 4 : 1);
  return work < (1 << 20) || tasks == 1 ? 1 : a.threads;
}

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

// The memory in which parts of the keys meet: sums of rows, their states, and a count of parts done.
struct Parts {
  float* out = nullptr;
  RowStates state{};
  int* done = nullptr;
};

template <class S, class U, class T>
class Forward {
 public:
  static bool run(const Arguments& a) {
    Forward self(a);
    if (self.d_.items == 0) return true;
    const int64_t tasks = self.d_.items * self.d_.splits;
    if (self.d_.splits > 1 && !self.make_parts()) return false;
    parallel(worthwhile(a, tasks), [](void* p, int) { static_cast<Forward*>(p)->work(); }, &self);
    __builtin_free(self.memory_);
    return !self.failed_;
  }

 private:
  explicit Forward(const Arguments& a)
      : a_(a), d_(divide<S, U>(a)), scores_(scores_of<U>(a)), k_units_(blocks_of(a.head_dim, U::kValues)) {
    factor_ = scores_ == Scores::natural ? a.scale : a.scale * kLog2E;
    q_factor_ = U::kValues == 1 ? factor_ : 1.0f;
    adjusting_ = U::kValues == 1 ? 1.0f : factor_;
  }

  bool make_parts() {
    const size_t rows = size_t(d_.items * d_.splits * d_.rows);
    const size_t sums = rows * size_t(d_.v_columns);
    memory_ = static_cast<float*>(
        __builtin_malloc((sums + 2 * rows) * sizeof(float) + size_t(d_.items) * sizeof(int)));
    if (!memory_) return false;
    parts_.out = memory_;
    parts_.state = {memory_ + sums, memory_ + sums + rows};
    parts_.done = reinterpret_cast<int*>(memory_ + sums + 2 * rows);
    std::memset(parts_.done, 0, size_t(d_.items) * sizeof(int));
    return true;
  }

  void work() {
    const size_t bytes = Workspace::layout(d_, k_units_, nullptr, nullptr);
    float* base = reinterpret_cast<float*>(scratch(bytes));
    if (!base) {
      __atomic_store_n(&failed_, true, __ATOMIC_RELAXED);
      return;
    }
    Workspace w;
    Workspace::layout(d_, k_units_, base, &w);
    const int64_t tasks = d_.items * d_.splits;
    for (;;) {
      const int64_t task = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
      if (task >= tasks) return;
      if (d_.splits == 1) {
        whole(w, task);
      } else {
        part(w, task % d_.items, task / d_.items);  // heads whose rows lie side by side, side by side
      }
    }
  }

  // The rows of an item.
  struct Item {
    Sequence q;
    int64_t kv_head, first, rows;  // first: row number within the head (or group)
    int64_t head;                  // unless heads are rows
    int strips;
  };

  bool open(Workspace& w, int64_t number, Item* item) const {
    const int64_t outer = number / d_.items_per_head;
    // the last rows first: under causal masks they see most keys, and short items end the call
    const int64_t inner = d_.items_per_head - 1 - number % d_.items_per_head;
    const int64_t per_batch = d_.heads_as_rows ? a_.kv_heads : a_.q_heads;
    item->q = sequence_of(a_, outer / per_batch);
    item->head = d_.heads_as_rows ? 0 : outer % per_batch;
    item->kv_head = d_.heads_as_rows ? outer % per_batch : item->head / d_.group;
    const int64_t all = d_.heads_as_rows ? item->q.q_len * d_.group : item->q.q_len;
    item->first = inner * d_.rows;
    item->rows = smaller(d_.rows, all - item->first);
    if (item->rows <= 0) return false;
    item->strips = int(blocks_of(item->rows, kRows));
    for (int i = 0; i < item->strips; ++i) fill_strip(*item, i, w.strips[i]);
    return true;
  }

  void fill_strip(const Item& item, int index, Strip& s) const {
    s.count = int(smaller<int64_t>(kRows, item.rows - int64_t{index} * kRows));
    s.one_head = !d_.heads_as_rows;
    s.t_low = item.q.q_len;
    s.t_high = 0;
    for (int r = 0; r < s.count; ++r) {
      const int64_t row = item.first + int64_t{index} * kRows + r;
      s.t[r] = d_.heads_as_rows ? row % item.q.q_len : row;
      s.head[r] = d_.heads_as_rows ? item.kv_head * d_.group + row / item.q.q_len : item.head;
      s.t_low = smaller(s.t_low, s.t[r]);
      s.t_high = larger(s.t_high, s.t[r]);
    }
  }

  template <class E>
  E* row_of(const Array& x, const Item& item, int64_t head, int64_t t) const {
    return static_cast<E*>(x.data) + item.q.b * x.batch + head * x.head + (item.q.q_base + t) * x.row;
  }

  void whole(Workspace& w, int64_t number) {
    Item item;
    if (!open(w, number, &item)) return;
    attend(w, item, 0, 1, false);
    if (!finish(w, item) && a_.terms > 0) {
      attend(w, item, 0, 1, true);
      finish(w, item);
    }
  }

  void part(Workspace& w, int64_t number, int64_t split) {
    Item item;
    if (!open(w, number, &item)) return;
    attend(w, item, split, d_.splits, false);
    keep(w, item, number * d_.splits + split);
    const int done = __atomic_add_fetch(&parts_.done[number], 1, __ATOMIC_ACQ_REL);
    if (done < d_.splits) return;
    merge(w, item, number);
    if (finish(w, item) || a_.terms == 0) return;
    for (int64_t i = 0; i < d_.splits; ++i) {
      attend(w, item, i, d_.splits, true);
      keep(w, item, number * d_.splits + i);
    }
    merge(w, item, number);
    finish(w, item);
  }

  void keep(const Workspace& w, const Item& item, int64_t place) {
    std::memcpy(parts_.out + place * d_.rows * d_.v_columns, w.out, size_t(item.rows * d_.v_columns) * 4);
    std::memcpy(parts_.state.maximum + place * d_.rows, w.state.maximum, size_t(item.rows) * 4);
    std::memcpy(parts_.state.sum + place * d_.rows, w.state.sum, size_t(item.rows) * 4);
  }

  // In the order of the keys, whichever part was done first.
  void merge(Workspace& w, const Item& item, int64_t number) {
    const float unit = scores_ == Scores::natural ? kLog2E : 1.0f;
    for (int64_t r = 0; r < item.rows; ++r) {
      float top = -kInfinity;
      for (int64_t i = 0; i < d_.splits; ++i) {
        const float m = parts_.state.maximum[(number * d_.splits + i) * d_.rows + r];
        top = m > top ? m : top;
      }
      float* out = w.out + r * d_.v_columns;
      std::memset(out, 0, size_t(d_.v_columns) * 4);
      float total = 0;
      for (int64_t i = 0; i < d_.splits; ++i) {
        const int64_t place = (number * d_.splits + i) * d_.rows + r;
        const float maximum = parts_.state.maximum[place], sum = parts_.state.sum[place];
        if (sum == 0) continue;  // no visible keys
        // NaN scores leave no maximum, but a NaN sum
        const float weight = maximum == -kInfinity ? 1.0f : exp2_scalar<S, 5>((maximum - top) * unit);
        total += sum * weight;
        const float* from = parts_.out + place * d_.v_columns;
        const typename S::Vec f = S::fill(weight);
        for (int64_t c = 0; c < d_.v_columns; c += S::kLanes)
          S::store(out + c, S::fma(S::load(from + c), f, S::load(out + c)));
      }
      w.state.maximum[r] = top;
      w.state.sum[r] = total;
    }
  }

  // Runs an item over one of `splits` parts of its keys; leaves sums in w.out and w.state.
  // `careful`: a masked value that is not finite would reach rows as 0 * NaN, so each row gets
  // values of its own in which what it does not see is 0; same products, same order.
  void attend(Workspace& w, const Item& item, int64_t split, int64_t splits, bool careful) {
    for (int64_t r = 0; r < round_up(item.rows, kRows); ++r) {
      w.state.maximum[r] = -kInfinity;
      w.state.sum[r] = 0;
    }
    std::memset(w.out, 0, size_t(item.rows * d_.v_columns) * 4);
    pack_queries(w, item);
    Span keys = item_span(w, item);
    if (keys.empty()) return;
    if (splits > 1) {
      const int64_t size = round_up(blocks_of(keys.high - keys.low, splits), kTile);
      const int64_t begin = keys.low / kTile * kTile;
      const int64_t high = keys.high;
      keys.low = larger(keys.low, begin + split * size);
      keys.high = smaller(high, begin + (split + 1) * size);
      if (split == splits - 1) keys.high = high;
      if (keys.empty()) return;
    }
    for (int64_t j = keys.low / kTile * kTile; j < keys.high; j += kChunkKeys)
      chunk(w, item, j, smaller(j + kChunkKeys, keys.high), careful);
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

  void pack_queries(Workspace& w, const Item& item) {
    for (int i = 0; i < item.strips; ++i) {
      const Strip& s = w.strips[i];
      float* to = w.q + int64_t{i} * kRows * d_.q_units;
      if (!d_.heads_as_rows) {
        pack_plain<S, U>(row_of<const T>(a_.q, item, item.head, s.t[0]), a_.q.row, s.count, a_.head_dim,
                         q_factor_, to, d_.q_units);
        continue;
      }
      for (int r = 0; r < s.count; ++r) {
        pack_plain<S, U>(row_of<const T>(a_.q, item, s.head[r], s.t[r]), 0, 1, a_.head_dim, q_factor_,
                         to + r * d_.q_units, d_.q_units);
      }
    }
  }

  const T* key_row(const Array& x, const Item& item, int64_t j) const {
    const T* base = static_cast<const T*>(x.data) + item.kv_head * x.head;
    if (!a_.pages.table) return base + item.q.b * x.batch + (item.q.kv_base + j) * x.row;
    const int64_t page = a_.pages.table[item.q.b * a_.pages.row + j / a_.pages.page_size];
    return base + page * x.batch + j % a_.pages.page_size * x.row;
  }

  static bool few(const Item& item) { return item.rows <= kFewRows; }

  void chunk(Workspace& w, const Item& item, int64_t begin, int64_t end, bool careful) {
    bool packed[kChunk] = {};
    for (int i = 0; i < item.strips; ++i) {
      Visit visit;
      plan<S>(a_, item.q, w.strips[i], begin, end, w.words, &visit);
      if (visit.tiles == 0) continue;
      for (int n = 0; n < visit.tiles && (!few(item) || careful); ++n) {
        const Tile& tile = visit.tile[n];
        if (packed[tile.slot]) continue;
        packed[tile.slot] = true;
        pack_tile(w, item, tile);
      }
      strip(w, item, i, visit, careful);
    }
  }

  void pack_tile(Workspace& w, const Item& item, const Tile& tile) {
    auto key = [&](int64_t j) { return key_row(a_.k, item, tile.j0 + j); };
    auto value = [&](int64_t j) { return key_row(a_.v, item, tile.j0 + j); };
    pack_transposed<S, U, T>(key, tile.keys, tile.columns, a_.head_dim, w.k + tile.slot * kTile * k_units_,
                             kTile, ahead(a_.k));
    pack_rows<S, U, T>(value, tile.keys, tile.columns, a_.value_dim, packed_values(w, tile), d_.v_columns,
                       ahead(a_.v));
  }

  int64_t ahead(const Array& x) const { return a_.pages.table ? 0 : 32 * x.row; }

  float* packed_values(const Workspace& w, const Tile& tile) const {
    return w.v + tile.slot * (kTile / U::kValues) * d_.v_columns;
  }

  void strip(Workspace& w, const Item& item, int index, const Visit& visit, bool careful) {
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

  // Normalises and writes; false if an output is NaN.
  bool finish(Workspace& w, const Item& item) {
    bool fine = true;
    for (int i = 0; i < item.strips; ++i) {
      const Strip& s = w.strips[i];
      for (int r = 0; r < s.count; ++r) {
        const int64_t row = int64_t{i} * kRows + r;
        fine &= finish_row(item, s.head[r], s.t[r], w.state.maximum[row], w.state.sum[row],
                           w.out + row * d_.v_columns);
      }
    }
    return fine;
  }

  bool finish_row(const Item& item, int64_t head, int64_t t, float maximum, float sum, const float* sums) {
    // natural scores are kept as they are: the largest floats times log2(e) are infinite
    const bool natural = scores_ == Scores::natural;
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
    for (int64_t c = 0; c < a_.value_dim; c += S::kLanes) {
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
  const Division d_;
  const Scores scores_;
  const int64_t k_units_;
  float factor_, q_factor_, adjusting_;  // the last: for what soft cap and bias need
  Parts parts_;
  float* memory_ = nullptr;
  int64_t next_ = 0;
  bool failed_ = false;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

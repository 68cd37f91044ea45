// How a call of the forward pass is divided into items, which rows an item has, and how many threads pay.
//
// An item is up to `rows` query rows that share keys and values, as strips of kRows: of one head, of a group's
// heads in one strip, or of several heads of a group in strips of their own. How rows and keys are divided
// depends on the problem alone, never on the number of threads, so that the result does not either; but for
// share_tiles(), which changes no bit.
#pragma once

#include "kernel/visit.h"
#include "memory_habits.h"

namespace polyattn::POLYATTN_NAMESPACE {

constexpr int kMostStrips = 64;
constexpr int kMostKept = 64;  // tiles
constexpr int kFewRows = 8;    // up to here packing costs more than it saves
constexpr int64_t kKeptBytes = int64_t{2} << 20;
constexpr int kMostTogether = kRows / kFewRows;  // items whose rows a strip's memory holds

// How a call is divided, and the sizes of packed operands in units.
struct Division {
  int64_t group;       // query heads that share a key/value head
  bool heads_as_rows;  // rows of an item run over the group's heads, then over t
  int64_t sharing;     // heads of a group whose strips an item has, which meet keys that are packed once
  int64_t rows, items_per_head, heads, items;
  // Items that walk over their keys together, and the tasks of one batch entry that this makes.
  int64_t together, tasks_per_batch;
  int64_t splits;  // parts of the keys, merged at the end
  int64_t q_units, v_columns;
  int64_t kept;    // tiles that stay packed while the strips of an item meet them
  bool by_strips;  // all of a head's tiles do, so each strip is run from its queries to its output
};

// Of packed sequences the longest: a division by their total would be mostly empty items.
inline int64_t longest(const int64_t* cu, int64_t batch, int64_t length) {
  if (!cu) return length;
  int64_t most = 0;
  for (int64_t b = 0; b < batch; ++b) most = larger(most, cu[b + 1] - cu[b]);
  return most;
}

// Few rows are bound by how fast keys and values are read. Where the heads of a key lie side by side, rows
// of one head are scattered over the pages of all, and only all heads together read these from end to end. With
// 16 lanes, what is fetched ahead keeps up with codes that caches hold a part of, which are computed more slowly: each
// head alone, but where `codes_together` says otherwise.
constexpr int64_t kCachedCodes = int64_t{1} << 26;  // bytes

// Whether keys lie in small pages, heads before keys, and no cache holds them: one head's keys of a page are a few
// kilobytes, here and there in memory, and only all heads together read a page from end to end. With 8 lanes half
// types are bound by computation, and lose.
template <class S>
inline bool scattered_in_pages(const Arguments& a) {
  constexpr int64_t kSmallPage = 32;  // keys
  if (!a.pages.table || a.pages.page_size > kSmallPage || a.k.head <= 0) return false;
  const int64_t element = a.dtype == DType::f32 ? 4 : 2;
  const int64_t bytes = a.batch * a.kv_len * a.kv_heads * (a.head_dim + a.value_dim) * element;
  return S::kLanes >= 16 && a.k.head * a.kv_heads <= a.k.batch && bytes > page_heads_together_from;
}

template <class S>
inline int64_t heads_together(const Arguments& a, int64_t rows) {
  const bool side_by_side = a.k.head > 0 && a.k.head * a.kv_heads <= a.k.row;
  // shorter sequences are in a cache, and are better divided by heads
  const int64_t codes =
      a.quantised.codes == Codes::none ? 0 : a.batch * a.kv_len * a.kv_heads * (a.head_dim + a.value_dim);
  const bool coded = S::kLanes >= 16 && !codes_together && codes > 0 && codes <= kCachedCodes;
  if (rows > kFewRows || a.kv_len < 2048 || a.cu_q || coded) return 1;
  if (!side_by_side && !scattered_in_pages<S>(a)) return 1;
  return smaller<int64_t>(a.kv_heads, kMostTogether);
}

// Whether query heads that share keys are rows of one item.
inline bool heads_are_rows(const Arguments& a) {
  return a.q_heads > a.kv_heads && longest(a.cu_q, a.batch, a.q_len) < kRows && !a.cu_q;
}

// Query rows that share the keys of an item's head.
inline int64_t rows_of_head(const Arguments& a) {
  return longest(a.cu_q, a.batch, a.q_len) * (heads_are_rows(a) ? a.q_heads / a.kv_heads : 1);
}

inline void count_items(const Arguments& a, int64_t rows, Division* d) {
  d->items_per_head = blocks_of(rows, d->rows / d->sharing);
  d->items = d->heads * d->items_per_head;
  d->tasks_per_batch = blocks_of(d->items, larger<int64_t>(a.batch, 1) * d->together);
}

// The most rows of an item whose queries and sums a second cache holds beside keys, values and scores. In tiles
// packing is a larger part of the work.
inline int64_t most_rows_to_share(const Division& d, int64_t most) {
  constexpr int64_t kBytes = int64_t{1} << 20;
  return larger(
      most, smaller<int64_t>(kBytes / (4 * (d.q_units + d.v_columns)), kRows * kMostStrips) / kRows * kRows);
}

// Whether the keys that any rows see begin at the first one, so that chunks begin at the same keys in every item.
inline bool sees_from_the_first(const Arguments& a) {
  for (int i = 0; i < a.terms; ++i) {
    switch (a.term[i].kind) {
      case TermKind::band:
        if (a.term[i].low > -kUnbounded) return false;
        break;
      case TermKind::everything:
      case TermKind::kv_limit:
      case TermKind::q_limit:
      case TermKind::q_start:
      case TermKind::first_keys:
      case TermKind::dense:
      case TermKind::both:
      case TermKind::either:
        break;
      default:
        return false;
    }
  }
  return true;
}

// Makes items larger while each thread has `several`: they share the packing of a tile. Only where what a row
// computes does not depend on the item that it is in, which the last few rows of a head must not become.
inline void share_tiles(const Arguments& a, int64_t rows, int64_t most, int64_t several, Division* d) {
  const int64_t enough = larger<int64_t>(int64_t{a.threads} * several, 2 * several), last = rows % kRows;
  if (a.cu_q || (last > 0 && last <= kFewRows)) return;
  const auto of_head = [d](int64_t of_item) { return of_item / d->sharing; };
  while (d->rows % kRows == 0 && of_head(d->rows) < rows && 2 * d->rows <= most &&
         d->heads * blocks_of(rows, of_head(2 * d->rows)) >= enough) {
    d->rows *= 2;
  }
  count_items(a, rows, d);
}

// The largest divisor that is not above `most`.
inline int64_t divisor_up_to(int64_t number, int64_t most) {
  int64_t divisor = smaller(number, most);
  while (divisor > 1 && number % divisor != 0) --divisor;
  return divisor;
}

// Heads of a group that share items of about `strips` strips. Packed sequences are left out: short ones among
// them are few rows, which are not packed.
inline int64_t heads_sharing(const Arguments& a, int64_t strips, bool sparse) {
  if (heads_are_rows(a) || a.cu_q || sparse || rows_of_head(a) <= kFewRows) return 1;
  return divisor_up_to(a.q_heads / a.kv_heads, strips);
}

// The division of rows where heads share items: `strips` or a few more, fewer where that makes few items.
inline void divide_group(const Arguments& a, int64_t strips, Division* d) {
  const int64_t rows = rows_of_head(a), groups = a.batch * a.kv_heads * d->group;
  int64_t high = smaller(blocks_of(strips, d->sharing), blocks_of(rows, kRows));
  while (groups / d->sharing * blocks_of(rows, high * kRows) < 32 && (high > 1 || d->sharing > 1))
    high > 1 ? high /= 2 : d->sharing = divisor_up_to(d->sharing, d->sharing / 2);
  d->heads = groups / d->sharing;
  d->rows = high * kRows * d->sharing;
}

template <class S, class U>
inline Division divide(const Arguments& a) {
  Division d;
  const int64_t kv_len = longest(a.cu_kv, a.batch, a.kv_len);
  d.group = a.q_heads / a.kv_heads;
  d.heads_as_rows = heads_are_rows(a);
  d.heads = a.batch * (d.heads_as_rows ? a.kv_heads : a.q_heads);
  const int64_t rows = rows_of_head(a);
  const int64_t most_rows = kRows * (larger(a.head_dim, a.value_dim) > 128 ? 2 : 8);
  d.rows = most_rows;
  bool sparse = false;
  for (int i = 0; i < a.terms; ++i) sparse |= a.term[i].kind == TermKind::blocks;
  if (sparse) d.rows = kRows * 16;  // few strips meet a tile, so more share its packing
  d.sharing = heads_sharing(a, d.rows / kRows, sparse);
  if (d.sharing > 1) {
    divide_group(a, d.rows / kRows, &d);
  } else {
    while (d.rows > kRows && d.heads * blocks_of(rows, d.rows) < (sparse ? 32 : 64)) d.rows /= 2;
    d.rows = smaller(d.rows, round_up(rows, rows <= kFewRows ? 4 : 16));
  }
  d.together = heads_together<S>(a, rows);
  count_items(a, rows, &d);
  // parts of 1,024 keys at most of long sequences, of 512 at least, or of 2,048 of several heads
  const int64_t tasks = larger<int64_t>(a.batch * d.tasks_per_batch, 1), long_parts = kv_len / 1024;
  const int64_t most = larger<int64_t>(kv_len * d.together / (d.together > 1 ? 2048 : 512), 1);
  d.splits = tasks >= 32 ? 1 : smaller(larger(blocks_of(64, tasks), smaller<int64_t>(long_parts, 64)), most);
  d.q_units = round_up(blocks_of(a.head_dim, U::kValues), S::kLanes);
  if (a.quantised.codes == Codes::int8) d.q_units = larger<int64_t>(d.q_units, 32);  // see pack_words
  d.v_columns = round_up(a.value_dim, S::kLanes);
  d.kept = kChunk;
  if (sparse && rows > kFewRows) {
    const int64_t tile = kTile * (d.q_units + d.v_columns / U::kValues) * int64_t{sizeof(float)};
    d.kept = smaller<int64_t>(larger<int64_t>(kKeptBytes / tile, kChunk), kMostKept);
  }
  d.by_strips = d.kept > kChunk && d.splits == 1 && kv_len <= d.kept * kTile;
  if (d.splits == 1 && sparse) share_tiles(a, rows, kRows * kMostStrips, 4, &d);
  const bool large = U::kInTiles || large_items;
  const int64_t most_shared = large ? most_rows_to_share(d, most_rows) : most_rows;
  // under a mask items are not alike, and small ones end the call
  if (d.splits == 1 && (large ? !sparse && sees_from_the_first(a) : a.terms == 0 && d.sharing == 1))
    share_tiles(a, rows, most_shared, a.terms == 0 ? 4 : 8, &d);
  return d;
}

// The rows of an item. In memory they are `rows` ones, of which a strip has kRows but in the last.
struct Item {
  Sequence q;
  int64_t kv_head, first, rows;  // first: row number within the head (or group)
  int64_t head;          // the first of those that share it, whose strips take turns. 0 if heads are rows
  int64_t rows_of_head;  // (or of the group)
  int strips;
};

// Row t of a head, of queries or outputs.
template <class E>
inline E* row_of(const Array& x, const Item& item, int64_t head, int64_t t) {
  return static_cast<E*>(x.data) + item.q.b * x.batch + head * x.head + (item.q.q_base + t) * x.row;
}

inline void fill_strip(const Division& d, const Item& item, int index, Strip& s) {
  const int64_t high = index / d.sharing * kRows;
  s.count = int(smaller<int64_t>(kRows, item.rows_of_head - high));
  s.one_head = !d.heads_as_rows;
  s.t_low = item.q.q_len;
  s.t_high = 0;
  for (int r = 0; r < s.count; ++r) {
    const int64_t row = item.first + high + r;
    s.t[r] = d.heads_as_rows ? row % item.q.q_len : row;
    s.head[r] = d.heads_as_rows ? item.kv_head * d.group + row / item.q.q_len : item.head + index % d.sharing;
    s.t_low = smaller(s.t_low, s.t[r]);
    s.t_high = larger(s.t_high, s.t[r]);
  }
}

// Fills in an item and the strips of its rows; false if it has none.
inline bool open_item(const Arguments& a, const Division& d, int64_t number, Strip* strips, Item* item) {
  const int64_t outer = number / d.items_per_head;
  // the last rows first: under causal masks they see most keys, and short items end the call
  const int64_t inner = d.items_per_head - 1 - number % d.items_per_head;
  const int64_t parts = d.heads_as_rows ? 1 : blocks_of(d.group, d.sharing);  // of a group
  item->q = sequence_of(a, outer / (a.kv_heads * parts));
  item->kv_head = outer / parts % a.kv_heads;
  item->head = d.heads_as_rows ? 0 : item->kv_head * d.group + outer % parts * d.sharing;
  const int64_t all = d.heads_as_rows ? item->q.q_len * d.group : item->q.q_len, most = d.rows / d.sharing;
  item->first = inner * most;
  item->rows_of_head = smaller(most, all - item->first);
  if (item->rows_of_head <= 0) return false;
  item->strips = int(blocks_of(item->rows_of_head, kRows) * d.sharing);
  item->rows = d.sharing > 1 ? int64_t{item->strips} * kRows : item->rows_of_head;
  for (int i = 0; i < item->strips; ++i) fill_strip(d, *item, i, strips[i]);
  return true;
}

// One thread for what takes some twenty microseconds; waking others takes a few. Else all that may
// be used, also if there are fewer tasks: libgomp ends its workers when fewer are asked for.
// Few rows are bound by reading keys and values, and a second thread pays from 40,000 numbers on, or from 32
// tasks of a quarter of a microsecond each; short ones are bound by packing these.
inline int worthwhile(const Arguments& a, int64_t tasks) {
  const double read =
      double(a.batch) * double(a.kv_heads) * double(a.kv_len) * double(a.head_dim + a.value_dim);
  const int64_t rows = a.q_heads / a.kv_heads * a.q_len;
  const double work = rows <= kFewRows ? read * 24 + double(tasks) * (1 << 15)
                                       : read * double(rows) * (a.q_len <= 32 ? 4 : 1);
  return work < (1 << 20) || tasks == 1 ? 1 : a.threads;
}

}  // namespace polyattn::POLYATTN_NAMESPACE

// Where the keys or values of a chunk lie, for the few rows that read them from there: pages are looked up
// once for all heads.
#pragma once

#include "kernel/division.h"
#include "kernel/visit.h"

namespace polyattn::POLYATTN_NAMESPACE {

// A row is fetched S::kAheadRows rows before it is read, of codes, which are small, so many; or with the rows of
// the next block, of several pages in turn.
constexpr int64_t kAheadCodes = 64, kAheadBlock = 128;
constexpr int64_t kMostPages = 8, kPageBytes = 4096;
constexpr int64_t kRowsAtOnce = 16;  // whole vectors of them are read, at most so many
constexpr int64_t kLocatedRows = kChunkKeys + kRowsAtOnce + kAheadBlock;

// Keys or values that were looked up; `offset`: elements from what was to a head's.
template <class T>
struct LocatedRows {
  using Element = T;
  static constexpr bool kEven = false;
  const T* const* at;
  int64_t offset;

  POLYATTN_INLINE const T* operator[](int64_t j) const { return at[j] + offset; }
  LocatedRows from_column(int64_t column) const { return {at, offset + column}; }
};

// What is fetched while some keys are met: a row for each, `offset` elements further. None if `rows` is null.
template <class T>
struct Ahead {
  const T* const* rows;
  int64_t offset;

  bool here() const { return rows != nullptr; }
  POLYATTN_INLINE bool here(int64_t) const { return here(); }
  POLYATTN_INLINE const T* of(int64_t j) const { return rows[j] + offset; }
  Ahead where(bool wanted) const { return {wanted ? rows : nullptr, offset}; }
  Ahead from_column(int64_t column) const { return {rows, offset + column}; }
  Ahead from_row(int64_t j) const { return {rows ? rows + j : nullptr, offset}; }
};

// In how many pages the rows of a block lie, as a power of two; `row`: bytes from one to the next.
inline int pages_of_block(int64_t row) {
  int power = 0;
  while (int64_t{2} << power <= kMostPages && (int64_t{2} << power) * kPageBytes <= kAheadBlock * row)
    ++power;
  return power;
}

// The j-th row of a block where those of its pages are taken in turn.
POLYATTN_INLINE int64_t in_turn(int64_t j, int pages) {
  return (j & ((int64_t{1} << pages) - 1)) * (kAheadBlock >> pages) + (j >> pages);
}

// order[j] = what is fetched while row j of a whole chunk is met: a row of the next block. `row`: as above.
template <class T>
inline void order_by_pages(const T* const* rows, int64_t row, const T** order) {
  const int pages = pages_of_block(row);
  const int64_t in_a_page = kAheadBlock >> pages;
  for (int64_t block = 0; block < kChunkKeys; block += kAheadBlock) {
    const T* const* const next = rows + block + kAheadBlock;
    for (int64_t i = 0; i < in_a_page; ++i) {
      for (int64_t page = 0; page < int64_t{1} << pages; ++page) *order++ = next[page * in_a_page + i];
    }
  }
}

// The rows of keys `begin` to `end` - 1 of the first head.
template <class T>
inline void locate(const Arguments& a, const Array& x, const Sequence& q, int64_t begin, int64_t end,
                   const T** rows) {
  const T* const base = static_cast<const T*>(x.data);
  const int64_t count = end - begin, stride = x.row;
  if (!a.pages.table) {
    const T* const row = base + q.b * x.batch + (q.kv_base + begin) * stride;
    for (int64_t j = 0; j < count; ++j) rows[j] = row + j * stride;
    return;
  }
  const int64_t* table = a.pages.table + q.b * a.pages.row;
  int64_t page = begin / a.pages.page_size, within = begin - page * a.pages.page_size;
  for (int64_t j = 0; j < count; ++page, within = 0) {
    const int64_t run = smaller(count - j, a.pages.page_size - within);
    const T* row = base + table[page] * x.batch + within * stride;
    for (const int64_t stop = j + run; j < stop; ++j, row += stride) rows[j] = row;
  }
}

// The rows of some keys of `now`, repeats of the last up to a whole vector, and behind these `ahead` ones, if any,
// that are worth fetching meanwhile: rows of `next` from key `after` on, then repeats.
template <class T>
inline void locate(const Arguments& a, const Array& now, const Array& next, const Sequence& q, int64_t begin,
                   int64_t end, int64_t after, int64_t last, int64_t ahead, const T** rows) {
  int64_t count = end - begin;
  const int64_t whole = round_up(count, kRowsAtOnce);
  locate(a, now, q, begin, end, rows);
  for (; count < whole; ++count) rows[count] = rows[count - 1];
  const int64_t more = smaller(larger<int64_t>(last - after, 0), ahead);
  locate(a, next, q, after, after + more, rows + count);
  for (count += more; count < whole + ahead; ++count) rows[count] = rows[count - 1];
}

}  // namespace polyattn::POLYATTN_NAMESPACE

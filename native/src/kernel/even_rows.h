// Keys or values that lie evenly, as they do but for pages: where a row lies is computed and not looked up, and so is
// what is fetched meanwhile.
#pragma once

#include "kernel/key_rows.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Row j of a sequence in `x`, of the first head.
template <class T>
POLYATTN_INLINE const T* even_row(const Array& x, const Sequence& q, int64_t j) {
  return static_cast<const T*>(x.data) + q.b * x.batch + (q.kv_base + j) * x.row;
}

template <class T>
struct EvenRows {
  using Element = T;
  static constexpr bool kEven = true;
  const T* first;
  int64_t stride;

  POLYATTN_INLINE const T* operator[](int64_t j) const { return first + j * stride; }
  EvenRows from_row(int64_t j) const { return {(*this)[j], stride}; }
  EvenRows from_column(int64_t column) const { return {first + column, stride}; }
};

// The last rows of some, from row `begin` on, at most a vector of them; the last one stands for those that are not
// there.
template <class T>
class LastRows {
 public:
  LastRows(const EvenRows<T>& rows, int64_t begin, int64_t end) {
    for (int64_t j = 0; j < kRowsAtOnce; ++j) at_[j] = rows[smaller(begin + j, end - 1)];
  }
  LocatedRows<T> located() const { return {at_, 0}; }
  static Ahead<T> nothing() { return {nullptr, 0}; }

 private:
  const T* at_[kRowsAtOnce];
};

// In which order rows are fetched: those of 2^power pages in turn (key_rows.h), as they lie if power is 0.
struct FetchOrder {
  static constexpr int64_t kRows = 8;  // of which each has a place
  int power;
  int64_t step;  // elements from eight rows that are fetched to the next ones
  int64_t place[kRows];

  FetchOrder(int64_t row, int pages) : power(pages), step((kRows >> pages) * row) {
    static_assert(kRows == kMostPages);
    for (int64_t i = 0; i < kRows; ++i) place[i] = in_turn(i, pages) * row;
  }
};

// What is fetched while some keys are met: a row for each, of those that are there.
template <class T>
struct EvenAhead {
  const T* first;
  const FetchOrder* order;
  int64_t count;

  POLYATTN_INLINE bool here(int64_t j) const { return j < count; }
  POLYATTN_INLINE const T* of(int64_t j) const {
    constexpr int64_t kRows = FetchOrder::kRows;
    return first + j / kRows * order->step + order->place[j % kRows];
  }
  EvenAhead where(bool wanted) const { return {first, order, wanted ? count : 0}; }
  EvenAhead from_column(int64_t column) const { return {first + column, order, count}; }
};

// The orders in which rows of an array of T are fetched.
class FetchOrders {
 public:
  FetchOrders(int64_t row, size_t size) : plain_(row, 0), pages_(row, pages_of_block(row * int64_t(size))) {}
  const FetchOrder& of(bool pages) const { return pages ? pages_ : plain_; }

 private:
  FetchOrder plain_, pages_;
};

// Rows that lie evenly, of which `count` are there.
template <class T>
struct EvenRun {
  EvenRows<T> rows;
  int64_t count;
  const FetchOrders* orders;

  EvenAhead<T> nothing() const { return {nullptr, &orders->of(false), 0}; }
  // What is fetched while others are met: rows from number `at` of these on, as they lie.
  EvenAhead<T> from(int64_t at) const { return {rows[at], &orders->of(false), count - at}; }
  // The same by pages: those of the block from `block` on, beginning with its place `at`.
  EvenAhead<T> from_block(int64_t block, int64_t at) const {
    if (count - block < kAheadBlock) return from(block + at);
    const FetchOrder& order = orders->of(true);
    return {rows[block + (at >> order.power)], &order, kAheadBlock - at};
  }
};

// What is fetched while rows from number `place` of `now` on are met, which `next` follow: so many rows `ahead`, or
// the next block by pages, of a whole chunk.
template <class T>
inline EvenAhead<T> ahead_of(const EvenRun<T>& now, const EvenRun<T>& next, int64_t place, bool pages,
                             int64_t ahead) {
  const int64_t within = place % kAheadBlock, at = pages ? place - within + kAheadBlock : place + ahead;
  const int64_t into = at - (pages ? kChunkKeys : round_up(now.count, kRowsAtOnce));
  if (pages) return into < 0 ? now.from_block(at, within) : next.from_block(into, within);
  return into < 0 ? now.from(at) : next.from(into);
}

}  // namespace polyattn::POLYATTN_NAMESPACE

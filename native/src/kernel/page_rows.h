// Keys or values in pages of whole sixteens, for tiles, which take sixteen at a time: where each sixteen begins is
// looked up, and where its rows lie is computed, as is what is fetched meanwhile.
#pragma once

#include "kernel/even_rows.h"

namespace polyattn::POLYATTN_NAMESPACE {

inline bool lie_in_sixteens(const Arguments& a) {
  return a.pages.table != nullptr && a.pages.page_size % kRowsAtOnce == 0;
}

// `at`: where the sixteens of the first head begin; `offset`: elements from there to a head's.
template <class T>
struct PageRows {
  using Element = T;
  static constexpr bool kEven = true;
  const T* const* at;
  int64_t stride, offset;

  POLYATTN_INLINE const T* operator[](int64_t j) const {
    return at[j / kRowsAtOnce] + j % kRowsAtOnce * stride + offset;
  }
  // From row `j` on, which is the first of a sixteen.
  PageRows from_row(int64_t j) const { return {at + j / kRowsAtOnce, stride, offset}; }
};

// What is fetched while some keys are met: a row for each, from number `from` of `rows` on, or of 2^power pages in turn.
template <class T>
struct PageAhead {
  PageRows<T> rows;
  int64_t from;
  int power;
  bool any;

  POLYATTN_INLINE bool here(int64_t) const { return any; }
  POLYATTN_INLINE const T* of(int64_t j) const { return rows[in_turn(from + j, power)]; }
};

// Where the sixteens of keys `begin` to `end` - 1 of `now` begin, and behind these the sixteens of `ahead` rows that are
// worth fetching meanwhile: of `next` from key `after` to `last` - 1, then repeats. `begin`, and `after` if it is below
// `last`, are the first of a sixteen.
template <class T>
inline void locate_sixteens(const Arguments& a, const Array& now, const Array& next, const Sequence& q,
                            int64_t begin, int64_t end, int64_t after, int64_t last, int64_t ahead,
                            const T** at) {
  const int64_t* const table = a.pages.table + q.b * a.pages.row;
  const auto first_of = [&](const Array& x, int64_t j) {
    const int64_t page = j / a.pages.page_size;
    return static_cast<const T*>(x.data) + table[page] * x.batch + (j - page * a.pages.page_size) * x.row;
  };
  int64_t n = 0;
  for (int64_t j = begin; j < end; j += kRowsAtOnce) at[n++] = first_of(now, j);
  const int64_t all = n + ahead / kRowsAtOnce;
  for (int64_t j = after; j < last && n < all; j += kRowsAtOnce) at[n++] = first_of(next, j);
  for (; n < all; ++n) at[n] = at[n - 1];
}

}  // namespace polyattn::POLYATTN_NAMESPACE

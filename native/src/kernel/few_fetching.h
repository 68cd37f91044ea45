// What a chunk of keys is that few rows meet, and what they fetch meanwhile.
#pragma once

#include "kernel/page_rows.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Rows so many ahead, or the next block's, of several pages in turn.
enum class Fetching { nothing, rows, pages };

// A chunk of keys that `count` items meet, from key `begin` to `stop` - 1. It goes on at key `end`, up to `last` - 1.
struct Met {
  int64_t begin, stop, end, last;
  Fetching fetching;
  int count;
};

// What is fetched while rows are met that lie evenly, from number `place` of a chunk on, which `next` follow; `ahead`:
// how many rows ahead.
template <class T>
inline EvenAhead<T> ahead_of(const EvenRun<T>& now, const EvenRun<T>& next, int64_t place, Fetching fetching,
                             int64_t ahead) {
  if (fetching == Fetching::nothing) return now.nothing();
  return ahead_of(now, next, place, fetching == Fetching::pages, ahead);
}

// The same of rows that were looked up one by one; `next`: what a chunk's rows fetch by pages.
template <class T>
inline Ahead<T> ahead_of(const LocatedRows<T>& rows, const void* const* next, int64_t place,
                         Fetching fetching, int64_t ahead) {
  if (fetching == Fetching::nothing) return {nullptr, 0};
  if (fetching == Fetching::rows) return {rows.at + place + ahead, rows.offset};
  return {reinterpret_cast<const T* const*>(next) + place, rows.offset};
}

// The same of rows in sixteens; `power`: of the pages whose rows are fetched in turn.
template <class T>
inline PageAhead<T> ahead_of(const PageRows<T>& rows, int64_t place, Fetching fetching, int64_t ahead,
                             int power) {
  if (fetching != Fetching::pages) return {rows, place + ahead, 0, fetching == Fetching::rows};
  const int64_t within = place % kAheadBlock;
  return {rows.from_row(place - within + kAheadBlock), within, power, true};
}

}  // namespace polyattn::POLYATTN_NAMESPACE

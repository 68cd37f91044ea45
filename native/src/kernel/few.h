// Few query rows (decoding): every key and value is read once, so nothing is packed.
//
// R query rows at a time, up to four, meet keys and values as they lie in memory, from the first byte of a
// row to its last: what a processor fetches ahead by itself is what comes next. Sums along the head dim stay
// spread over the lanes until lanes / R keys are done and one transposition adds them all up; sums of values
// are read and written for each few keys.
//
// bfloat16 that is computed as float32 is read two vectors at once and taken apart into the even and the
// odd elements, which is one instruction for each. Queries are packed so, and sums of values lie so.
#pragma once

#include <type_traits>

#include "kernel/even_rows.h"
#include "kernel/few_codes.h"
#include "kernel/matmul.h"
#include "kernel/pack.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Whether elements are taken apart, and how many of a row.
template <class U, class T>
constexpr bool kApart = U::kValues == 1 && std::is_same_v<T, BF16>;
template <class S, class U, class T>
POLYATTN_INLINE int64_t apart(int64_t dim) {
  return kApart<U, T> ? dim / (2 * S::kLanes) * (2 * S::kLanes) : 0;
}

// A query row as few_scores takes it for keys of C, or few_code_scores.
template <class S, class U, class C, class T>
inline void pack_few(const T* row, int64_t dim, float factor, float* out) {
  const int64_t split = apart<S, U, T>(dim);
  if constexpr (kApart<U, T>) {
    for (int64_t i = 0; i < split; i += 2 * S::kLanes) {
      typename S::Vec even, odd;
      S::take_apart(row + i, even, odd);
      S::store(out + i, S::mul(even, S::fill(factor)));
      S::store(out + i + S::kLanes, S::mul(odd, S::fill(factor)));
    }
  }
  pack_plain<S, U>(row + split, 0, 1, dim - split, factor, out + split, 0);
  if constexpr (kUnitsOfCodes<U, C>) order_by_eights(out, dim);
}

// Calls `each(rows, r)` for an item's rows from `r` on, so many at a time: a type whose value is 4, 2
// or 1. Of the last four there may be fewer. The places of the others hold what an earlier item or call
// left there, NaN as well: only rows that exist are packed, and scratch memory is never cleared. They are
// computed like the rest, into places of their own, and nothing reads what comes out.
template <class Each>
POLYATTN_INLINE void by_few(int rows, Each each) {
  if (rows == 1) return each(std::integral_constant<int, 1>(), 0);
  if (rows == 2) return each(std::integral_constant<int, 2>(), 0);
  for (int r = 0; r < rows; r += 4) each(std::integral_constant<int, 4>(), r);
}

// Two vectors of units of a key, all there: neighbours, or the even and the odd elements.
template <class S, class U, class T>
POLYATTN_INLINE void two_key_units(const T* key, typename S::Vec& a, typename S::Vec& b) {
  if constexpr (kApart<U, T>) {
    S::take_apart(key, a, b);
  } else {
    a = load_units<S, U>(key, int64_t{S::kLanes} * U::kValues);
    b = load_units<S, U>(key + S::kLanes * U::kValues, int64_t{S::kLanes} * U::kValues);
  }
}

// Whether there are registers for the sums of several keys, or of several columns, at once.
template <class S>
constexpr bool kManyRegisters = S::kColumnBlock >= 4;

// Fetches what some units of a row lie in.
template <class S, class U, int kUnits, class T>
POLYATTN_INLINE void fetch_units(const T* p) {
  constexpr int64_t kBytes = int64_t{kUnits} * U::kValues * sizeof(T);
  const char* const at = reinterpret_cast<const char*>(p);
#pragma GCC unroll 8
  for (int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(at + i, 0, S::kFetchHint);
}

// Adds the products of a key's units from `u` on: those that fill no two vectors.
template <class S, class U, class T, int R, int M>
POLYATTN_INLINE void few_last_products(const float* q, int64_t q_row, const T* const (&key)[M], int64_t u,
                                       int64_t dim, typename S::Vec (&sums)[R][M]) {
  for (; u * U::kValues < dim; u += S::kLanes) {
    typename S::Vec last[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      last[m] = load_units<S, U>(key[m] + u * U::kValues, dim - u * U::kValues);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const typename S::Vec x = S::load(q + r * q_row + u);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sums[r][m] = U::template dot<S>(sums[r][m], x, last[m]);
    }
  }
}

// The same out of line: else the loop before it has fewer registers for its sums.
template <class S, class U, class T, int R, int M>
__attribute__((noinline)) void few_last_apart(const float* q, int64_t q_row, const T* const (&key)[M],
                                              int64_t u, int64_t dim, typename S::Vec (&sums)[R][M]) {
  few_last_products<S, U, T, R, M>(q, q_row, key, u, dim, sums);
}

// The products of M keys with R query rows, lane by lane; sums[r][m]. `next`: what is fetched meanwhile. `dim`: a
// number, or one that the compiler knows.
template <class S, class U, class T, int R, int M, class Dim>
POLYATTN_INLINE void few_products(const float* q, int64_t q_row, const T* const (&key)[M],
                                  const T* const (&next)[M], bool fetches, Dim dim,
                                  typename S::Vec (&sums)[R][M]) {
  using Vec = typename S::Vec;
  constexpr int W = S::kLanes;
  Vec odd[R][M];  // twice as many sums wait for half as many products
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sums[r][m] = odd[r][m] = S::zero();
  }
  int64_t u = 0;
  for (; (u + 2 * W) * U::kValues <= dim; u += 2 * W) {
    Vec a[M], b[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      if (fetches) fetch_units<S, U, 2 * W>(next[m] + u * U::kValues);
      two_key_units<S, U>(key[m] + u * U::kValues, a[m], b[m]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec x = S::load(q + r * q_row + u), y = S::load(q + r * q_row + u + W);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        sums[r][m] = U::template dot<S>(sums[r][m], x, a[m]);
        odd[r][m] = U::template dot<S>(odd[r][m], y, b[m]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sums[r][m] = S::add(sums[r][m], odd[r][m]);
  }
  if constexpr (kManyRegisters<S>) {
    few_last_products<S, U, T, R, M>(q, q_row, key, u, dim, sums);
  } else if (u * U::kValues < dim) {
    few_last_apart<S, U, T, R, M>(q, q_row, key, u, dim, sums);
  }
}

// Scores of the lanes / R keys from j on. `kWhole`: all of them are there.
template <class S, class U, int R, bool kWhole, class Rows, class Next, class Dim>
POLYATTN_INLINE void few_score_vector(const float* q, int64_t q_row, const Rows& rows, int64_t j,
                                      int64_t keys, const Next& ahead, Dim dim, float* scores, int64_t row) {
  using T = typename Rows::Element;
  // queries are loaded once for M keys
  constexpr int W = S::kLanes, kKeys = W / R, M = kManyRegisters<S> && kKeys % 2 == 0 ? 2 : 1;
  typename S::Vec sums[W];
#pragma GCC unroll 16
  for (int i = 0; i < kKeys; i += M) {
    typename S::Vec of_keys[R][M];
    const T *key[M], *next[M];
    if (!kWhole && kKeys > 4 && j + i >= keys) {  // the last of a row, or all that there are
#pragma GCC unroll 8
      for (int m = 0; m < M * R; ++m) sums[m % R * kKeys + i + m / R] = S::zero();
      continue;
    }
    const bool fetches = ahead.here(j);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      key[m] = rows[kWhole ? j + i + m : smaller(j + i + m, keys - 1)];
      next[m] = fetches ? ahead.of(j + i + m) : nullptr;
    }
    few_products<S, U, T, R, M>(q, q_row, key, next, fetches, dim, of_keys);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sums[r * kKeys + i + m] = of_keys[r][m];
    }
  }
  float lanes[W];
  S::store(lanes, S::lane_sums(sums));
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) std::memcpy(scores + r * row + j, lanes + r * kKeys, sizeof(float) * kKeys);
}

// scores[r * row + j] = q_r . key_j for R rows and `keys` keys. Scores of up to lanes / R - 1 keys more are written,
// which mean nothing.
template <class S, class U, int R, class Rows, class Next>
inline void few_scores(const float* q, int64_t q_row, const Rows& rows, int64_t keys, const Next& ahead,
                       int64_t dim, float* scores, int64_t row) {
  constexpr int kKeys = S::kLanes / R;
  int64_t j = 0;
  if constexpr (Rows::kEven) {
    const auto whole = [&](auto known) {
      for (; j + kKeys <= keys; j += kKeys)
        few_score_vector<S, U, R, true>(q, q_row, rows, j, keys, ahead, known, scores, row);
    };
    if (R == 1 && kManyRegisters<S> && dim == 64) {
      whole(std::integral_constant<int64_t, 64>());
    } else if (R == 1 && kManyRegisters<S> && dim == 128) {
      whole(std::integral_constant<int64_t, 128>());
    } else {
      whole(dim);
    }
    if (j == keys) return;
    const LastRows last(rows, j, keys);
    few_scores<S, U, R>(q, q_row, last.located(), keys - j, last.nothing(), dim, scores + j, row);
  } else {
    for (; j < keys; j += kKeys)
      few_score_vector<S, U, R, false>(q, q_row, rows, j, keys, ahead, dim, scores, row);
  }
}

// The value rows of one unit's keys. An odd last key has no second row (nullptr): 0 stands for it, which only
// its probability of 0 meets.
template <class T>
struct ValueRows {
  const T *first, *second;
};

// One vector of units, `n` columns of it, from `column` on.
template <class S, class U, class T>
POLYATTN_INLINE typename S::Vec value_units(const ValueRows<T>& rows, int64_t column, int64_t n) {
  constexpr int W = S::kLanes;
  const int some = int(smaller<int64_t>(n, W));
  if constexpr (U::kValues == 1) {
    return some == W ? S::load(rows.first + column) : S::load_some(rows.first + column, some);
  } else {
    return S::interleave(rows.first + column, rows.second ? rows.second + column : nullptr, some);
  }
}

// Two vectors of units, all there: of neighbouring columns, or of even and odd ones.
template <class S, class U, class T>
POLYATTN_INLINE void two_value_units(const ValueRows<T>& rows, int64_t column, typename S::Vec& a,
                                     typename S::Vec& b) {
  constexpr int W = S::kLanes;
  if constexpr (kApart<U, T>) {
    S::take_apart(rows.first + column, a, b);
  } else if constexpr (U::kValues > 1) {
    S::interleave_two(rows.first + column, rows.second + column, a, b);
  } else {
    a = S::load(rows.first + column);
    b = S::load(rows.first + column + W);
  }
}

// sums[r * columns + c] += sum_j p[r * p_row + j] value_j[c] for R rows and N units of keys. `whole`: no row
// lacks a second one.
// `from`: the first key's number among those that are fetched for.
template <class S, class U, class T, int R, int N, class Next>
POLYATTN_INLINE void few_value_rows(const float* p, int64_t p_row, const ValueRows<T> (&rows)[N], bool whole,
                                    const Next& ahead, int64_t from, int64_t dim, float* sums,
                                    int64_t columns) {
  using Vec = typename S::Vec;
  constexpr int W = S::kLanes;
  Vec factor[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) factor[r][n] = S::fill(p[r * p_row + n]);
  }
  int64_t c = 0;
  for (; whole && c + 2 * W <= dim; c += 2 * W) {
    if (ahead.here(from)) {
#pragma GCC unroll 8
      for (int n = 0; n < N * U::kValues; ++n) __builtin_prefetch(ahead.of(from + n) + c, 0, S::kFetchHint);
    }
    Vec a[N], b[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) two_value_units<S, U>(rows[n], c, a[n], b[n]);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float* to = sums + r * columns + c;
      Vec x = S::load(to), y = S::load(to + W);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        x = U::template dot<S>(x, factor[r][n], a[n]);
        y = U::template dot<S>(y, factor[r][n], b[n]);
      }
      S::store(to, x);
      S::store(to + W, y);
    }
  }
  for (; c < dim; c += W) {
    Vec a[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) a[n] = value_units<S, U>(rows[n], c, dim - c);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float* to = sums + r * columns + c;
      Vec x = S::load(to);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) x = U::template dot<S>(x, factor[r][n], a[n]);
      S::store(to, x);
    }
  }
}

// sums[r * columns + c] += sum_j p[r * p_row + j] value_j[c] for R rows and V vectors of columns, whose sums stay
// in registers. `keys` is a multiple of a unit's.
template <class S, class U, int R, int V, class Rows, class Next>
POLYATTN_INLINE void few_value_columns(const float* p, int64_t p_row, const Rows& values, int64_t keys,
                                       const Next& ahead, float* sums, int64_t columns) {
  using Vec = typename S::Vec;
  using T = typename Rows::Element;
  constexpr int W = S::kLanes, A = kUnitsOfCodes<U, T> ? 4 : 2;
  Vec x[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) x[r][v] = S::load(sums + r * columns + v * W);
    if constexpr (kUnitsOfCodes<U, T>) turn_columns<S>(x[r]);
  }
  for (int64_t j = 0; j < keys; j += U::kValues) {
    const ValueRows<T> rows{values[j], U::kValues > 1 ? values[j + 1] : nullptr};
    if (ahead.here(j)) {
#pragma GCC unroll 2
      for (int n = 0; n < U::kValues; ++n) fetch_units<S, FloatUnit, V * W>(ahead.of(j + n));
    }
    Vec factor[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) factor[r] = S::fill(p[r * p_row + j / U::kValues]);
#pragma GCC unroll 4
    for (int v = 0; v < V; v += A) {
      Vec some[A];
      if constexpr (A == 4) {
        S::interleave_four(rows.first + v * W, rows.second + v * W, some);
      } else {
        two_value_units<S, U>(rows, v * W, some[0], some[1]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < A; ++n) x[r][v + n] = U::template dot<S>(x[r][v + n], factor[r], some[n]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    if constexpr (kUnitsOfCodes<U, T>) turn_columns<S>(x[r]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) S::store(sums + r * columns + v * W, x[r][v]);
  }
}

// The same for any number of keys and columns.
template <class S, class U, int R, class Rows, class Next>
inline void few_values(const float* p, int64_t p_row, const Rows& values, int64_t keys, const Next& ahead,
                       int64_t dim, float* sums, int64_t columns) {
  using T = typename Rows::Element;
  constexpr int kAtOnce = R > 2 && !kManyRegisters<S> ? 2 : R, N = 4;
  const int64_t whole = keys / U::kValues * U::kValues;
  int64_t done = 0;  // columns
  if constexpr (kManyRegisters<S>) {
    const auto columns_of = [&](auto vectors) {
      constexpr int V = vectors.value;
      for (; done + V * S::kLanes <= dim; done += V * S::kLanes) {
        few_value_columns<S, U, R, V>(p, p_row, values.from_column(done), whole, ahead.from_column(done),
                                      sums + done, columns);
      }
    };
    if constexpr (R < 4) columns_of(std::integral_constant<int, 8>());
    columns_of(std::integral_constant<int, 4>());
  }
  int64_t j = done == dim ? whole : 0;  // an odd last key is met by all columns
  for (; done < dim && j + N * U::kValues <= keys; j += N * U::kValues) {
    ValueRows<T> rows[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const int64_t at = j + n * U::kValues;
      rows[n] = {values[at] + done, U::kValues > 1 ? values[at + 1] + done : nullptr};
    }
    for (int r = 0; r < R; r += kAtOnce) {
      few_value_rows<S, U, T, kAtOnce, N>(p + r * p_row + j / U::kValues, p_row, rows, true,
                                          ahead.from_column(done).where(r == 0), j, dim - done,
                                          sums + r * columns + done, columns);
    }
  }
  for (; j < keys; j += U::kValues) {
    const bool pair = U::kValues > 1 && j + 1 < keys, odd = U::kValues > 1 && !pair;
    const int64_t from = odd ? 0 : done;
    const ValueRows<T> rows[1] = {{values[j] + from, pair ? values[j + 1] + from : nullptr}};
    few_value_rows<S, U, T, R, 1>(p + j / U::kValues, p_row, rows, !odd, ahead.where(false), j, dim - from,
                                  sums + from, columns);
  }
}

}  // namespace polyattn::POLYATTN_NAMESPACE

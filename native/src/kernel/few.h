// Few query rows (decoding): every key and value is read once, so nothing is packed.
//
// R query rows at a time, up to four, meet keys as they lie in memory; the sums along the head dim
// stay spread over the lanes until lanes / R keys are done and one transposition adds them all up.
#pragma once

#include <type_traits>

#include "kernel/matmul.h"
#include "kernel/pack.h"

namespace polyattn::POLYATTN_NAMESPACE {

constexpr int kFewRows = 8;  // up to here packing costs more than it saves
constexpr int64_t kAheadRows = 64;
constexpr int kFewHint = 1;

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

// scores[r * row + j] = q_r . key_j for R rows and `keys` keys.
template <class S, class U, class T, int R, class Row>
inline void few_scores(const float* q, int64_t q_row, Row key_of, int64_t keys, int64_t dim, int64_t ahead,
                       float* scores, int64_t row) {
  constexpr int W = S::kLanes, kKeys = W / R;
  const int64_t units = blocks_of(dim, U::kValues);
  for (int64_t j = 0; j < keys; j += kKeys) {
    const T* key[kKeys];
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) {
      key[i] = key_of(smaller(j + i, keys - 1));
    }
    typename S::Vec sums[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) sums[i] = S::zero();
    int64_t u = 0;
    for (; (u + W) * U::kValues <= dim; u += W) {
      typename S::Vec k[kKeys];
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        k[i] = load_units<S, U>(key[i] + u * U::kValues, int64_t{W} * U::kValues);
        __builtin_prefetch(key[i] + ahead + u * U::kValues, 0, kFewHint);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const typename S::Vec x = S::load(q + r * q_row + u);
#pragma GCC unroll 16
        for (int i = 0; i < kKeys; ++i)
          sums[r * kKeys + i] = U::template dot<S>(sums[r * kKeys + i], x, k[i]);
      }
    }
    if (u < units) {
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        const typename S::Vec k = load_units<S, U>(key[i] + u * U::kValues, dim - u * U::kValues);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
          sums[r * kKeys + i] = U::template dot<S>(sums[r * kKeys + i], S::load(q + r * q_row + u), k);
      }
    }
    float lanes[W];
    S::store(lanes, S::lane_sums(sums));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) std::memcpy(scores + r * row + j, lanes + r * kKeys, sizeof(float) * kKeys);
  }
}

// A vector of units from the value rows of one unit's keys, `n` columns of it. An odd last key has no
// second row (nullptr): 0 stands for it, which only its probability of 0 meets.
template <class S, class U, class T>
POLYATTN_INLINE typename S::Vec value_units(const T* first, const T* second, int n) {
  if constexpr (U::kValues == 1) {
    return n >= S::kLanes ? S::load(first) : S::load_some(first, n);
  } else {
    return S::interleave(first, second, n);
  }
}

// sums[r * columns + c] += sum_j p[r * p_row + j] value_j[c] for R rows, C vectors from `column` on.
template <class S, class U, class T, int R, int C, class Row>
POLYATTN_INLINE void few_value_columns(const float* p, int64_t p_row, Row value_of, int64_t keys,
                                       int64_t column, int64_t dim, int64_t ahead, float* out,
                                       int64_t columns) {
  constexpr int W = S::kLanes;
  typename S::Vec sums[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[r][c] = S::load(out + r * columns + column + c * W);
  }
  const bool whole = column + C * W <= dim;
  for (int64_t j = 0; j < keys; j += U::kValues) {
    const T* first = value_of(j) + column;
    const T* second = U::kValues > 1 && j + 1 < keys ? value_of(j + 1) + column : nullptr;
    if (ahead) prefetch_row<kFewHint>(first + ahead, C * W);
    if (ahead && second) prefetch_row<kFewHint>(second + ahead, C * W);
    typename S::Vec v[C];
    if (whole && (U::kValues == 1 || second)) {
      if constexpr (U::kValues > 1 && C % 2 == 0) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c += 2) S::interleave_two(first + c * W, second + c * W, v[c], v[c + 1]);
      } else {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) v[c] = value_units<S, U>(first + c * W, second + (second ? c * W : 0), W);
      }
    } else {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const int n = int(larger<int64_t>(smaller<int64_t>(dim - column - c * W, W), 0));
        v[c] = value_units<S, U>(first + c * W, second ? second + c * W : nullptr, n);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const typename S::Vec x = S::fill(p[r * p_row + j / U::kValues]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[r][c] = U::template dot<S>(sums[r][c], x, v[c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) S::store(out + r * columns + column + c * W, sums[r][c]);
  }
}

template <class S, class U, class T, int R, class Row>
inline void few_values(const float* p, int64_t p_row, Row value_of, int64_t keys, int64_t dim, int64_t ahead,
                       float* out, int64_t columns) {
  // the fewer rows, the more vectors: as many sums as it takes to wait for none
  constexpr int kMost = (S::kColumnBlock >= 4 ? 4 : 2) * 4 / R, C = kMost > 8 ? 8 : kMost;
  int64_t column = 0;
  for (; column + C * S::kLanes <= columns; column += C * S::kLanes)
    few_value_columns<S, U, T, R, C>(p, p_row, value_of, keys, column, dim, ahead, out, columns);
  for (; R < 4 && column + C / 2 * S::kLanes <= columns; column += C / 2 * S::kLanes)
    few_value_columns<S, U, T, R, C / 2>(p, p_row, value_of, keys, column, dim, ahead, out, columns);
  for (; column < columns; column += S::kLanes)
    few_value_columns<S, U, T, R, 1>(p, p_row, value_of, keys, column, dim, ahead, out, columns);
}

}  // namespace polyattn::POLYATTN_NAMESPACE

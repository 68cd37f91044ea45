// Few query rows (decoding): every key and value is read once, so nothing is packed.
//
// Four query rows at a time meet keys as they lie in memory; the sums along the head dim stay
// spread over the lanes until lanes / 4 keys are done and one transposition adds them all up.
#pragma once

#include "kernel/matmul.h"
#include "kernel/pack.h"

namespace polyattn::POLYATTN_NAMESPACE {

constexpr int kFewRows = 8;   // up to here packing costs more than it saves
constexpr int kQuad = 4;      // rows at a time
constexpr int64_t kAheadRows = 64;
constexpr int kFewHint = 1;

// scores[r * row + j] = q_r . key_j for 4 rows and `keys` keys. Of an item's rows there may be fewer:
// the others are computed from whatever their place in `q` holds, and their scores are not read.
template <class S, class U, class T, class Row>
inline void few_scores(const float* q, int64_t q_row, Row key_of, int64_t keys, int64_t dim, int64_t ahead,
                       float* scores, int64_t row) {
  constexpr int W = S::kLanes, kKeys = W / kQuad;
  const int64_t units = blocks_of(dim, U::kValues);
  for (int64_t j = 0; j < keys; j += kKeys) {
    const T* key[kKeys];
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) {
      key[i] = key_of(smaller(j + i, keys - 1));
    }
    typename S::Vec sums[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) sums[i] = S::zero();
    int64_t u = 0;
    for (; (u + W) * U::kValues <= dim; u += W) {
      typename S::Vec k[kKeys];
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) {
        k[i] = load_units<S, U>(key[i] + u * U::kValues, int64_t{W} * U::kValues);
        __builtin_prefetch(key[i] + ahead + u * U::kValues, 0, kFewHint);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kQuad; ++r) {
        const typename S::Vec x = S::load(q + r * q_row + u);
#pragma GCC unroll 4
        for (int i = 0; i < kKeys; ++i) sums[r * kKeys + i] = U::template dot<S>(sums[r * kKeys + i], x, k[i]);
      }
    }
    if (u < units) {
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) {
        const typename S::Vec k = load_units<S, U>(key[i] + u * U::kValues, dim - u * U::kValues);
#pragma GCC unroll 4
        for (int r = 0; r < kQuad; ++r)
          sums[r * kKeys + i] = U::template dot<S>(sums[r * kKeys + i], S::load(q + r * q_row + u), k);
      }
    }
    float lanes[W];
    S::store(lanes, S::lane_sums(sums));
#pragma GCC unroll 4
    for (int r = 0; r < kQuad; ++r) std::memcpy(scores + r * row + j, lanes + r * kKeys, sizeof(float) * kKeys);
  }
}

// A vector of units from the value rows of one unit's keys, `n` columns of it; a second row that is
// absent (nullptr) counts as 0.
template <class S, class U, class T>
POLYATTN_INLINE typename S::Vec value_units(const T* first, const T* second, int n) {
  if constexpr (U::kValues == 1) {
    return n >= S::kLanes ? S::load(first) : S::load_some(first, n);
  } else {
    return S::interleave(first, second, n);
  }
}

// sums[r * columns + c] += sum_j p[r * p_row + j] value_j[c] for 4 rows, C vectors from `column` on. As
// above, rows that are not the item's get sums that are not read.
template <class S, class U, class T, int C, class Row>
POLYATTN_INLINE void few_value_columns(const float* p, int64_t p_row, Row value_of, int64_t keys, int64_t column,
                                       int64_t dim, int64_t ahead, float* out, int64_t columns) {
  constexpr int W = S::kLanes, R = kQuad;
  typename S::Vec sums[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
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
#pragma GCC unroll 4
        for (int c = 0; c < C; c += 2) S::interleave_two(first + c * W, second + c * W, v[c], v[c + 1]);
      } else {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) v[c] = value_units<S, U>(first + c * W, second + (second ? c * W : 0), W);
      }
    } else {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const int n = int(larger<int64_t>(smaller<int64_t>(dim - column - c * W, W), 0));
        v[c] = value_units<S, U>(first + c * W, second ? second + c * W : nullptr, n);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const typename S::Vec x = S::fill(p[r * p_row + j / U::kValues]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[r][c] = U::template dot<S>(sums[r][c], x, v[c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) S::store(out + r * columns + column + c * W, sums[r][c]);
  }
}

template <class S, class U, class T, class Row>
inline void few_values(const float* p, int64_t p_row, Row value_of, int64_t keys, int64_t dim, int64_t ahead,
                       float* out, int64_t columns) {
  constexpr int C = S::kColumnBlock >= 4 ? 4 : 2;
  int64_t column = 0;
  for (; column + C * S::kLanes <= columns; column += C * S::kLanes)
    few_value_columns<S, U, T, C>(p, p_row, value_of, keys, column, dim, ahead, out, columns);
  for (; column < columns; column += S::kLanes)
    few_value_columns<S, U, T, 1>(p, p_row, value_of, keys, column, dim, ahead, out, columns);
}

}  // namespace polyattn::POLYATTN_NAMESPACE

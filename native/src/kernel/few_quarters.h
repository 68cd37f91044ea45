// Two or four query rows that lie side by side in a vector: a key's elements are repeated for them, so that one
// product serves all rows, and what is summed across lanes is a quarter of a vector.
//
// (Each row in vectors of its own needs the same products, and five times the shuffles for their sums.)
#pragma once

#include "kernel/key_rows.h"
#include "kernel/pack.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Whether keys are read as they are stored, by an instruction set that repeats them.
template <class S, class U, class T>
constexpr bool kRepeats =
    sizeof(T) * U::kValues == sizeof(float) && requires(const T* p) { S::template repeated<4>(p); };

constexpr int kRepeatedKeys = 8;  // whose sums stay in registers

// Row r of an item of `rows`: of each few units those of the first row, then those of the next.
template <class S, class U, class T>
inline void pack_beside(const T* row, int64_t dim, float factor, float* out, int64_t q_units, int r,
                        int rows) {
  float own[kMaxHeadDim + S::kLanes];
  pack_plain<S, U>(row, 0, 1, dim, factor, own, 0);
  const auto spread = [&](auto together) {
    constexpr int kRows = together.value, kPart = S::kLanes / kRows;
    float* const to = out + r / kRows * kRows * q_units + r % kRows * kPart;
    for (int64_t u = 0; u * U::kValues < dim; u += kPart)
      std::memcpy(to + u * kRows, own + u, sizeof(float) * kPart);
  };
  rows == 2 ? spread(std::integral_constant<int, 2>()) : spread(std::integral_constant<int, 4>());
}

// sums[m] += the products of key m with the R rows, from its first element to its last; `next`: what is fetched
// meanwhile, if anything.
template <class S, class U, class T, int R>
POLYATTN_INLINE void few_repeated_products(const float* q, const T* const (&key)[kRepeatedKeys],
                                           const T* const* next, int64_t dim,
                                           typename S::Vec (&sums)[kRepeatedKeys]) {
  constexpr int W = S::kLanes, M = kRepeatedKeys, kWide = W / R * U::kValues, kLine = 64 / sizeof(T);
  const auto products = [&](int64_t h, auto keys) {
    const typename S::Vec x = S::load(q + h * R / U::kValues);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sums[m] = U::template dot<S>(sums[m], x, keys(m));
  };
  int64_t h = 0;
  for (; h + kLine <= dim; h += kLine) {
    if (next) {
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) __builtin_prefetch(next[m] + h, 0, S::kFetchHint);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kLine; i += kWide)
      products(h + i, [&](int m) { return S::template repeated<R>(key[m] + h + i); });
  }
  for (; h < dim; h += kWide) {
    const int some = int(smaller<int64_t>(dim - h, kWide));
    products(h, [&](int m) { return S::template some_repeated<R>(key[m] + h, some); });
  }
}

// scores[r * row + j] = q_r . key_j for R rows and `keys` keys; see few_scores. Whole vectors of keys are read: where
// these do not lie evenly there are rows behind the last.
template <class S, class U, int R, class Rows, class Next>
inline void few_repeated_scores(const float* q, const Rows& rows, int64_t keys, const Next& ahead,
                                int64_t dim, float* scores, int64_t row) {
  using Vec = typename S::Vec;
  using T = typename Rows::Element;
  constexpr int W = S::kLanes, M = kRepeatedKeys;
  static_assert(W == 2 * M);
  int64_t j = 0;
  for (; Rows::kEven ? j + W <= keys : j < keys; j += W) {
    Vec quarters[4];  // of four keys each
    for (int i = 0; i < 2; ++i) {
      const T *key[M], *next[M];
      Vec sums[M];
      const bool fetches = ahead.here(j + i * M);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        key[m] = rows[j + i * M + m];
        next[m] = fetches ? ahead.of(j + i * M + m) : nullptr;
        sums[m] = S::zero();
      }
      few_repeated_products<S, U, T, R>(q, key, fetches ? next : nullptr, dim, sums);
      quarters[2 * i] = S::quarter_sums(sums[0], sums[1], sums[2], sums[3]);
      quarters[2 * i + 1] = S::quarter_sums(sums[4], sums[5], sums[6], sums[7]);
    }
    S::turn_quarters(quarters);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      S::store(scores + r * row + j, R == 4 ? quarters[r] : S::add(quarters[2 * r], quarters[2 * r + 1]));
  }
  if constexpr (Rows::kEven) {
    if (j == keys) return;
    const LastRows last(rows, j, keys);
    few_repeated_scores<S, U, R>(q, last.located(), keys - j, last.nothing(), dim, scores + j, row);
  }
}

}  // namespace polyattn::POLYATTN_NAMESPACE

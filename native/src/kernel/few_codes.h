// Few query rows against keys that are codes of one byte: each row by itself, 64 codes at a time.
//
// What puts bytes together to numbers of 16 bits takes the first eight of each sixteen, and then the last eight:
// queries are packed in that order. The sums of four rows or keys are joined as soon as they are there. The order of
// 64 columns of values is another one, too, and is put right at the end, by turn_quarters().
#pragma once

#include <type_traits>

#include "kernel/even_rows.h"
#include "kernel/matmul.h"

namespace polyattn::POLYATTN_NAMESPACE {

constexpr int64_t kEights = 64;  // codes that become two vectors

// Whether units of two are made from codes.
template <class U, class T>
constexpr bool kUnitsOfCodes = U::kValues > 1 && sizeof(T) == 1;

// A row's numbers of 16 bits in that order, as many as are 64 at a time; the others stay as they are.
inline void order_by_eights(float* row, int64_t dim) {
  char* at = reinterpret_cast<char*>(row);
  for (int64_t c = 0; c + kEights <= dim; c += kEights, at += 2 * kEights) {
    char plain[2 * kEights];
    std::memcpy(plain, at, sizeof plain);
    for (int i = 0; i < 8; ++i) std::memcpy(at + i % 2 * kEights + i / 2 * 16, plain + i * 16, 16);
  }
}

// Sums of 64 columns each from one order to the other.
template <class S, int V>
POLYATTN_INLINE void turn_columns(typename S::Vec (&x)[V]) {
#pragma GCC unroll 2
  for (int v = 0; v < V; v += 4) {
    typename S::Vec four[4] = {x[v], x[v + 1], x[v + 2], x[v + 3]};
    S::turn_quarters(four);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) x[v + n] = four[n];
  }
}

// Codes of fp8 as units of two bfloat16.
template <class S, class U>
struct UnitSums {
  using Sum = typename S::Vec;
  static POLYATTN_INLINE Sum nothing() { return S::zero(); }
  static POLYATTN_INLINE Sum query(const float* q) { return S::load(q); }
  static POLYATTN_INLINE Sum some(const F8* key, int n) { return S::unit_codes(key, n); }
  static POLYATTN_INLINE void two(const F8* key, Sum& a, Sum& b) { S::units_by_eights(key, a, b); }
  static POLYATTN_INLINE Sum dot(Sum sum, Sum a, Sum b) { return U::template dot<S>(sum, a, b); }
  static POLYATTN_INLINE Sum add(Sum a, Sum b) { return S::add(a, b); }
  POLYATTN_INLINE Sum joined(Sum x) const { return x; }
};

// sums[r * step] = the products of a key with the r-th of R rows, lane by lane.
template <class P, int R, class C, class Dim>
POLYATTN_INLINE void few_code_products(const float* q, int64_t q_row, const C* key, Dim dim,
                                       typename P::Sum* sums, int step) {
  using Sum = typename P::Sum;
  Sum odd = P::nothing();  // one row alone would wait for its sums
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sums[r * step] = P::nothing();
  int64_t h = 0;
  const auto meet = [&](int r, Sum codes, int64_t from) {
    Sum& sum = R == 1 && from % kEights != 0 ? odd : sums[r * step];
    sum = P::dot(sum, P::query(q + r * q_row + from / 2), codes);
  };
  for (; h + kEights <= dim; h += kEights) {
    Sum a, b;
    P::two(key + h, a, b);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) meet(r, a, h);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) meet(r, b, h + kEights / 2);
  }
  for (; h < dim; h += kEights / 2) {
    const Sum some = P::some(key + h, int(smaller<int64_t>(dim - h, kEights / 2)));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) meet(r, some, h);
  }
  if (R == 1) sums[0] = P::add(sums[0], odd);
}

// Calls put(r, j, scores) for R rows and each vector of keys from j on, which all are read: where they do not lie
// evenly there are rows behind the last. `dim`: a number, or one that the compiler knows.
template <class S, int R, class P, class Rows, class Next, class Dim, class Put>
POLYATTN_INLINE void few_code_vectors(const P& products, const float* q, int64_t q_row, const Rows& rows,
                                      int64_t& j, int64_t keys, const Next& ahead, Dim dim, Put put) {
  constexpr int W = S::kLanes, M = 4 / R;  // keys of four sums
  static_assert(W == 16);
  for (; Rows::kEven ? j + W <= keys : j < keys; j += W) {
    typename S::Vec found[R];
    for (int i = 0; i < R; ++i) {
      typename P::Sum groups[4];
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) {
        typename P::Sum sums[4];  // of the first row with M keys, then of the next one
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          const int64_t at = j + i * (W / R) + g * M + m;
          if (ahead.here(at)) {
            const auto* const next = ahead.of(at);
            for (int64_t h = 0; h < dim; h += 64) __builtin_prefetch(next + h, 0, S::kFetchHint);
          }
          few_code_products<P, R>(q, q_row, rows[at], dim, sums + m, M);
        }
        groups[g] = S::quarter_sums(sums[0], sums[1], sums[2], sums[3]);
      }
      found[i] = products.joined(S::sum_quarters(groups));
    }
    if constexpr (R > 1) S::unzip(found);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) put(r, j, found[r]);
  }
}

template <class S, int R, class P, class Rows, class Next, class Put>
inline void few_code_scores(const P& products, const float* q, int64_t q_row, const Rows& rows, int64_t keys,
                            const Next& ahead, int64_t dim, Put put) {
  int64_t j = 0;
  const auto whole = [&](auto known) {
    few_code_vectors<S, R>(products, q, q_row, rows, j, keys, ahead, known, put);
  };
  if (dim == 64) {  // queries stay in registers
    whole(std::integral_constant<int64_t, 64>());
  } else if (dim == 128) {
    whole(std::integral_constant<int64_t, 128>());
  } else {
    whole(dim);
  }
  if constexpr (Rows::kEven) {
    if (j == keys) return;
    const LastRows last(rows, j, keys);
    int64_t more = 0;
    few_code_vectors<S, R>(products, q, q_row, last.located(), more, keys - j, last.nothing(), dim,
                           [&](int r, int64_t i, typename S::Vec x) { put(r, j + i, x); });
  }
}

}  // namespace polyattn::POLYATTN_NAMESPACE

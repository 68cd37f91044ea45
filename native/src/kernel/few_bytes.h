// Few query rows against codes of int8, by products of bytes that are summed as integers.
//
// The other operand is rounded to 16 bits, as two planes of bytes: x = factor * (256 * high + low), the largest
// of its row 127 * 256. Of queries a row is a query, of probabilities what a row has in up to kCodedTurn keys.
// Codes c are met as c + 128, which the instruction wants unsigned; what that adds is taken off the sums.
//
// Each instruction meets a key's codes, repeated, with both planes of one or two rows: so that nothing is
// transposed but sums, and these once for eight keys.
#pragma once

#include "kernel/key_rows.h"
#include "kernel/pack.h"
#include "kernel/quantised.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Whether an instruction set multiplies bytes.
template <class S>
concept MultipliesBytes = requires { typename S::Ints; };

constexpr float kPlanes = 127 * 256;
constexpr int kOfPlanes = 4;            // codes in a lane
constexpr int64_t kMostOfPlanes = 512;  // whose joined sums 32 bits hold: 128 * 127 * 256 * 512 < 2^31

// What turns sums of products with a row's planes into numbers, and what is added to the sums before.
struct Planes {
  float factor;
  int32_t start;
};

// Rounds n numbers to two planes; bytes up to a whole vector more are 0.
template <class S>
inline Planes split_planes(const float* x, int64_t n, int8_t* high, int8_t* low) {
  constexpr int W = S::kLanes;
  const int64_t whole = n / W * W;
  const auto at = [&](int64_t i) { return i < whole ? S::load(x + i) : S::load_some(x + i, int(n - i)); };
  typename S::Ints most = S::ints(0);
  for (int64_t i = 0; i < n; i += W) most = S::larger_size(most, at(i));
  const float largest = S::largest_size(most), step = largest / kPlanes;
  if (!(largest < kInfinity)) {  // all sums of such a row are NaN; no integer stands for its numbers
    const size_t bytes = size_t(blocks_of(n, W) * W);
    std::memset(high, 0, bytes);
    std::memset(low, 0, bytes);
    return {__builtin_nanf(""), 0};
  }
  // a smaller step has no reciprocal; what is as small is 0
  const float inverse = step >= 0x1p-126f ? 1.0f / step : 0.0f;
  typename S::Ints sum = S::ints(0);
  for (int64_t i = 0; i < n; i += W) S::split(S::mul(at(i), S::fill(inverse)), high + i, low + i, sum);
  return {step, -128 * S::sum_ints(sum)};
}

// Four query rows as few_byte_scores takes them, in the place of four rows of `units` floats: of eight columns
// the high bytes and the low bytes of a row, then those of the next; the rows' Planes are at the end.
constexpr int kPlaneRows = 4, kPlaneColumns = 8;
constexpr int64_t kPlaneBlock = 2 * kPlaneRows * kPlaneColumns;
constexpr int64_t kPlanePadding = 32;  // columns, of which those past the head dim are 0

template <class S>
inline void pack_bytes(const float* row, int64_t dim, float factor, float* out, int64_t units, int r) {
  float padded[kMaxHeadDim];
  pack_plain<S, FloatUnit>(row, 0, 1, dim, 1.0f, padded, 0);
  constexpr int64_t kMost = kMaxHeadDim + kPlanePadding;
  int8_t high[kMost], low[kMost];
  const int64_t columns = round_up(dim, kPlanePadding);
  Planes p = split_planes<S>(padded, dim, high, low);
  p.factor *= factor;
  for (int64_t c = round_up(dim, S::kLanes); c < columns; ++c) high[c] = low[c] = 0;
  char* const block = reinterpret_cast<char*>(out + r / kPlaneRows * kPlaneRows * units);
  const int place = r % kPlaneRows;
  for (int64_t c = 0; c < columns; c += kPlaneColumns) {
    char* const to = block + c / kPlaneColumns * kPlaneBlock + place * 2 * kPlaneColumns;
    std::memcpy(to, high + c, kPlaneColumns);
    std::memcpy(to + kPlaneColumns, low + c, kPlaneColumns);
  }
  char* const end = block + kPlaneRows * units * int64_t{sizeof(float)};
  std::memcpy(end - (kPlaneRows - place) * int64_t{sizeof p}, &p, sizeof p);
}

inline Planes planes_of(const char* block, int64_t units, int r) {
  Planes p;
  const char* const end = block + kPlaneRows * units * int64_t{sizeof(float)};
  std::memcpy(&p, end - (kPlaneRows - r) * int64_t{sizeof p}, sizeof p);
  return p;
}

// Rows that share a vector of planes, and keys whose sums stay in registers.
template <int R>
constexpr int kTogetherRows = R < 2 ? 1 : 2;
constexpr int kByteKeys = 8;

// sums[g] = those of the g-th rows with eight keys, as S::sum_keys has them.
template <class S, int R>
POLYATTN_INLINE void few_byte_products(const typename S::Ints (*query)[R / kTogetherRows<R>],
                                       const int8_t* const (&key)[kByteKeys], int64_t dim,
                                       typename S::Ints (&sums)[R / kTogetherRows<R>]) {
  using Ints = typename S::Ints;
  constexpr int P = kTogetherRows<R>, G = R / P, M = kByteKeys, kCodes = 32 / P;
  Ints lanes[G][M];
#pragma GCC unroll 2
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) lanes[g][m] = S::ints(0);
  }
  int64_t h = 0;
  for (; h + kCodes <= dim; h += kCodes, ++query) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Ints codes = S::template repeated_bytes<P>(key[m] + h);
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) lanes[g][m] = S::dot_bytes(lanes[g][m], codes, (*query)[g]);
    }
  }
  if (h < dim) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Ints codes = S::template some_repeated_bytes<P>(key[m] + h, int(dim - h));
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) lanes[g][m] = S::dot_bytes(lanes[g][m], codes, (*query)[g]);
    }
  }
#pragma GCC unroll 2
  for (int g = 0; g < G; ++g) sums[g] = S::sum_keys(lanes[g]);
}

// scores[r * row + j] = q_r . code_j * scales[j] for R rows and `keys` keys; see few_scores. Whole vectors of
// keys are read: there are rows behind the last.
template <class S, int R>
inline void few_byte_scores(const float* q, int64_t units, const int8_t* const* keys_at, int64_t offset,
                            int64_t keys, Ahead<int8_t> ahead, int64_t dim, const float* scales,
                            float* scores, int64_t row) {
  using Ints = typename S::Ints;
  constexpr int W = S::kLanes, P = kTogetherRows<R>, G = R / P, M = kByteKeys, kCodes = 32 / P;
  static_assert(W == 2 * M);
  const char* const block = reinterpret_cast<const char*>(q);
  Ints query[(kMaxHeadDim + kPlanePadding) / kCodes][G];
  for (int64_t h = 0; h < dim; h += kCodes) {
    for (int g = 0; g < G; ++g) {
      const char* const from = block + h / kPlaneColumns * kPlaneBlock + g * P * 2 * kPlaneColumns;
      query[h / kCodes][g] = S::template query_planes<P>(from);
    }
  }
  Planes planes[R];
  for (int r = 0; r < R; ++r) planes[r] = planes_of(block, units, r);
  for (int64_t j = 0; j < keys; j += W) {
    Ints sums[2][G];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const int8_t* key[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        key[m] = keys_at[j + i * M + m] + offset;
        if (!ahead.here()) continue;
        const int8_t* const next = ahead.of(j + i * M + m);
        for (int64_t h = 0; h < dim; h += 64) __builtin_prefetch(next + h, 0, S::kFetchHint);
      }
      few_byte_products<S, R>(query, key, dim, sums[i]);
    }
    const typename S::Vec scale = S::load(scales + j);
    const auto put = [&](int r, Ints sum) {
      const typename S::Vec factor = S::mul(scale, S::fill(planes[r].factor));
      const typename S::Vec whole = S::floats(S::add_ints(sum, S::ints(planes[r].start)));
      S::store(scores + r * row + j, S::mul(whole, factor));
    };
#pragma GCC unroll 2
    for (int g = 0; g < G; ++g) {
      Ints first, second;
      S::part_keys(sums[0][g], sums[1][g], first, second);
      put(g * P, P == 1 ? S::add_ints(first, second) : first);
      if (P == 2) put(g * P + 1, second);
    }
  }
}

// Adds the products of up to 64 columns, V vectors of them at a time, in the order of S::interleave_bytes.
template <class S, int R, bool kWhole>
POLYATTN_INLINE void few_byte_columns(const int8_t (&high)[R][kCodedTurn], const int8_t (&low)[R][kCodedTurn],
                                      const Planes (&planes)[R], const int8_t* const* values_at,
                                      Ahead<int8_t> ahead, int64_t offset, int64_t keys, int64_t columns,
                                      float* sums, int64_t row) {
  using Vec = typename S::Vec;
  using Ints = typename S::Ints;
  constexpr int V = R > 2 ? 2 : 4;  // there are registers for sums of 2 x R x V
  Vec found[R][4];
#pragma GCC unroll 2
  for (int first = 0; first < 4; first += V) {
    Ints h[R][V], l[R][V];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < V; ++n) {
        h[r][n] = S::ints(0);
        l[r][n] = S::ints(planes[r].start);
      }
    }
    for (int64_t j = 0; j < keys; j += kOfPlanes) {
      const int8_t* rows[kOfPlanes];
#pragma GCC unroll 4
      for (int i = 0; i < kOfPlanes; ++i) {
        rows[i] = values_at[j + i] + offset;
        if (ahead.here() && first == 0) __builtin_prefetch(ahead.of(j + i), 0, S::kFetchHint);
      }
      Ints codes[V];
      S::template interleave_bytes<V>(rows, kWhole ? 64 : int(columns), first / V, codes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Ints upper = S::four_bytes(high[r] + j), lower = S::four_bytes(low[r] + j);
#pragma GCC unroll 4
        for (int n = 0; n < V; ++n) {
          h[r][n] = S::dot_bytes(h[r][n], codes[n], upper);
          l[r][n] = S::dot_bytes(l[r][n], codes[n], lower);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < V; ++n) found[r][first + n] = S::floats(S::joined(h[r][n], l[r][n]));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    S::turn_quarters(found[r]);
    const Vec factor = S::fill(planes[r].factor);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      if (!kWhole && n * S::kLanes >= columns) break;
      float* to = sums + r * row + n * S::kLanes;
      S::store(to, S::fma(found[r][n], factor, S::load(to)));
    }
  }
}

// sums[r * columns + c] += sum_j p[r * p_row + j] code_j[c] for up to kCodedTurn keys, behind which there are
// rows up to a multiple of four.
template <class S, int R>
inline void few_byte_values(const float* p, int64_t p_row, const int8_t* const* values_at, int64_t offset,
                            int64_t keys, Ahead<int8_t> ahead, int64_t dim, float* sums, int64_t columns) {
  alignas(64) int8_t high[R][kCodedTurn], low[R][kCodedTurn];
  Planes planes[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) planes[r] = split_planes<S>(p + r * p_row, keys, high[r], low[r]);
  constexpr int64_t kColumns = S::kLanes * kOfPlanes;
  int64_t c = 0;
  for (; c + kColumns <= dim; c += kColumns) {
    few_byte_columns<S, R, true>(high, low, planes, values_at, ahead, offset + c, keys, kColumns, sums + c,
                                 columns);
    ahead.offset += kColumns;
  }
  if (c < dim) {
    few_byte_columns<S, R, false>(high, low, planes, values_at, ahead, offset + c, keys, dim - c, sums + c,
                                  columns);
  }
}

}  // namespace polyattn::POLYATTN_NAMESPACE

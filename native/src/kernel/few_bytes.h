// Few query rows against codes of int8, by products of bytes that are summed as integers.
//
// The other operand is rounded to 16 bits, as two planes of bytes: x = factor * (256 * high + low), the largest
// of its row 127 * 256. Of queries a row is a query, of probabilities what a row has in up to kCodedTurn keys.
// Codes c are met as c + 128, which the instruction wants unsigned; sums begin at what that adds too much.
#pragma once

#include "kernel/key_rows.h"
#include "kernel/pack.h"
#include "kernel/quantised.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Whether an instruction set multiplies bytes.
template <class S>
concept MultipliesBytes = requires { typename S::Ints; };

constexpr float kPlanes = 127 * 256;
constexpr int kOfPlanes = 4;  // codes in a lane

// What turns sums of products with a row's planes into numbers, and where these sums begin.
struct Planes {
  float factor;
  int32_t high, low;
};

// Rounds n numbers to two planes; bytes up to a whole lane more are 0. x has whole vectors, 0 at their end.
template <class S>
inline Planes split_planes(const float* x, int64_t n, int8_t* high, int8_t* low) {
  typename S::Vec most = S::zero(), wrong = S::zero();
  for (int64_t i = 0; i < n; i += S::kLanes) {
    const typename S::Vec v = S::load(x + i);
    most = S::max(most, S::abs(v));
    wrong = S::fma(v, S::zero(), wrong);  // NaN for NaN and infinities
  }
  if (S::any_nan(wrong)) {  // all sums of such a row are NaN; no integer stands for its numbers
    const size_t bytes = size_t(blocks_of(n, S::kLanes) * S::kLanes);
    std::memset(high, 0, bytes);
    std::memset(low, 0, bytes);
    return {__builtin_nanf(""), 0, 0};
  }
  const float largest = S::largest(most), step = largest / kPlanes;
  // a smaller step has no reciprocal; what is as small is 0
  const float inverse = step >= 0x1p-126f ? 1.0f / step : 0.0f;
  typename S::Ints sum_high = S::ints(0), sum_low = S::ints(0);
  for (int64_t i = 0; i < n; i += S::kLanes)
    S::split(S::mul(S::load(x + i), S::fill(inverse)), high + i, low + i, sum_high, sum_low);
  return {step, -128 * S::sum_ints(sum_high), -128 * S::sum_ints(sum_low)};
}

// Four query rows as few_byte_scores takes them, in the place of four rows of `units` floats: lane g of row r
// lies at 8 g + 2 r, high before low, so that one address serves all; the rows' Planes are at the end.
constexpr int kPlaneRows = 4;

template <class S>
inline void pack_bytes(const float* row, int64_t dim, float factor, float* out, int64_t units, int r) {
  float padded[kMaxHeadDim];
  pack_plain<S, FloatUnit>(row, 0, 1, dim, 1.0f, padded, 0);
  int8_t high[kMaxHeadDim], low[kMaxHeadDim];
  Planes p = split_planes<S>(padded, dim, high, low);
  p.factor *= factor;
  float* const block = out + r / kPlaneRows * kPlaneRows * units;
  const int place = r % kPlaneRows;
  for (int64_t g = 0; g * kOfPlanes < dim; ++g) {
    float* to = block + (g * kPlaneRows + place) * 2;
    std::memcpy(to, high + g * kOfPlanes, kOfPlanes);
    std::memcpy(to + 1, low + g * kOfPlanes, kOfPlanes);
  }
  std::memcpy(block + (units - 4) * kPlaneRows + place * 4, &p, sizeof p);
}

inline Planes planes_of(const float* block, int64_t units, int r) {
  Planes p;
  std::memcpy(&p, block + (units - 4) * kPlaneRows + r * 4, sizeof p);
  return p;
}

// high * 256 + low as floats.
template <class S>
POLYATTN_INLINE typename S::Vec joined(typename S::Ints high, typename S::Ints low) {
  return S::fma(S::floats(high), S::fill(256.0f), S::floats(low));
}

// Adds the products of some lanes of W keys; all W lanes, and all of their bytes, if kWhole.
template <class S, int R, bool kWhole>
POLYATTN_INLINE void few_byte_lanes(const float* q, const int8_t* const* keys_at, int64_t offset,
                                    bool fetches, int64_t bytes, typename S::Ints (&high)[R],
                                    typename S::Ints (&low)[R]) {
  constexpr int W = S::kLanes;
  const int n = kWhole ? W * kOfPlanes : int(bytes), lanes = kWhole ? W : int(blocks_of(bytes, kOfPlanes));
  if (fetches) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) __builtin_prefetch(keys_at[i + kAheadCodes] + offset, 0, S::kFetchHint);
  }
  typename S::Vec codes[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) codes[i] = S::unsigned_bytes(keys_at[i] + offset, n);
  S::transpose(codes);
#pragma GCC unroll 16
  for (int g = 0; g < W; ++g) {
    if (!kWhole && g >= lanes) break;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const float* at = q + (g * kPlaneRows + r) * 2;
      high[r] = S::dot_bytes(high[r], codes[g], at);
      low[r] = S::dot_bytes(low[r], codes[g], at + 1);
    }
  }
}

// scores[r * row + j] = q_r . code_j * scales[j] for R rows and `keys` keys; see few_scores. Whole vectors of
// keys are read: there are rows behind the last.
template <class S, int R>
inline void few_byte_scores(const float* q, int64_t units, const int8_t* const* keys_at, int64_t offset,
                            int64_t keys, bool fetches, int64_t dim, const float* scales, float* scores,
                            int64_t row) {
  constexpr int W = S::kLanes, kAtOnce = W * kOfPlanes;
  Planes planes[R];
  for (int r = 0; r < R; ++r) planes[r] = planes_of(q, units, r);
  for (int64_t j = 0; j < keys; j += W) {
    typename S::Ints high[R], low[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      high[r] = S::ints(planes[r].high);
      low[r] = S::ints(planes[r].low);
    }
    int64_t h = 0;
    for (; h + kAtOnce <= dim; h += kAtOnce)
      few_byte_lanes<S, R, true>(q + h * 2, keys_at + j, offset + h, fetches, kAtOnce, high, low);
    if (h < dim) few_byte_lanes<S, R, false>(q + h * 2, keys_at + j, offset + h, fetches, dim - h, high, low);
    const typename S::Vec scale = S::load(scales + j);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const typename S::Vec factor = S::mul(scale, S::fill(planes[r].factor));
      S::store(scores + r * row + j, S::mul(joined<S>(high[r], low[r]), factor));
    }
  }
}

// Adds the products of up to 64 columns, whose sums are in the order of S::interleave_bytes.
template <class S, int R>
POLYATTN_INLINE void few_byte_columns(const int8_t (&high)[R][kCodedTurn], const int8_t (&low)[R][kCodedTurn],
                                      const Planes (&planes)[R], const int8_t* const* values_at,
                                      const int8_t* const* next, int64_t offset, int64_t keys,
                                      int64_t columns, float* sums, int64_t row) {
  using Vec = typename S::Vec;
  using Ints = typename S::Ints;
  Vec found[R][4];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    Ints h[R][2], l[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      h[r][0] = h[r][1] = S::ints(planes[r].high);
      l[r][0] = l[r][1] = S::ints(planes[r].low);
    }
    for (int64_t j = 0; j < keys; j += kOfPlanes) {
      const int8_t* rows[kOfPlanes];
#pragma GCC unroll 4
      for (int i = 0; i < kOfPlanes; ++i) {
        rows[i] = values_at[j + i] + offset;
        if (next && half == 0) __builtin_prefetch(next[j + i] + offset, 0, S::kFetchHint);
      }
      Vec codes[2];
      S::interleave_bytes(rows, int(columns), half, codes[0], codes[1]);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int n = 0; n < 2; ++n) {
          h[r][n] = S::dot_bytes(h[r][n], codes[n], high[r] + j);
          l[r][n] = S::dot_bytes(l[r][n], codes[n], low[r] + j);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n) found[r][2 * half + n] = joined<S>(h[r][n], l[r][n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    S::in_order(found[r]);
    const Vec factor = S::fill(planes[r].factor);
    for (int n = 0; n < 4 && n * S::kLanes < columns; ++n) {
      float* to = sums + r * row + n * S::kLanes;
      S::store(to, S::fma(found[r][n], factor, S::load(to)));
    }
  }
}

// sums[r * columns + c] += sum_j p[r * p_row + j] code_j[c] for up to kCodedTurn keys, behind which there are
// rows up to a multiple of four.
template <class S, int R>
inline void few_byte_values(const float* p, int64_t p_row, const int8_t* const* values_at, int64_t offset,
                            int64_t keys, bool fetches, int64_t dim, float* sums, int64_t columns) {
  alignas(64) int8_t high[R][kCodedTurn], low[R][kCodedTurn];
  Planes planes[R];
  for (int r = 0; r < R; ++r) {
    alignas(64) float own[kCodedTurn] = {};
    std::memcpy(own, p + r * p_row, size_t(keys) * sizeof(float));
    planes[r] = split_planes<S>(own, keys, high[r], low[r]);
  }
  constexpr int kColumns = S::kLanes * kOfPlanes;
  for (int64_t c = 0; c < dim; c += kColumns) {
    const int8_t* const* next = fetches ? values_at + kAheadCodes : nullptr;
    few_byte_columns<S, R>(high, low, planes, values_at, next, offset + c, keys,
                           smaller<int64_t>(dim - c, kColumns), sums + c, columns);
  }
}

}  // namespace polyattn::POLYATTN_NAMESPACE

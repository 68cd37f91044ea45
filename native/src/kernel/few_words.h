// Few query rows against codes of int8, by products of 16 bits that are summed as integers.
//
// The other operand is rounded to 16 bits, the largest of its row to 127 * 256. Of queries a row is a query, of
// probabilities what a row has in up to kCodedTurn keys. The sums are those of two planes of bytes, to the bit
// (few_byte_tiles.h).
#pragma once

#include "kernel/few_codes.h"
#include "kernel/pack.h"
#include "kernel/quantised.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Whether an instruction set multiplies integers of 16 bits.
template <class S>
concept MultipliesWords = requires { typename S::Ints; };

constexpr float kMostOfWords = 127 * 256;
constexpr int64_t kMostSummed = 512;  // whose sums 32 bits hold: 128 * 127 * 256 * 512 < 2^31

// What the largest of n numbers is rounded by; NaN if one is not finite: no integer stands for such numbers, and
// all sums of such a row are NaN.
template <class S>
inline float rounding_step(const float* x, int64_t n) {
  typename S::Ints most = S::ints(0);
  int64_t i = 0;
  for (; i + S::kLanes <= n; i += S::kLanes) most = S::larger_size(most, S::load(x + i));
  if (i < n) most = S::larger_size(most, S::load_some(x + i, int(n - i)));
  const float largest = S::largest_size(most);
  return largest < kInfinity ? largest / kMostOfWords : __builtin_nanf("");
}

// What numbers are multiplied with to be rounded. A smaller step has no reciprocal; what is as small is 0.
inline float rounding_factor(float step) { return step >= 0x1p-126f ? 1.0f / step : 0.0f; }

// What was rounded: numbers are integers times `step`. `start` takes off what is added where codes are met as
// code + 128, which needs no shift to become 16 bits.
struct Rounded {
  float step;
  int32_t start;
};

// Rounds n numbers; those up to a whole vector more are 0.
template <class S>
inline Rounded round_to_words(const float* x, int64_t n, int16_t* to) {
  constexpr int W = S::kLanes;
  const float step = rounding_step<S>(x, n);
  if (!(step == step)) {
    std::memset(to, 0, size_t(round_up(n, W)) * sizeof *to);
    return {step, 0};
  }
  const typename S::Vec factor = S::fill(rounding_factor(step));
  typename S::Ints sum = S::ints(0);
  int64_t i = 0;
  for (; i + W <= n; i += W) S::round_words(S::mul(S::load(x + i), factor), to + i, sum);
  if (i < n) S::round_words(S::mul(S::load_some(x + i, int(n - i)), factor), to + i, sum);
  return {step, -128 * S::sum_ints(sum)};
}

// A query row in memory of `units` floats, at whose end it is said how it was rounded, times `factor`.
template <class S>
inline void pack_words(const float* row, int64_t dim, float factor, float* out, int64_t units) {
  alignas(64) int16_t words[kMaxHeadDim + kEights] = {};
  Rounded rounded = round_to_words<S>(row, dim, words);
  rounded.step *= factor;
  std::memcpy(out, words, size_t(round_up(dim, kEights / 2)) * sizeof *words);
  order_by_eights(out, dim);
  std::memcpy(out + units - 2, &rounded, sizeof rounded);
}

template <class S>
struct WordSums {
  using Sum = typename S::Ints;
  Sum starts;  // of the rows of four sums, by turns
  static POLYATTN_INLINE Sum nothing() { return S::ints(0); }
  static POLYATTN_INLINE Sum query(const float* q) { return S::as_ints(S::load(q)); }
  static POLYATTN_INLINE Sum some(const int8_t* key, int n) { return S::words(key, n); }
  static POLYATTN_INLINE void two(const int8_t* key, Sum& a, Sum& b) { S::words_by_eights(key, a, b); }
  static POLYATTN_INLINE Sum dot(Sum sum, Sum a, Sum b) { return S::dot_words(sum, a, b); }
  static POLYATTN_INLINE Sum add(Sum a, Sum b) { return S::add_ints(a, b); }
  POLYATTN_INLINE typename S::Vec joined(Sum x) const { return S::floats(add(x, starts)); }
};

// scores[r * row + j] = q_r . code_j * scales[j] for R rows and `keys` keys; see few_code_scores.
template <class S, int R, class Rows, class Next>
inline void few_word_scores(const float* q, int64_t units, const Rows& rows, int64_t keys, const Next& ahead,
                            int64_t dim, const float* scales, float* scores, int64_t row) {
  Rounded rows_of[R];
  int32_t starts[S::kLanes];
  for (int r = 0; r < R; ++r) std::memcpy(rows_of + r, q + (r + 1) * units - 2, sizeof *rows_of);
  for (int i = 0; i < S::kLanes; ++i) starts[i] = rows_of[i % 4 / (4 / R)].start;
  few_code_scores<S, R>(WordSums<S>{S::load_ints(starts)}, q, units, rows, keys, ahead, dim,
                        [&](int r, int64_t j, typename S::Vec x) {
                          const typename S::Vec factor =
                              S::mul(S::load(scales + j), S::fill(rows_of[r].step));
                          S::store(scores + r * row + j, S::mul(x, factor));
                        });
}

// Adds the products of up to 64 columns, in the order of S::interleave_words.
template <class S, int R, bool kWhole, class Rows, class Next>
POLYATTN_INLINE void few_word_columns(const int16_t (&p)[R][kCodedTurn], const Rounded (&rows_of)[R],
                                      const Rows& values, int64_t keys, const Next& ahead, int64_t columns,
                                      float* sums, int64_t row) {
  using Ints = typename S::Ints;
  Ints x[R][4];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) x[r][n] = S::ints(rows_of[r].start);
  }
  for (int64_t j = 0; j < keys; j += 2) {
    if (ahead.here(j)) {
      __builtin_prefetch(ahead.of(j), 0, S::kFetchHint);
      __builtin_prefetch(ahead.of(j + 1), 0, S::kFetchHint);
    }
    Ints codes[4];
    S::interleave_words(values[j], values[j + 1], kWhole ? 64 : int(columns), codes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Ints two = S::two_words(p[r] + j);
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) x[r][n] = S::dot_words(x[r][n], codes[n], two);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    typename S::Vec found[4];
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) found[n] = S::floats(x[r][n]);
    S::turn_quarters(found);
    const typename S::Vec factor = S::fill(rows_of[r].step);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      if (!kWhole && n * S::kLanes >= columns) break;
      float* to = sums + r * row + n * S::kLanes;
      S::store(to, S::fma(found[n], factor, S::load(to)));
    }
  }
}

// sums[r * columns + c] += sum_j p[r * p_row + j] code_j[c] for up to kCodedTurn keys, behind which there is a row if
// their number is odd.
template <class S, int R, class Rows, class Next>
inline void few_word_values(const float* p, int64_t p_row, const Rows& values, int64_t keys,
                            const Next& ahead, int64_t dim, float* sums, int64_t columns) {
  alignas(64) int16_t words[R][kCodedTurn];
  Rounded rows_of[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) rows_of[r] = round_to_words<S>(p + r * p_row, keys, words[r]);
  constexpr int64_t kColumns = S::kLanes * 4;
  int64_t c = 0;
  for (; c + kColumns <= dim; c += kColumns) {
    few_word_columns<S, R, true>(words, rows_of, values.from_column(c), keys, ahead.from_column(c), kColumns,
                                 sums + c, columns);
  }
  if (c < dim) {
    few_word_columns<S, R, false>(words, rows_of, values.from_column(c), keys, ahead.from_column(c), dim - c,
                                  sums + c, columns);
  }
}

}  // namespace polyattn::POLYATTN_NAMESPACE

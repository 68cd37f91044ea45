// The soft-max of a block: up to 32 rows against up to 256 keys, whose scores stay in the first cache.
//
// To look for each row's maximum costs as much as an eighth of the exponentials. A row has a base instead: the
// largest score of the first keys that it sees, to which it is raised again where probabilities relative to it
// have become large. They may be, and so may sums, as long as both are floating point; what is computed of them is
// the same.
#pragma once

#include <utility>

#include "kernel/fetcher.h"
#include "kernel/softmax.h"

namespace polyattn::POLYATTN_NAMESPACE {

constexpr int kBlockRows = 32;
constexpr int kFetchEvery = 8;  // rows
constexpr int kBlockKeys = 256;
constexpr int64_t kBlockRow = kBlockKeys + 16;  // as kScoreRow
// A lane's sum of a block's probabilities from which on the base is raised.
constexpr float kMostOfBlock = 1024.0f;

// What the rows of a block have. In `state`, maxima are the rows' bases. `lanes`: sums that are not yet in the
// state's, lane by lane. `out`: sums of values.
struct BlockRows {
  int count;
  RowStates state;
  float *lanes, *out;
  int64_t v_columns;
  Fetcher* fetcher;
};

// Coefficients of 2^r, in registers: from memory they would be loaded for each vector.
template <class S, int kDegree>
struct Powers {
  typename S::Vec c[kDegree + 1];
  POLYATTN_INLINE Powers() {
    for (int i = 0; i <= kDegree; ++i) {
      c[i] = S::fill(kDegree == 5 ? kPower5[i] : kPower3[i]);
      asm volatile("" : POLYATTN_REGISTER(c[i]));
    }
  }
};

// Which rows of a block have a base.
enum class Bases { none, some, all };

template <class S>
inline Bases bases_of(const BlockRows& rows) {
  const typename S::Vec none = S::fill(-kInfinity), one = S::fill(1.0f);
  typename S::Vec with = S::zero();
  for (int r = 0; r < rows.count; r += S::kLanes)
    with = S::add(with, S::less_select(none, S::load(rows.state.maximum + r), one, S::zero()));
  const float count = S::sum(with);
  return count == 0 ? Bases::none : count < float(rows.count) ? Bases::some : Bases::all;
}

// Gives rows that have none a base: their largest score. Which have one then.
template <class S>
inline Bases find_bases(const BlockRows& rows, const float* scores, int columns, float factor) {
  using Vec = typename S::Vec;
  constexpr int W = S::kLanes;
  const Vec none = S::fill(-kInfinity);
  alignas(64) float tops[W * W];
  for (int first = 0; first < rows.count; first += W) {
    for (int r = 0; r < W; ++r) {
      S::store(tops + r * W, none);
      if (first + r < rows.count) raise<S>(scores + (first + r) * kBlockRow, columns, tops + r * W);
    }
    const Vec top = S::mul(across<S>(tops, [](Vec(&x)[W]) { return S::lane_maxima(x); }), S::fill(factor));
    float* const base = rows.state.maximum + first;
    const Vec before = S::load(base);
    S::store(base, S::less_select(none, before, before, top));
  }
  return bases_of<S>(rows);
}

template <class S, class U, Scores kScores, int kDegree>
class BlockSoftmax {
  using Vec = typename S::Vec;
  static constexpr int W = S::kLanes;
  static_assert(kScores != Scores::folded && U::kValues == 2);

 public:
  BlockSoftmax(float factor, const BlockRows& rows, float* scores, int columns)
      : factor_(factor), rows_(rows), scores_(scores), columns_(columns) {}

  // Scores -> units of probabilities, in place.
  void run() const {
    const auto widths = [&]<int... kWidths>(std::integer_sequence<int, kWidths...>) {
      (void)((columns_ == (kWidths + 1) * 2 * W && (soften<kWidths + 1>(), true)) || ...);
    };
    widths(std::make_integer_sequence<int, kBlockKeys / (2 * W)>());
  }

 private:
  float* row(int r) const { return scores_ + r * kBlockRow; }

  template <int kPairs>
  void soften() const {
    const Powers<S, kDegree> powers;
    Vec factor = S::fill(kScores == Scores::natural ? kLog2E : factor_);
    asm volatile("" : POLYATTN_REGISTER(factor));
    for (int r = 0, end; r < rows_.count; r = end) {
      rows_.fetcher->some();
      for (end = smaller(r + kFetchEvery, rows_.count); r < end; ++r) {
        if (!quick<kPairs>(powers, factor, r)) slow(r);
      }
    }
  }

  // A row with the base that it has; false, and nothing is changed, where that will not do.
  template <int kPairs>
  POLYATTN_INLINE bool quick(const Powers<S, kDegree>& powers, Vec factor, int r) const {
    const float base = rows_.state.maximum[r];
    // as in soften_row; also where nothing has been seen
    if (kScores == Scores::raw && !(base >= -kLargeScore && base <= kLargeScore)) return false;
    const Vec shift = S::fill(kScores == Scores::natural ? base : -base);
    const auto power = [&](const float* at) {
      const Vec x = S::load(at);
      return S::template exp2_by<kDegree>(
          powers.c, kScores == Scores::natural ? S::mul(S::sub(x, shift), factor) : S::fma(x, factor, shift));
    };
    float* const at = row(r);
    Vec pairs[kPairs], sum = S::zero(), other = S::zero();
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; ++i) {
      const Vec a = power(at + 2 * W * i), b = power(at + 2 * W * i + W);
      sum = i == 0 ? a : S::add(sum, a);
      other = i == 0 ? b : S::add(other, b);
      pairs[i] = S::pairs(a, b);
    }
    sum = S::add(sum, other);
    if (S::any_beyond(sum, S::fill(kMostOfBlock))) return false;
    S::store(rows_.lanes + r * W, S::add(S::load(rows_.lanes + r * W), sum));
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; ++i) S::store(at + W * i, pairs[i]);
    return true;
  }

  // Any row: raises its base to its largest score, where that is larger.
  __attribute__((noinline)) void slow(int r) const {
    alignas(64) float most[W];
    S::store(most, S::fill(-kInfinity));
    raise<S>(row(r), columns_, most);
    float top = most[0], &base = rows_.state.maximum[r];
    for (float x : most) top = larger(top, x);
    if (kScores == Scores::raw) top *= factor_;
    float* const lanes = rows_.lanes + r * W;
    if (top > base) {
      const float unit = kScores == Scores::natural ? kLog2E : 1.0f;
      const float shrink = base == -kInfinity ? 0.0f : exp2_scalar<S, 5>((base - top) * unit);
      scale_row<S>(rows_.out + r * rows_.v_columns, rows_.v_columns, shrink);
      scale_row<S>(lanes, W, shrink);
      rows_.state.sum[r] *= shrink;
      base = top;
    }
    alignas(64) float own[W];
    soften_row<S, U, kScores, kDegree>(row(r), columns_, factor_, base > -kInfinity ? base : 0.0f, own);
    S::store(lanes, S::add(S::load(lanes), S::load(own)));
  }

  const float factor_;
  const BlockRows& rows_;
  float* const scores_;
  const int columns_;
};

// `columns`: a multiple of two vectors.
template <class S, class U>
inline void soften_block(const ScoreUnits<U>& units, const BlockRows& rows, float* scores, int columns) {
  const auto run = [&]<Scores kScores, int kDegree>() {
    BlockSoftmax<S, U, kScores, kDegree>(units.factor, rows, scores, columns).run();
  };
  if (units.kind == Scores::raw) {
    return units.short_powers ? run.template operator()<Scores::raw, 3>()
                              : run.template operator()<Scores::raw, 5>();
  }
  units.short_powers ? run.template operator()<Scores::natural, 3>()
                     : run.template operator()<Scores::natural, 5>();
}

}  // namespace polyattn::POLYATTN_NAMESPACE

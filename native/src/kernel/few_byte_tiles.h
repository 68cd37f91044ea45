// Few query rows against codes of int8 in the tiles of a matrix unit: the products of few_word_values() and
// few_word_scores(), 16 keys at a time, as they lie in memory. The unit multiplies bytes, so a number of 16 bits is two
// planes of them: x = step * (256 * high + low).
//
// Scores: sixteen keys are the rows of A, 64 codes at a time, and both planes of a query are columns of B.
//
// Values: sixteen of them are the rows of B, whose units are four neighbouring columns, which must not be summed. So
// each of a row's probabilities, in each plane, is four rows of A, with the byte in the first to the last place.
#pragma once

#include "kernel/few_words.h"
#include "kernel/tile_rows.h"

namespace polyattn::POLYATTN_NAMESPACE {

// The unit of int8 codes whose products of few rows are made in tiles; all else is float32.
template <class Unit>
struct ByteTileUnit : FloatUnit {
  using ByteTiles = Unit;
  using Session = typename Unit::Session;
};

template <class U>
concept HasByteTiles = requires { typename U::ByteTiles; };

constexpr int kOfPlanes = 4;  // bytes in a lane

// Rounds n numbers to two planes; bytes up to a whole vector more are 0. Returns the step.
template <class S>
inline float split_planes(const float* x, int64_t n, int8_t* high, int8_t* low) {
  constexpr int W = S::kLanes;
  const float step = rounding_step<S>(x, n);
  if (!(step == step)) {
    std::memset(high, 0, size_t(round_up(n, W)));
    std::memset(low, 0, size_t(round_up(n, W)));
    return step;
  }
  const typename S::Vec factor = S::fill(rounding_factor(step));
  for (int64_t i = 0; i < n; i += W) {
    const typename S::Vec some = i + W <= n ? S::load(x + i) : S::load_some(x + i, int(n - i));
    S::split(S::mul(some, factor), high + i, low + i);
  }
  return step;
}

template <class S, class U>
class FewByteTiles {
  static constexpr int kSide = kTileUnits, kWide = kSide * kOfPlanes;  // rows of a tile; codes
  static constexpr int kMostRows = kSide / kOfPlanes;                  // whose probabilities are a tile of A
  static_assert(S::kLanes == kSide && kTile == kCodedTurn && kTile == 4 * kSide);

 public:
  // Row r of an item as two columns of B, and behind these its step, in memory of `room` floats.
  static void pack(const float* row, int64_t dim, float factor, float* to, int64_t room, int r) {
    constexpr int64_t kMost = kMaxHeadDim + kWide;
    alignas(64) int8_t planes[2][kMost] = {};
    const float step = split_planes<S>(row, dim, planes[0], planes[1]);
    for (int side = 0; side < 2; ++side) {
      for (int64_t c = 0; c < round_up(dim, kWide); c += kOfPlanes)
        std::memcpy(to + c / kOfPlanes * kSide + 2 * r + side, planes[side] + c, kOfPlanes);
    }
    to[room - kFewRows + r] = step * factor;
  }

  // scores[r * row + j] = q_r . code_j * scales[j] for `rows` queries, up to 8, and up to a multiple of 16 keys.
  template <class Keys>
  void scores(const float* q, int64_t room, int rows, const Keys& keys, int64_t dim, const float* scales,
              float* scores, int64_t row) {
    const int groups = int(blocks_of(keys.count, kSide));
    for (int64_t h = 0; h < dim; h += 2 * kWide) {
      by_tiles<2>(dim - h, kWide, [&](auto tiles) {
        each<tiles.value>([&](auto t) {
          tiles_.template load<6 + t.value>(q + (h / kOfPlanes + t.value * kSide) * kSide, kSide);
        });
        for (int n = 0; n < groups; ++n) {
          const TileRows group(keys, n, h, dim);
          n % 2 ? meet_keys<tiles.value, 1>(group, h > 0, sums_[n])
                : meet_keys<tiles.value, 0>(group, h > 0, sums_[n]);
        }
      });
    }
    for (int n = 0; n < groups; ++n)
      turn_scores(sums_[n], q + room, rows, scales + n * kSide, scores + n * kSide, row);
  }

  // sums[r * columns + c] += sum_j p[r * p_row + j] code_j[c] for `rows` rows of probabilities.
  template <class Keys>
  void values(const float* p, int64_t p_row, int rows, const Keys& values, int64_t dim, float* sums,
              int64_t columns) {
    const int groups = int(blocks_of(values.count, kSide));
    for (int from = 0; from < rows; from += kMostRows) {
      const int here = smaller(rows - from, kMostRows);
      float steps[kMostRows];
      for (int r = 0; r < here; ++r) steps[r] = spread(p + (from + r) * p_row, values.count, groups, r);
      for (int64_t c = 0; c < dim; c += 2 * kWide) {
        by_tiles<2>(dim - c, kWide, [&](auto tiles) {
          constexpr int T = tiles.value;
          each<2 * T>([&](auto t) { tiles_.template zero<t.value>(); });
          for (int n = 0; n < groups; ++n) meet_values<T>(TileRows(values, n, c, dim), n, from == 0);
          each<2 * T>([&](auto t) { tiles_.template store<t.value>(sums_[t.value], kSide); });
          for (int r = 0; r < here; ++r) {
            for (int t = 0; t < T; ++t)
              add<T>(r, t, steps[r], sums + (from + r) * columns + c + t * kWide, columns - c - t * kWide);
          }
        });
      }
    }
  }

 private:
  // Sixteen keys with T tiles of queries, which are loaded. `more`: there are sums of earlier codes.
  template <int T, int kSum, class Group>
  POLYATTN_INLINE void meet_keys(const Group& keys, bool more, float* sums) {
    more ? tiles_.template load<kSum>(sums, kSide) : tiles_.template zero<kSum>();
    each<T>([&](auto t) {
      constexpr int kA = 2 + t.value;
      keys.template fetch<T, t.value>(kWide);
      const TilePlace from = as_it_is(keys, t.value);
      tiles_.template load_rows<kA>(from.at, from.bytes);
      tiles_.template dot_bytes<kSum, kA, 6 + t.value>();
    });
    tiles_.template store<kSum>(sums, kSide);
  }

  // Sums of sixteen keys with the planes of the rows as scores; `end`: behind the rows' steps.
  POLYATTN_INLINE void turn_scores(const float* sums, const float* end, int rows, const float* scales,
                                   float* to, int64_t row) {
    const typename S::Vec scale = S::load(scales);
    for (int r = 0; r < rows; r += 2) {
      typename S::Vec x[4];
      S::four_columns(sums + 2 * r, x);
      for (int i = 0; i < 2; ++i) {
        const float step = end[r + i - kFewRows];
        const typename S::Vec whole = S::floats(S::joined(S::as_ints(x[2 * i]), S::as_ints(x[2 * i + 1])));
        S::store(to + (r + i) * row, S::mul(whole, S::mul(scale, S::fill(step))));
      }
    }
  }

  // The n-th sixteen values in T tiles of columns, with both planes of the spread probabilities: tiles 0 and 1 are the
  // sums of the high one, those behind them of the low one.
  template <int T, class Group>
  POLYATTN_INLINE void meet_values(const Group& values, int n, bool fetches) {
    tiles_.template load<4>(spread_[0][n], kSide);
    tiles_.template load<5>(spread_[1][n], kSide);
    each<T>([&](auto t) {
      constexpr int kB = 6 + t.value;
      if (fetches) values.template fetch<T, t.value>(kWide);
      const TilePlace from = as_it_is(values, t.value);
      tiles_.template load_rows<kB>(from.at, from.bytes);
      tiles_.template dot_bytes<t.value, 4, kB>();
      tiles_.template dot_bytes<T + t.value, 5, kB>();
    });
  }

  // Tile t of a group; nothing behind its rows is read.
  template <class Group>
  POLYATTN_INLINE TilePlace as_it_is(const Group& group, int t) {
    if (!group.even || group.left < (t + 1) * kWide) [[unlikely]]
      return cut(group, t);
    return {group.first + t * kWide, group.keys.stride};
  }

  // A copy, 0 behind the last code.
  template <class Group>
  __attribute__((noinline)) TilePlace cut(Group group, int t) {
    const size_t some = size_t(smaller<int64_t>(group.left - t * kWide, kWide));
    std::memset(cut_, 0, sizeof cut_);
    for (int i = 0; i < kSide; ++i) std::memcpy(cut_ + i * kSide, group.row(i) + t * kWide, some);
    return {cut_, kWide};
  }

  // The planes of a row's probabilities of `keys` keys as rows of A.
  POLYATTN_INLINE float spread(const float* p, int64_t keys, int groups, int r) {
    alignas(64) int8_t planes[2][kCodedTurn];
    const float step = split_planes<S>(p, keys, planes[0], planes[1]);
    for (int side = 0; side < 2; ++side) {
      for (int64_t j = round_up(keys, S::kLanes); j < groups * kSide; ++j) planes[side][j] = 0;
      for (int n = 0; n < groups; ++n)
        S::places_of_bytes(planes[side] + n * kSide, spread_[side][n] + r * kOfPlanes * kSide);
    }
    return step;
  }

  // The sums of row r in tile t of T to those of before, of which `left` columns are there.
  template <int T>
  POLYATTN_INLINE void add(int r, int t, float factor, float* sums, int64_t left) {
    typename S::Vec x[kOfPlanes];
#pragma GCC unroll 4
    for (int i = 0; i < kOfPlanes; ++i) {
      const auto found = [&](int side) {
        return S::as_ints(S::load(sums_[side * T + t] + (r * kOfPlanes + i) * kSide));
      };
      x[i] = S::floats(S::joined(found(0), found(1)));
    }
    S::zip_four(x);
#pragma GCC unroll 4
    for (int i = 0; i < kOfPlanes; ++i) {
      if (i * kSide >= left) return;
      float* const to = sums + i * kSide;
      S::store(to, S::fma(x[i], S::fill(factor), S::load(to)));
    }
  }

  typename U::ByteTiles tiles_;
  alignas(64) float sums_[4][kSide * kSide], spread_[2][4][kSide * kSide], cut_[kSide * kSide];
};

}  // namespace polyattn::POLYATTN_NAMESPACE

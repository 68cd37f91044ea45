// Few query rows in the tiles of a matrix unit, which take keys and values as they lie in memory; codes of a byte as
// bfloat16, which they are turned into sixteen at a time.
//
// Scores: sixteen keys are the rows of A, 32 elements at a time, and the queries are columns of B. What comes out
// has a key in each row and is turned round.
//
// Values: sixteen of them are the rows of B. What is a pair there are two neighbouring columns, which must not be
// summed; so of a row's probabilities A has two rows, of (p, 0) and of (0, p), whose sums are those of the even and
// of the odd columns. Half of the products are by 0, but nothing is packed, which would take longer.
//
// By 0, what is not finite becomes NaN in a column beside it. Whoever finds NaN in the output asks again, with
// `careful`: even and odd columns then come in tiles of their own. The same sums in the same order.
#pragma once

#include "kernel/pack.h"
#include "kernel/quantised.h"
#include "kernel/tile_rows.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Whether few rows meet keys and values of a type in tiles.
template <class U, class C>
constexpr bool kFewInTiles = U::kInTiles && (std::is_same_v<C, BF16> || std::is_same_v<C, F8>);

// Row r of an item as a column of B.
template <class S, class U, class T>
inline void pack_column(const T* row, int64_t dim, float* to, int r) {
  float own[kMaxHeadDim + kTileUnits];
  const int64_t there = round_up(blocks_of(dim, U::kValues), S::kLanes);
  pack_plain<S, U>(row, 0, 1, dim, 1.0f, own, 0);
  for (int64_t u = 0; u < there; ++u) to[u * kTileUnits + r] = own[u];
  for (int64_t u = there; u < units_of<U>(dim); ++u) to[u * kTileUnits + r] = 0;
}

// How values are met: as they are; or careful, where even and odd columns come apart and values that a row does not see
// are 0. `words`: what the row sees of tiles that are `mixed`, kRows words from one to the next; `from`: the first value's
// place in the first tile.
struct Care {
  bool careful;
  const uint64_t* words;
  const bool* mixed;
  int64_t from;

  bool mixed_within(int64_t keys) const {
    if (!careful) return false;
    for (int64_t n = 0; n * kTile < from + keys; ++n) {
      if (mixed[n]) return true;
    }
    return false;
  }
  // Of the n-th sixteen values, a bit for each.
  POLYATTN_INLINE uint64_t seen(int n) const {
    const int64_t place = from + int64_t{n} * kTileUnits;
    if (!words || !mixed[place / kTile]) return ~uint64_t{0};
    return words[place / kTile * kRows] >> place % kTile;
  }
};

template <class S, class U, class C>
class FewTiles {
  static constexpr int kSide = kTileUnits, kWide = kSide * U::kValues;  // rows of a tile; elements
  static constexpr int kMost = 4;                                       // tiles of columns at once
  static constexpr int kRowsOfOdd = kSide / 2;                          // of A, from here on
  static_assert(S::kLanes == kSide && kSide == kRowsAtOnce && kTile == kMost * kSide);

 public:
  // scores[r * row + j] = q_r . key_j for `rows` queries, up to 8; scores of up to a multiple of 16 keys and of 4
  // queries are written.
  template <class Keys>
  void scores(const float* q, int rows, const Keys& keys, int64_t dim, float* scores, int64_t row) {
    const int groups = int(blocks_of(keys.count, kSide));
    for (int64_t h = 0; h < dim; h += kMost * kWide) {
      by_tiles<kMost>(dim - h, kWide, [&](auto tiles) {
        each<tiles.value>([&](auto t) {
          tiles_.template load<4 + t.value>(q + (h / U::kValues + t.value * kSide) * kSide, kSide);
        });
        for (int n = 0; n < groups; ++n) {
          const TileRows group(keys, n, h, dim);
          n % 2 ? meet_keys<tiles.value, 1>(group, h > 0, sums_[n])
                : meet_keys<tiles.value, 0>(group, h > 0, sums_[n]);
        }
      });
    }
    for (int n = 0; n < groups; ++n) {
      for (int r = 0; r < rows; r += 4) {
        typename S::Vec x[4];
        S::four_columns(sums_[n] + r, x);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) S::store(scores + (r + i) * row + n * kSide, x[i]);
      }
    }
  }

  // sums[r * columns + c] += sum_j p[r * p_row + j] value_j[c] for `rows` rows of pairs of probabilities, which are 0
  // behind the last value up to a multiple of 16.
  template <class Keys>
  void values(const float* p, int64_t p_row, int rows, const Keys& values, Care care, int64_t dim,
              float* sums, int64_t columns) {
    const int groups = int(blocks_of(values.count, kSide));
    const auto spread_some = [&](int from) {
      for (int n = from; n < smaller(from + kMost, groups); ++n)
        spread(p + n * kSide / 2, p_row, rows, spread_[n % (2 * kMost)]);
    };
    for (int64_t c = 0; c < dim; c += kMost * kWide) {
      by_tiles<kMost>(dim - c, kWide, [&](auto tiles) {
        constexpr int T = tiles.value;
        const auto meet = [&](auto place) {
          each<T>([&](auto t) { tiles_.template zero<t.value>(); });
          spread_some(0);
          for (int from = 0; from < groups; from += kMost) {
            spread_some(from + kMost);  // a tile that was just written is loaded slowly
            for (int n = from; n < smaller(from + kMost, groups); ++n)
              meet_values<T>(TileRows(values, n, c, dim), spread_[n % (2 * kMost)], n, place);
          }
          each<T>([&](auto t) { tiles_.template store<t.value>(sums_[t.value], kSide); });
        };
        if (care.careful) {
          const auto half = [&](uint32_t keep) {
            meet([&](const auto& g, int t, int n) { return cut(g, t, care.seen(n), keep); });
          };
          half(0x0000ffffu);
          for (int t = 0; t < T; ++t) std::memcpy(even_[t], sums_[t], sizeof even_[t]);
          half(0xffff0000u);
          for (int t = 0; t < T; ++t) std::memcpy(sums_[t], even_[t], sizeof even_[t]);
        } else {
          meet([&](const auto& g, int t, int) { return as_it_is(g, t); });
        }
        add<T>(rows, sums + c, columns, columns - c);
      });
    }
  }

 private:
  using Place = TilePlace;

  // Sixteen keys with T tiles of queries, which are loaded. `more`: there are sums of earlier elements.
  template <int T, int kSum, class Group>
  POLYATTN_INLINE void meet_keys(const Group& keys, bool more, float* sums) {
    more ? tiles_.template load<kSum>(sums, kSide) : tiles_.template zero<kSum>();
    each<T>([&](auto t) {
      constexpr int kA = 2 + t.value % 2;
      keys.template fetch<T, t.value>(kWide);
      const Place from = as_it_is(keys, t.value);
      tiles_.template load_rows<kA>(from.at, from.bytes);
      tiles_.template dot<kSum, kA, 4 + t.value>();
    });
    tiles_.template store<kSum>(sums, kSide);
  }

  // The n-th sixteen values in T tiles of columns, which `place` says where to load, with spread probabilities.
  template <int T, class Group, class Where>
  POLYATTN_INLINE void meet_values(const Group& values, const float* p, int n, Where place) {
    tiles_.template load<4>(p, kSide);
    each<T>([&](auto t) {
      constexpr int kB = 5 + t.value % 3;
      values.template fetch<T, t.value>(kWide);
      const Place from = place(values, t.value, n);
      tiles_.template load_rows<kB>(from.at, from.bytes);
      tiles_.template dot<t.value, 4, kB>();
    });
  }

  // Tile t of a group; nothing behind its rows is read.
  template <class Group>
  POLYATTN_INLINE Place as_it_is(const Group& group, int t) {
    if constexpr (kCoded<C>) return decoded(group, t);
    if (!group.even || group.left < (t + 1) * kWide) [[unlikely]]
      return cut(group, t, ~uint64_t{0}, ~uint32_t{0});
    return {group.first + t * kWide, group.keys.stride * int64_t{sizeof(C)}};
  }

  // Codes as bfloat16, of an even tile those of the next one too, if they are there.
  template <class Group>
  POLYATTN_INLINE Place decoded(const Group& group, int t) {
    const int64_t left = group.left - t / 2 * 2 * kWide;
    if (left < 2 * kWide) return cut(group, t, ~uint64_t{0}, ~uint32_t{0});
    if (t % 2 == 0) {
#pragma GCC unroll 4
      for (int i = 0; i < kSide; ++i) {
        typename S::Vec low, high;
        S::two_unit_codes(group.row(i) + t * kWide, low, high);
        S::store(decoded_[0] + i * kSide, low);
        S::store(decoded_[1] + i * kSide, high);
      }
    }
    return {decoded_[t % 2], kSide * int64_t{sizeof(float)}};
  }

  // A copy: 0 in rows whose bit is not set, in the half of each pair that `keep` lacks and behind the last element.
  // (By value: else a group would have to lie in memory.)
  template <class Group>
  __attribute__((noinline)) Place cut(Group group, int t, uint64_t seen, uint32_t keep) {
    for (int i = 0; i < kSide; ++i) {
      const C* const row = group.row(i) + t * kWide;
      float* const to = cut_ + i * kSide;
      S::store(to, seen >> i & 1 ? load_units<S, U>(row, group.left - t * kWide) : S::zero());
      for (int u = 0; u < kSide; ++u) to[u] = float_of(bits_of(to[u]) & keep);
    }
    return {cut_, kSide * int64_t{sizeof(float)}};
  }

  // Probabilities of sixteen keys as rows of A: (p, 0), and further down (0, p).
  static POLYATTN_INLINE void spread(const float* p, int64_t p_row, int rows, float* to) {
    for (int r = 0; r < rows; ++r) {
      const typename S::Vec x = S::load(reinterpret_cast<const BF16*>(p + r * p_row));  // in the upper halves
      S::store(to + (kRowsOfOdd + r) * kSide, x);
      S::store(to + r * kSide, S::lower_halves(x));
    }
  }

  // The sums in T tiles to those of `rows` rows, of which `left` columns are there.
  template <int T>
  POLYATTN_INLINE void add(int rows, float* sums, int64_t columns, int64_t left) {
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        typename S::Vec low = S::load(sums_[t] + r * kSide);
        typename S::Vec high = S::load(sums_[t] + (kRowsOfOdd + r) * kSide);
        S::put_together(low, high);
        float* const to = sums + r * columns + t * kWide;
        S::store(to, S::add(S::load(to), low));
        if (t * kWide + kSide < left) S::store(to + kSide, S::add(S::load(to + kSide), high));
      }
    }
  }

  typename U::Tiles tiles_;
  alignas(64) float sums_[kMost][kSide * kSide], spread_[2 * kMost][kSide * kSide];
  alignas(64) float cut_[kSide * kSide], even_[kMost][kRowsOfOdd * kSide], decoded_[2][kSide * kSide];
};

}  // namespace polyattn::POLYATTN_NAMESPACE

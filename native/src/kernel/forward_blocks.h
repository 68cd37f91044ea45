// A strip of query rows against keys that are packed, where a matrix unit multiplies: in blocks of rows and keys
// whose scores stay in the first cache from one product to the next. Scores of a whole strip and chunk would go
// through the second one four times, which takes longer than the products.
#pragma once

#include "kernel/block_softmax.h"
#include "kernel/matmul.h"
#include "kernel/quantised.h"
#include "kernel/tile_scores.h"
#include "kernel/workspace.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Of a visit's tile, the keys that a block meets: columns low to high - 1.
struct BlockTile {
  int number;  // in the visit
  int low, high;
  const float* values;  // packed; of row `low`
  int width() const { return high - low; }
};

// Rows first to end - 1 of a strip, and tiles whose scores lie side by side.
struct Block {
  static constexpr int kMost = kBlockKeys / (2 * kTileUnits);
  int first, end, tiles, columns;
  BlockTile tile[kMost];

  Block(int first, int end)
      : first(first), end(end), tiles(0), columns(0) {}  // to clear the tiles takes time
  int count() const { return end - first; }
  void add(const BlockTile& one) {
    tile[tiles++] = one;
    columns += one.width();
  }
};

// C: of keys and values as they are stored.
template <class S, class U, class C>
class ForwardBlocks {
 public:
  ForwardBlocks(const Arguments& a, const Division& d, const ScoreUnits<U>& units, const Workspace& w,
                const Item& item, const Strip& strip, int place, const Visit& visit, bool careful)
      : a_(a), d_(d), units_(units), w_(w), item_(item), visit_(visit), strip_(strip),
        row_(int64_t{place} * kRows), careful_(careful) {}

  void run() const {
    for (int r = 0; r < strip_.count; r += kBlockRows) rows(r, smaller(r + kBlockRows, strip_.count));
  }

 private:
  // Rows first to end - 1 against all that they see of the visited tiles.
  void rows(int first, int end) const {
    alignas(64) float lanes[kBlockRows * S::kLanes];
    for (int i = 0; i < kBlockRows; ++i) S::store(lanes + i * S::kLanes, S::zero());
    const int64_t row = row_ + first;
    float* const sums = w_.state.sum + row;
    const BlockRows own{end - first,  {w_.state.maximum + row, sums},
                        lanes,        w_.out + row * d_.v_columns,
                        d_.v_columns, w_.fetcher};
    Bases bases = bases_of<S>(own);
    // of large heads, to load and store the sums of values takes longer than scores that leave the first cache
    const int64_t most = d_.v_columns > 96 ? kBlockKeys : kBlockKeys / 2;
    Block block(first, end);
    for (int n = 0; n < visit_.tiles; ++n) {
      Span seen{0, visit_.tile[n].columns};
      if (visit_.mixed[n]) seen = seen_keys(words(n), first, end, kSumGrain<U>, seen.high);
      if (seen.empty()) continue;
      if (block.columns + seen.high - seen.low > most) {
        meet(block, own, &bases);
        block.tiles = block.columns = 0;
      }
      block.add({n, int(seen.low), int(seen.high), values_of(n) + seen.low / U::kValues * d_.v_columns});
    }
    if (block.tiles > 0) meet(block, own, &bases);
    for (int r = 0; r < own.count; r += S::kLanes) {
      const auto sum = [](typename S::Vec(&x)[S::kLanes]) { return S::lane_sums(x); };
      S::store(sums + r, S::add(S::load(sums + r), across<S>(lanes + r * S::kLanes, sum)));
    }
  }

  void meet(const Block& block, const BlockRows& rows, Bases* bases) const {
    const bool first = *bases == Bases::none;  // there are no sums yet
    int column = 0;
    for (int i = 0; i < block.tiles; ++i) {
      score(block, block.tile[i], w_.scores + column);
      column += block.tile[i].width();
    }
    const float factor = units_.kind == Scores::raw ? units_.factor : 1.0f;
    if (*bases != Bases::all) *bases = find_bases<S>(rows, w_.scores, block.columns, factor);
    soften_block<S, U>(units_, rows, w_.scores, block.columns);
    careful_ ? values_by_row(block, rows, first) : values(block, rows, first);
  }

  // Scores of a tile as the soft-max takes them.
  void score(const Block& block, const BlockTile& tile, float* to) const {
    const Tile& whole = visit_.tile[tile.number];
    const float* const q = w_.q + (row_ + block.first) * d_.q_units;
    const int64_t units = units_of<U>(a_.head_dim);
    const float* const k = w_.k + whole.slot * kTile * units + tile.low;
    const Strides strides{d_.q_units, 1, kTile, kBlockRow};
    if (units <= TileScores<U>::kMostUnits && block.count() > TileScores<U>::kRows / 2) {
      TileScores<U> product;  // its memory is not cleared
      product.run(q, k, strides, units, tile.width(), to);
    } else {
      const Piece piece{q, k, units};
      multiply<S, U, Into::set>(&piece, 1, strides, round_up(block.count(), kTileUnits), tile.width(), to);
    }
    if constexpr (kCoded<C>) {
      const float* const scales = w_.key_scales + whole.slot * kTile + tile.low;
      for (int r = 0; r < block.count(); ++r) scale_columns<S>(to + r * kBlockRow, scales, tile.width());
    }
    if (units_.kind == Scores::natural) {
      adjust<S>(a_, item_.q, strip_, {block.first, block.end}, whole.j0 + tile.low,
                smaller(whole.keys, tile.high) - tile.low, units_.adjusting(), to, kBlockRow);
    }
    if (visit_.mixed[tile.number])
      hide<S>(words(tile.number) + block.first, block.count(), {tile.low, tile.high}, to, kBlockRow);
  }

  void values(const Block& block, const BlockRows& rows, bool first) const {
    Piece pieces[Block::kMost];
    const float* p = w_.scores;
    for (int i = 0; i < block.tiles; ++i) {
      const BlockTile& tile = block.tile[i];
      pieces[i] = {p, tile.values, tile.width() / U::kValues};
      p += tile.width() / U::kValues;
    }
    const int64_t whole = round_up(rows.count, kTileUnits);
    first ? multiply<S, U, Into::set>(pieces, block.tiles, strides(), whole, d_.v_columns, rows.out)
          : multiply<S, U, Into::add>(pieces, block.tiles, strides(), whole, d_.v_columns, rows.out);
  }

  // Each row with values of its own, in which what it does not see is 0.
  void values_by_row(const Block& block, const BlockRows& rows, bool first) const {
    if (first) std::memset(rows.out, 0, size_t(rows.count * d_.v_columns) * sizeof(float));
    for (int r = 0; r < rows.count; ++r) {
      Piece pieces[Block::kMost];
      const float* p = w_.scores + r * kBlockRow;
      float* cleaned = w_.cleaned;
      for (int i = 0; i < block.tiles; ++i) {
        const BlockTile& tile = block.tile[i];
        const int64_t units = tile.width() / U::kValues;
        const float* v = tile.values;
        if (visit_.mixed[tile.number]) {
          clean<U>(v, units, d_.v_columns, words(tile.number)[block.first + r] >> tile.low, cleaned);
          v = cleaned;
          cleaned += units * d_.v_columns;
        }
        pieces[i] = {p, v, units};
        p += units;
      }
      multiply<S, U, Into::add>(pieces, block.tiles, strides(), 1, d_.v_columns, rows.out + r * d_.v_columns);
    }
  }

  Strides strides() const { return {kBlockRow, 1, d_.v_columns, d_.v_columns}; }
  const uint64_t* words(int n) const { return w_.words + int64_t{n} * kRows; }
  const float* values_of(int n) const {
    return w_.v + visit_.tile[n].slot * (kTile / U::kValues) * d_.v_columns;
  }

  const Arguments& a_;
  const Division& d_;
  const ScoreUnits<U>& units_;
  const Workspace& w_;
  const Item& item_;
  const Visit& visit_;
  const Strip& strip_;
  const int64_t row_;  // of the strip's first one, of the item's
  const bool careful_;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

// An item of the forward pass from its operands to its output. Its keys come in chunks of kChunk tiles,
// which are packed once and met by every strip of the item.
#pragma once

#include "kernel/forward_strip.h"
#include "kernel/pack.h"

namespace polyattn::POLYATTN_NAMESPACE {

template <class S, class U, class T>
class ForwardItem {
 public:
  ForwardItem(const Arguments& a, const Division& d) : a_(a), d_(d), strip_(a, d) {}

  Scores scores() const { return strip_.scores(); }
  int64_t k_units() const { return strip_.k_units(); }

  // Runs an item over one of `splits` parts of its keys; leaves sums in w.out and w.state.
  // `careful`: a masked value that is not finite would reach rows as 0 * NaN, so each row gets
  // values of its own in which what it does not see is 0; same products, same order.
  void attend(Workspace& w, const Item& item, int64_t split, int64_t splits, bool careful) const {
    for (int64_t r = 0; r < round_up(item.rows, kRows); ++r) {
      w.state.maximum[r] = -kInfinity;
      w.state.sum[r] = 0;
    }
    std::memset(w.out, 0, size_t(item.rows * d_.v_columns) * 4);
    pack_queries(w, item);
    Span keys = item_span(w, item);
    if (keys.empty()) return;
    if (splits > 1) {
      const int64_t size = round_up(blocks_of(keys.high - keys.low, splits), kTile);
      const int64_t begin = keys.low / kTile * kTile;
      const int64_t high = keys.high;
      keys.low = larger(keys.low, begin + split * size);
      keys.high = smaller(high, begin + (split + 1) * size);
      if (split == splits - 1) keys.high = high;
      if (keys.empty()) return;
    }
    for (int64_t j = keys.low / kTile * kTile; j < keys.high; j += kChunkKeys)
      chunk(w, item, j, smaller(j + kChunkKeys, keys.high), careful);
  }

  // Normalises and writes; false if an output is NaN.
  bool finish(const Workspace& w, const Item& item) const {
    bool fine = true;
    for (int i = 0; i < item.strips; ++i) {
      const Strip& s = w.strips[i];
      for (int r = 0; r < s.count; ++r) {
        const int64_t row = int64_t{i} * kRows + r;
        fine &= finish_row(item, s.head[r], s.t[r], w.state.maximum[row], w.state.sum[row],
                           w.out + row * d_.v_columns);
      }
    }
    return fine;
  }

 private:
  template <class E>
  E* row_of(const Array& x, const Item& item, int64_t head, int64_t t) const {
    return static_cast<E*>(x.data) + item.q.b * x.batch + head * x.head + (item.q.q_base + t) * x.row;
  }

  Span item_span(const Workspace& w, const Item& item) const {
    Span keys{item.q.kv_len, 0};
    for (int i = 0; i < item.strips; ++i) {
      const Span s = span(a_, item.q, w.strips[i].t_low, w.strips[i].t_high);
      if (s.empty()) continue;
      keys.low = smaller(keys.low, s.low);
      keys.high = larger(keys.high, s.high);
    }
    return keys;
  }

  void pack_queries(Workspace& w, const Item& item) const {
    for (int i = 0; i < item.strips; ++i) {
      const Strip& s = w.strips[i];
      float* to = w.q + int64_t{i} * kRows * d_.q_units;
      if (!d_.heads_as_rows) {
        pack_plain<S, U>(row_of<const T>(a_.q, item, item.head, s.t[0]), a_.q.row, s.count, a_.head_dim,
                         strip_.q_factor(), to, d_.q_units);
        continue;
      }
      for (int r = 0; r < s.count; ++r) {
        pack_plain<S, U>(row_of<const T>(a_.q, item, s.head[r], s.t[r]), 0, 1, a_.head_dim, strip_.q_factor(),
                         to + r * d_.q_units, d_.q_units);
      }
    }
  }

  void chunk(Workspace& w, const Item& item, int64_t begin, int64_t end, bool careful) const {
    bool packed[kChunk] = {};
    for (int i = 0; i < item.strips; ++i) {
      Visit visit;
      plan<S>(a_, item.q, w.strips[i], begin, end, w.words, &visit);
      if (visit.tiles == 0) continue;
      for (int n = 0; n < visit.tiles && (!strip_.few(item) || careful); ++n) {
        const Tile& tile = visit.tile[n];
        if (packed[tile.slot]) continue;
        packed[tile.slot] = true;
        pack_tile(w, item, tile);
      }
      strip_.strip(w, item, i, visit, careful);
    }
  }

  void pack_tile(Workspace& w, const Item& item, const Tile& tile) const {
    auto key = [&](int64_t j) { return strip_.key_row(a_.k, item, tile.j0 + j); };
    auto value = [&](int64_t j) { return strip_.key_row(a_.v, item, tile.j0 + j); };
    pack_transposed<S, U, T>(key, tile.keys, tile.columns, a_.head_dim,
                             w.k + tile.slot * kTile * strip_.k_units(), kTile, ahead(a_.k));
    pack_rows<S, U, T>(value, tile.keys, tile.columns, a_.value_dim, strip_.packed_values(w, tile),
                       d_.v_columns, ahead(a_.v));
  }

  int64_t ahead(const Array& x) const { return a_.pages.table ? 0 : 32 * x.row; }

  bool finish_row(const Item& item, int64_t head, int64_t t, float maximum, float sum,
                  const float* sums) const {
    // natural scores are kept as they are: the largest floats times log2(e) are infinite
    const bool natural = strip_.scores() == Scores::natural;
    const float to_log2 = natural ? kLog2E : 1.0f;
    float shrink = 1.0f;
    for (int64_t m = 0; a_.sinks && m < a_.sink_count; ++m) {
      const float sink = a_.sinks[head * a_.sink_count + m] * (natural ? 1.0f : kLog2E);
      if (sink > maximum) {
        const float factor = maximum == -kInfinity ? 0.0f : exp2_scalar<S, 5>((maximum - sink) * to_log2);
        if (sum != 0) sum *= factor;  // NaN stays
        shrink *= factor;
        maximum = sink;
      }
      if (sink != -kInfinity) sum += exp2_scalar<S, 5>((sink - maximum) * to_log2);
    }
    T* out = row_of<T>(a_.out, item, head, t);
    const float factor = sum == 0 ? 0.0f : shrink / sum;
    typename S::Vec seen = S::zero();
    const typename S::Vec f = S::fill(factor);
    for (int64_t c = 0; c < a_.value_dim; c += S::kLanes) {
      typename S::Vec x = sum == 0 ? S::zero() : S::mul(S::load(sums + c), f);
      if (a_.value_dim - c >= S::kLanes) {
        S::store(out + c, x);
      } else {
        S::store_some(out + c, x, int(a_.value_dim - c));
      }
      seen = S::fma(x, S::zero(), seen);  // NaN for NaN and infinities
    }
    if (a_.lse.data) {
      *row_of<float>(a_.lse, item, head, t) =
          sum == 0 ? -kInfinity : maximum * (natural ? 1.0f : kLn2) + __builtin_logf(sum);
    }
    return !S::any_nan(seen);
  }

  const Arguments& a_;
  const Division& d_;
  const ForwardStrip<S, U, T> strip_;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

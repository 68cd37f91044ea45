// One strip of query rows against one chunk of keys in the backward pass:
//   P = exp(S - lse);  dV += P^T dO;  dP = dO V^T;  dS = P * (dP - delta);  dQ += dS K;  dK += dS^T Q
// The factor `scale` of dQ and dK is applied where they are written.
#pragma once

#include "kernel/fetcher.h"
#include "kernel/matmul.h"
#include "kernel/pack.h"
#include "kernel/parts.h"
#include "kernel/scores.h"
#include "kernel/softmax.h"
#include "kernel/visit.h"

namespace polyattn::POLYATTN_NAMESPACE {

inline void fill_rows(Strip& s, int64_t head, int64_t first, int64_t end) {
  s.count = int(end - first);
  s.t_low = first;
  s.t_high = end - 1;
  s.one_head = true;
  for (int r = 0; r < s.count; ++r) {
    s.t[r] = first + r;
    s.head[r] = head;
  }
}

template <class S, class T>
inline void write_row(const float* from, int64_t dim, float factor, T* to) {
  const typename S::Vec f = S::fill(factor);
  for (int64_t c = 0; c < dim; c += S::kLanes) {
    const typename S::Vec x = S::mul(S::load(from + c), f);
    if (dim - c >= S::kLanes) {
      S::store(to + c, x);
    } else {
      S::store_some(to + c, x, int(dim - c));
    }
  }
}

template <class S, class U, class T>
class BackwardStrip {
  using Vec = typename S::Vec;
  static constexpr int W = S::kLanes;
  static constexpr int64_t kHalf = kRows / U::kValues;  // units of a strip's rows

 public:
  struct Workspace {
    float *keys_t, *keys, *values_t;       // the chunk: for S, for dQ, for dP
    float *q, *q_rows, *dout, *dout_rows;  // the strip: for S, for dK, for dP, for dV
    float *scores, *dscores, *slopes;      // P and dS by row, d cap
    float *p_columns, *ds_columns;         // P and dS as units of neighbouring rows
    float *dk, *dv, *cleaned;
    float* deltas;  // of the strip's rows
    uint64_t* words;
    Fetcher* fetcher = nullptr;  // the thread's, where what is needed next is fetched between products
  };

  explicit BackwardStrip(const Arguments& a)
      : a_(a), scores_(scores_of<U>(a)), k_units_(units_of<U>(a.head_dim)),
        v_units_(units_of<U>(a.value_dim)), k_row_(round_up(k_units_, W)), v_row_(round_up(v_units_, W)),
        k_columns_(round_up(a.head_dim, W)), v_columns_(round_up(a.value_dim, W)) {
    factor_ = scores_ == Scores::natural ? a.scale : a.scale * kLog2E;
    q_factor_ = U::kValues == 1 ? factor_ : 1.0f;
    adjusting_ = U::kValues == 1 ? 1.0f : factor_;
  }

  int64_t q_columns() const { return k_columns_; }

  size_t layout(float* base, Workspace* w) const {
    MemoryParts parts(base);
    const auto take = [&](int64_t floats) { return parts.take(size_t(floats)); };
    const int64_t pairs = kChunkKeys / U::kValues;
    Workspace local;
    Workspace& to = w ? *w : local;
    to.keys_t = take(k_units_ * kScoreRow);
    to.keys = take(pairs * k_columns_);
    to.values_t = take(v_units_ * kScoreRow);
    to.q = take(kRows * k_row_);
    to.q_rows = take(kHalf * k_columns_);
    to.dout = take(kRows * v_row_);
    to.dout_rows = take(kHalf * v_columns_);
    to.scores = take(kRows * kScoreRow);
    to.dscores = take(kRows * kScoreRow);
    to.slopes = take(a_.softcap > 0 ? kRows * kScoreRow : 0);
    // float operands are read down the columns of P and dS themselves
    to.p_columns = take(U::kValues > 1 ? kHalf * kScoreRow : 0);
    to.ds_columns = take(U::kValues > 1 ? kHalf * kScoreRow : 0);
    to.dk = take(kChunkKeys * k_columns_);
    to.dv = take(kChunkKeys * v_columns_);
    to.cleaned = take(pairs * larger(k_columns_, v_columns_));
    to.deltas = take(kRows);
    to.words = reinterpret_cast<uint64_t*>(take(kRows * kChunk * 2));
    return parts.bytes();
  }

  template <class E>
  E* row(const Array& x, const Sequence& q, int64_t head, int64_t index) const {
    return static_cast<E*>(x.data) + q.b * x.batch + head * x.head + index * x.row;
  }

  void open_chunk(Workspace& w, const Sequence& q, int64_t kv_head, int64_t begin, int64_t end) const {
    const int64_t n = end - begin, padded = round_up(n, 2 * W), columns = round_up(n, kColumnGrain<S, U>);
    auto key = [&](int64_t j) { return row<const T>(a_.k, q, kv_head, q.kv_base + begin + j); };
    auto value = [&](int64_t j) { return row<const T>(a_.v, q, kv_head, q.kv_base + begin + j); };
    const int64_t ahead = w.fetcher ? 32 : 0;
    pack_transposed<S, U, T>(key, n, columns, a_.head_dim, w.keys_t, kScoreRow, ahead * a_.k.row);
    pack_transposed<S, U, T>(value, n, columns, a_.value_dim, w.values_t, kScoreRow, ahead * a_.v.row);
    pack_rows<S, U, T>(key, n, smaller(padded, kChunkKeys), a_.head_dim, w.keys, k_columns_, 0);
    std::memset(w.dk, 0, size_t(n * k_columns_) * 4);
    std::memset(w.dv, 0, size_t(n * v_columns_) * 4);
  }

  // What a strip of queries t to end - 1 is packed from, and its sums.
  void fetch_queries(FetchQueue& to, const Sequence& q, int64_t head, int64_t t, int64_t end,
                     const float* dq) const {
    if (t >= end) return;
    constexpr int64_t kSize = sizeof(T);
    const auto add = [&](const Array& x, int64_t dim) {
      to.add(row<const T>(x, q, head, q.q_base + t), x.row * kSize, end - t, dim * kSize);
    };
    add(a_.q, a_.head_dim);
    add(a_.dout, a_.value_dim);
    if (!a_.delta.data) add(a_.out, a_.value_dim);
    to.add(dq, k_columns_ * 4, end - t, k_columns_ * 4);
  }

  // Writes the gradients of the chunk's keys and values; false if one is NaN.
  bool close_chunk(const Workspace& w, const Sequence& q, int64_t kv_head, int64_t begin, int64_t end) const {
    for (int64_t j = begin; j < end; ++j) {
      write_row<S>(w.dk + (j - begin) * k_columns_, a_.head_dim, a_.scale,
                   row<T>(a_.dk, q, kv_head, q.kv_base + j));
      write_row<S>(w.dv + (j - begin) * v_columns_, a_.value_dim, 1.0f,
                   row<T>(a_.dv, q, kv_head, q.kv_base + j));
    }
    return !holds_nan(w.dk, (end - begin) * k_columns_) && !holds_nan(w.dv, (end - begin) * v_columns_);
  }

  bool holds_nan(const float* x, int64_t count) const {
    Vec seen = S::zero();
    for (int64_t i = 0; i < count; i += W) seen = S::fma(S::load(x + i), S::zero(), seen);
    return S::any_nan(seen);
  }

  // `dq`: the strip's rows of k_columns() sums.
  void strip(Workspace& w, const Sequence& q, const Strip& s, const Visit& visit, float* dq,
             bool careful) const {
    pack_strip(w, q, s);
    const int64_t rows = round_up(s.count, kSumGrain<U>);
    differentiate(w, q, s, visit);
    for (int n = 0; n < visit.tiles; ++n) {
      const Tile& tile = visit.tile[n];
      const int64_t at = int64_t{tile.slot} * kTile;
      if (careful && visit.mixed[n]) {
        keys_by_column(w, s, w.words + int64_t{n} * kRows, tile);
        continue;
      }
      const Piece p{columns_of(w.scores, w.p_columns) + at, w.dout_rows, rows / U::kValues};
      multiply<S, U, Into::add>(&p, 1, {1, kScoreRow, v_columns_, v_columns_}, tile.keys, v_columns_,
                                w.dv + at * v_columns_, nullptr, w.fetcher);
      const Piece ds{columns_of(w.dscores, w.ds_columns) + at, w.q_rows, rows / U::kValues};
      multiply<S, U, Into::add>(&ds, 1, {1, kScoreRow, k_columns_, k_columns_}, tile.keys, k_columns_,
                                w.dk + at * k_columns_, nullptr, w.fetcher);
    }
    queries(w, s, visit, dq, careful);
  }

  // Leaves the gradients of the final scores in w.dscores, as floats; 0 where masked.
  void score_gradients(Workspace& w, const Sequence& q, const Strip& s, const Visit& visit) const {
    pack_strip(w, q, s);
    for (int n = 0; n < visit.tiles; ++n) {
      const Tile& tile = visit.tile[n];
      products(w, q, s, tile);
      const uint64_t* bits = visit.mixed[n] ? w.words + int64_t{n} * kRows : nullptr;
      for (int r = 0; r < s.count; ++r) {
        const RowFacts f = facts(w, q, s, r, bits);
        for (int i = 0; i < tile.columns; i += W) {
          const int64_t place = r * kScoreRow + int64_t{tile.slot} * kTile + i;
          Vec score = S::load(w.scores + place);
          if (bits) score = S::select(f.bits >> i, score, S::fill(-kInfinity));
          Vec grad = S::mul(probability<5>(score, f), S::sub(S::load(w.dscores + place), S::fill(f.delta)));
          if (bits) grad = S::select(f.bits >> i, grad, S::zero());
          S::store(w.dscores + place, grad);
        }
      }
    }
  }

 private:
  const float* columns_of(const float* plain, const float* pairs) const {
    return U::kValues == 1 ? plain : pairs;
  }

  void pack_strip(Workspace& w, const Sequence& q, const Strip& s) const {
    auto query = [&](int64_t r) { return row<const T>(a_.q, q, s.head[0], q.q_base + s.t[0] + r); };
    auto dout = [&](int64_t r) { return row<const T>(a_.dout, q, s.head[0], q.q_base + s.t[0] + r); };
    const int64_t padded = round_up(s.count, kSumGrain<U>);
    pack_plain<S, U>(query(0), a_.q.row, s.count, a_.head_dim, q_factor_, w.q, k_row_);
    pack_plain<S, U>(dout(0), a_.dout.row, s.count, a_.value_dim, 1.0f, w.dout, v_row_);
    pack_rows<S, U, T>(query, s.count, padded, a_.head_dim, w.q_rows, k_columns_, 0);
    pack_rows<S, U, T>(dout, s.count, padded, a_.value_dim, w.dout_rows, v_columns_, 0);
    auto out = [&](int64_t r) { return row<const T>(a_.out, q, s.head[0], q.q_base + s.t[0] + r); };
    for (int r = 0; r < s.count; ++r) {
      w.deltas[r] = a_.delta.data ? *row<const float>(a_.delta, q, s.head[r], q.q_base + s.t[r])
                                  : sum_of_products(dout(r), out(r));
    }
  }

  float sum_of_products(const T* x, const T* y) const {
    Vec sum = S::zero();
    int64_t h = 0;
    for (; h + W <= a_.value_dim; h += W) sum = S::fma(S::load(x + h), S::load(y + h), sum);
    const int some = int(a_.value_dim - h);
    if (some > 0) sum = S::fma(S::load_some(x + h, some), S::load_some(y + h, some), sum);
    return S::sum(sum);
  }

  // Leaves P and dS of the visited tiles, at the columns of their slots, in every form needed.
  void differentiate(Workspace& w, const Sequence& q, const Strip& s, const Visit& visit) const {
    for (int n = 0; n < visit.tiles; ++n) {
      const int64_t at = int64_t{visit.tile[n].slot} * kTile;
      products(w, q, s, visit.tile[n]);
      const uint64_t* bits = visit.mixed[n] ? w.words + int64_t{n} * kRows : nullptr;
      for (int r = 0; r < round_up(s.count, kSumGrain<U>); r += 2)
        pair_of_rows(w, q, s, r, at, visit.tile[n].columns, bits);
    }
  }

  // Final scores and dP of a tile.
  void products(Workspace& w, const Sequence& q, const Strip& s, const Tile& tile) const {
    const int64_t at = int64_t{tile.slot} * kTile;
    const Piece score{w.q, w.keys_t + at, k_units_}, product{w.dout, w.values_t + at, v_units_};
    multiply<S, U, Into::set>(&score, 1, {k_row_, 1, kScoreRow, kScoreRow}, s.count, tile.columns,
                              w.scores + at, nullptr, w.fetcher);
    multiply<S, U, Into::set>(&product, 1, {v_row_, 1, kScoreRow, kScoreRow}, s.count, tile.columns,
                              w.dscores + at, nullptr, w.fetcher);
    if (scores_ == Scores::natural) {
      adjust<S>(a_, q, s, {0, s.count}, tile.j0, tile.keys, adjusting_, w.scores + at, kScoreRow,
                a_.softcap > 0 ? w.slopes + at : nullptr);
    }
  }

  struct RowFacts {
    float lse, delta;  // lse in the units of the scores
    uint64_t bits;
    bool large;
  };

  RowFacts facts(const Workspace& w, const Sequence& q, const Strip& s, int r, const uint64_t* bits) const {
    const int64_t t = q.q_base + s.t[r];
    float lse = *row<const float>(a_.lse, q, s.head[r], t);
    if (lse == -kInfinity) lse = 0;  // no key: all scores are -inf
    if (scores_ != Scores::natural) lse *= kLog2E;
    return {lse, w.deltas[r], bits ? bits[r] : ~uint64_t{0}, lse > kLargeScore || lse < -kLargeScore};
  }

  template <int kDegree>
  POLYATTN_INLINE Vec probability(Vec score, const RowFacts& f) const {
    Vec x;
    if (scores_ == Scores::folded) {
      x = S::sub(score, S::fill(f.lse));
    } else if (scores_ == Scores::natural) {
      x = S::mul(S::sub(score, S::fill(f.lse)), S::fill(kLog2E));
    } else if (f.large) {
      x = S::sub(S::mul(score, S::fill(factor_)), S::fill(f.lse));
    } else {
      x = S::fma(score, S::fill(factor_), S::fill(-f.lse));
    }
    return S::template exp2<kDegree>(x);
  }

  void pair_of_rows(Workspace& w, const Sequence& q, const Strip& s, int r, int64_t at, int columns,
                    const uint64_t* bits) const {
    const int there = s.count - r >= 2 ? 2 : larger(s.count - r, 0);  // of the two; what is padded is 0
    const RowFacts none{0, 0, 0, false}, first = there > 0 ? facts(w, q, s, r, bits) : none,
                                         second = there > 1 ? facts(w, q, s, r + 1, bits) : none;
    Vec p[2][2], ds[2][2];
    for (int i = 0; i < columns; i += 2 * W) {
      const int vectors = columns - i >= 2 * W ? 2 : 1;
      for (int v = 0; v < 2; ++v) {
        for (int k = 0; k < 2; ++k) {
          if (v >= vectors || k >= there) {
            p[k][v] = ds[k][v] = S::zero();
            continue;
          }
          const RowFacts& f = k == 0 ? first : second;
          const int64_t place = (r + k) * kScoreRow + at + i + v * W;
          const Vec score = S::load(w.scores + place);
          Vec grad = S::load(w.dscores + place);
          Vec prob = probability<U::kDegree>(score, f);
          // of the probability, not of the score: where the row's lse is NaN, exp(-inf) is NaN as well
          if (bits) prob = S::select(f.bits >> (i + v * W), prob, S::zero());
          grad = S::mul(prob, S::sub(grad, S::fill(f.delta)));
          if (a_.softcap > 0) grad = S::mul(grad, S::load(w.slopes + place));
          if (bits) grad = S::select(f.bits >> (i + v * W), grad, S::zero());
          p[k][v] = prob;
          ds[k][v] = grad;
        }
      }
      keep(w, r, there, at + i, vectors, p, ds);
    }
  }

  POLYATTN_INLINE void keep(Workspace& w, int r, int there, int64_t at, int vectors, const Vec (&p)[2][2],
                            const Vec (&ds)[2][2]) const {
    if constexpr (U::kValues == 1) {
      for (int k = 0; k < there; ++k) {
        for (int v = 0; v < vectors; ++v) {
          S::store(w.scores + (r + k) * kScoreRow + at + v * W, p[k][v]);
          S::store(w.dscores + (r + k) * kScoreRow + at + v * W, ds[k][v]);
        }
      }
    } else {
      for (int v = 0; v < vectors; ++v) {
        const int64_t place = int64_t{r} / 2 * kScoreRow + at + v * W;
        S::store(w.p_columns + place, S::zip(p[0][v], p[1][v]));
        S::store(w.ds_columns + place, S::zip(ds[0][v], ds[1][v]));
      }
      // pairs of neighbouring keys, packed to the front of the tile's part of the row
      const int64_t tile = at / kTile * kTile, inside = at - tile;
      for (int k = 0; k < there; ++k)
        S::store(w.dscores + (r + k) * kScoreRow + tile + inside / 2, S::pairs(ds[k][0], ds[k][1]));
    }
  }

  void queries(Workspace& w, const Strip& s, const Visit& visit, float* dq, bool careful) const {
    if (!careful) {
      Piece pieces[kChunk];
      for (int n = 0; n < visit.tiles; ++n) pieces[n] = query_piece(w, visit.tile[n], 0);
      multiply<S, U, Into::add>(pieces, visit.tiles, {kScoreRow, 1, k_columns_, k_columns_}, s.count,
                                k_columns_, dq, nullptr, w.fetcher);
      return;
    }
    for (int r = 0; r < s.count; ++r) {
      Piece pieces[kChunk];
      for (int n = 0; n < visit.tiles; ++n) {
        pieces[n] = query_piece(w, visit.tile[n], r);
        if (!visit.mixed[n]) continue;
        float* own = w.cleaned + int64_t{n} * kTile / U::kValues * k_columns_;
        clean<U>(pieces[n].b, pieces[n].count, k_columns_, w.words[int64_t{n} * kRows + r], own);
        pieces[n].b = own;
      }
      multiply<S, U, Into::add>(pieces, visit.tiles, {kScoreRow, 1, k_columns_, k_columns_}, 1, k_columns_,
                                dq + r * k_columns_);
    }
  }

  Piece query_piece(const Workspace& w, const Tile& tile, int64_t r) const {
    const int64_t at = int64_t{tile.slot} * kTile;
    return {w.dscores + r * kScoreRow + at, w.keys + at / U::kValues * k_columns_, tile.columns / U::kValues};
  }

  // Each key with the rows that see it only, so that no 0 meets what is not finite.
  void keys_by_column(Workspace& w, const Strip& s, const uint64_t* words, const Tile& tile) const {
    const int64_t at = int64_t{tile.slot} * kTile, units = round_up(s.count, kSumGrain<U>) / U::kValues;
    for (int64_t j = 0; j < tile.keys; ++j) {
      uint64_t seen = 0;
      for (int r = 0; r < s.count; ++r) seen |= (words[r] >> j & 1) << r;
      clean<U>(w.dout_rows, units, v_columns_, seen, w.cleaned);
      const Piece p{columns_of(w.scores, w.p_columns) + at + j, w.cleaned, units};
      multiply<S, U, Into::add>(&p, 1, {1, kScoreRow, v_columns_, v_columns_}, 1, v_columns_,
                                w.dv + (at + j) * v_columns_);
      clean<U>(w.q_rows, units, k_columns_, seen, w.cleaned);
      const Piece ds{columns_of(w.dscores, w.ds_columns) + at + j, w.cleaned, units};
      multiply<S, U, Into::add>(&ds, 1, {1, kScoreRow, k_columns_, k_columns_}, 1, k_columns_,
                                w.dk + (at + j) * k_columns_);
    }
  }

  const Arguments& a_;
  const Scores scores_;
  const int64_t k_units_, v_units_, k_row_, v_row_, k_columns_, v_columns_;
  float factor_, q_factor_, adjusting_;  // the last: for what soft cap and bias need
};

}  // namespace polyattn::POLYATTN_NAMESPACE

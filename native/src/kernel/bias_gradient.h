// The gradient of an additive bias, in a pass of its own: entries that several heads or batch
// entries share are summed by one thread, in order. Two products a tile.
#pragma once

#include "kernel/backward_strip.h"
#include "threads.h"

namespace polyattn::POLYATTN_NAMESPACE {

template <class S, class U, class T>
class BiasGradient {
 public:
  static bool run(const Arguments& a) {
    BiasGradient self(a);
    self.zero();
    if (self.items() == 0) return true;
    parallel(a.threads, [](void* p, int) { static_cast<BiasGradient*>(p)->work(); }, &self);
    return !self.failed_;
  }

 private:
  using Kernel = BackwardStrip<S, U, T>;

  explicit BiasGradient(const Arguments& a)
      : a_(a), kernel_(a), batch_(a.dbias_batch ? a.batch : 1), heads_(a.dbias_head ? a.q_heads : 1),
        strips_(a.dbias_row ? blocks_of(a.q_len, kRows) : 1) {}

  int64_t items() const { return a_.batch * a_.q_heads == 0 ? 0 : batch_ * heads_ * strips_; }

  void zero() {
    const int64_t rows = a_.dbias_row ? a_.q_len : 1, columns = a_.dbias_column ? a_.kv_len : 1;
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t n = 0; n < heads_; ++n) {
        for (int64_t t = 0; t < rows; ++t) {
          float* to = a_.dbias + b * a_.dbias_batch + n * a_.dbias_head + t * a_.dbias_row;
          for (int64_t j = 0; j < columns; ++j) to[j * a_.dbias_column] = 0;
        }
      }
    }
  }

  void work() {
    [[maybe_unused]] const typename U::Session session;
    typename Kernel::Workspace w;
    float* base = reinterpret_cast<float*>(scratch(kernel_.layout(nullptr, nullptr)));
    if (!base) {
      __atomic_store_n(&failed_, true, __ATOMIC_RELAXED);
      return;
    }
    kernel_.layout(base, &w);
    for (;;) {
      const int64_t item = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
      if (item >= items()) return;
      const int64_t strip = item % strips_, head = item / strips_ % heads_, b = item / strips_ / heads_;
      for (int64_t i = batch_ > 1 ? b : 0; i < (batch_ > 1 ? b + 1 : a_.batch); ++i) {
        for (int64_t n = heads_ > 1 ? head : 0; n < (heads_ > 1 ? head + 1 : a_.q_heads); ++n) {
          const int64_t first = strips_ > 1 ? strip * kRows : 0, end = strips_ > 1 ? first + kRows : a_.q_len;
          for (int64_t t = first; t < smaller(end, a_.q_len); t += kRows) rows(w, i, n, t);
        }
      }
    }
  }

  void rows(typename Kernel::Workspace& w, int64_t b, int64_t head, int64_t first) {
    const Sequence q = sequence_of(a_, b);
    if (first >= q.q_len) return;
    Strip s;
    fill_rows(s, head, first, smaller(first + kRows, q.q_len));
    for (int64_t j = 0; j < q.kv_len; j += kChunkKeys) {
      const int64_t high = smaller(j + kChunkKeys, q.kv_len);
      Visit visit;
      plan<S, U>(a_, q, s, j, high, w.words, &visit);
      if (visit.tiles == 0) continue;
      kernel_.open_chunk(w, q, head / (a_.q_heads / a_.kv_heads), j, high);
      kernel_.score_gradients(w, q, s, visit);
      for (int n = 0; n < visit.tiles; ++n) add(w, q, s, visit.tile[n]);
    }
  }

  void add(const typename Kernel::Workspace& w, const Sequence& q, const Strip& s, const Tile& tile) {
    for (int r = 0; r < s.count; ++r) {
      const float* from = w.dscores + r * kScoreRow + int64_t{tile.slot} * kTile;
      float* to = a_.dbias + q.b * a_.dbias_batch + s.head[r] * a_.dbias_head + s.t[r] * a_.dbias_row;
      for (int i = 0; i < tile.keys; ++i) to[(tile.j0 + i) * a_.dbias_column] += from[i];
    }
  }

  const Arguments& a_;
  const Kernel kernel_;
  const int64_t batch_, heads_, strips_;
  int64_t next_ = 0;
  bool failed_ = false;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

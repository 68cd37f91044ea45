// The backward pass: probabilities are recomputed tile by tile from the saved log-sum-exp.
//
// An item is one key/value head and a part of its keys. Chunks of keys are packed once and met by
// every strip of query rows that sees them; gradients of keys and values stay with the chunk,
// those of queries gather over the chunks, always in the same order (FlashAttention-2, Dao 2023,
// with the loops of one item on one thread instead of atomic additions). Five products a tile.
#pragma once

#include "kernel/bias_gradient.h"
#include "kernel/division.h"
#include "threads.h"

namespace polyattn::POLYATTN_NAMESPACE {

template <class S, class U, class T>
class Backward {
 public:
  static bool run(const Arguments& a) {
    if (a.batch > 0 && a.kv_heads > 0) {
      Backward self(a);
      if (!self.allocate()) return false;
      parallel(self.threads_, [](void* p, int thread) { static_cast<Backward*>(p)->work(thread); }, &self);
      __builtin_free(self.memory_);
      if (self.failed_) return false;
    }
    return !a.dbias || BiasGradient<S, U, T>::run(a);
  }

 private:
  using Kernel = BackwardStrip<S, U, T>;

  explicit Backward(const Arguments& a) : a_(a), kernel_(a), group_(a.q_heads / a.kv_heads) {
    const int64_t heads = a.batch * a.kv_heads;
    // by the problem alone, so that results do not depend on the number of threads
    splits_ = heads >= 16 ? 1 : smaller(blocks_of(16, heads), larger<int64_t>(a.kv_len / 512, 1));
    items_ = heads * splits_;
    threads_ = worthwhile(a, items_);
    dq_size_ = group_ * a.q_len * kernel_.q_columns();
    buffers_ = splits_ > 1 ? items_ : threads_;
  }

  bool allocate() {
    const size_t floats = size_t(buffers_ * dq_size_), counters = size_t(heads()) * sizeof(int);
    memory_ = static_cast<float*>(__builtin_malloc(floats * 4 + counters + 64));
    if (!memory_) return false;
    done_ = reinterpret_cast<int*>(memory_ + floats);
    std::memset(done_, 0, counters);
    return true;
  }

  int64_t heads() const { return a_.batch * a_.kv_heads; }

  void work(int thread) {
    [[maybe_unused]] const typename U::Session session;
    typename Kernel::Workspace w;
    const size_t bytes = kernel_.layout(nullptr, nullptr);
    float* base = reinterpret_cast<float*>(scratch(bytes));
    if (!base) {
      __atomic_store_n(&failed_, true, __ATOMIC_RELAXED);
      return;
    }
    kernel_.layout(base, &w);
    Fetcher fetcher;
    fetcher.soon.clear();
    fetcher.later.clear();
    if (fetch_between_blocks && !U::kInTiles) w.fetcher = &fetcher;  // in tiles nothing is gained
    for (;;) {
      const int64_t item = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
      if (item >= items_) return;
      const int64_t head = item / splits_, split = item % splits_;
      float* dq = memory_ + (splits_ > 1 ? item : thread) * dq_size_;
      const Sequence q = sequence_of(a_, head / a_.kv_heads);
      const int64_t kv_head = head % a_.kv_heads;
      if (!keys(w, q, kv_head, split, dq, false) && a_.terms > 0) keys(w, q, kv_head, split, dq, true);
      if (__atomic_add_fetch(&done_[head], 1, __ATOMIC_ACQ_REL) < splits_) continue;
      write_queries(q, kv_head, memory_ + (splits_ > 1 ? head * splits_ : thread) * dq_size_);
    }
  }

  // One part of the keys of a head; false if a gradient is NaN.
  bool keys(typename Kernel::Workspace& w, const Sequence& q, int64_t kv_head, int64_t split, float* dq,
            bool careful) {
    std::memset(dq, 0, size_t(group_ * q.q_len * kernel_.q_columns()) * 4);
    const int64_t size = round_up(blocks_of(q.kv_len, splits_), kTile);
    const int64_t end = smaller(q.kv_len, (split + 1) * size);
    bool fine = true;
    for (int64_t j = split * size; j < end; j += kChunkKeys) {
      const int64_t high = smaller(j + kChunkKeys, end);
      kernel_.open_chunk(w, q, kv_head, j, high);
      for (int64_t g = 0; g < group_; ++g) {
        for (int64_t t = 0; t < q.q_len; t += kRows) {
          Strip s;
          fill_rows(s, kv_head * group_ + g, t, smaller(t + kRows, q.q_len));
          Visit visit;
          plan<S, U>(a_, q, s, j, high, w.words, &visit);
          if (visit.tiles == 0) continue;
          if (w.fetcher) fetch_next(w, q, kv_head, g, t + kRows, dq);
          kernel_.strip(w, q, s, visit, dq + (g * q.q_len + t) * kernel_.q_columns(), careful);
        }
      }
      fine &= kernel_.close_chunk(w, q, kv_head, j, high);
    }
    return fine && !kernel_.holds_nan(dq, group_ * q.q_len * kernel_.q_columns());
  }

  // The strip after the one that is run now, in the order in which a chunk meets them.
  void fetch_next(typename Kernel::Workspace& w, const Sequence& q, int64_t kv_head, int64_t g, int64_t t,
                  const float* dq) const {
    w.fetcher->soon.clear();
    if (t >= q.q_len) t = 0, ++g;
    if (g == group_) return;
    kernel_.fetch_queries(w.fetcher->soon, q, kv_head * group_ + g, t, smaller(t + kRows, q.q_len),
                          dq + (g * q.q_len + t) * kernel_.q_columns());
  }

  void write_queries(const Sequence& q, int64_t kv_head, float* dq) const {
    const int64_t columns = kernel_.q_columns();
    for (int64_t g = 0; g < group_; ++g) {
      for (int64_t t = 0; t < q.q_len; ++t) {
        float* sum = dq + (g * q.q_len + t) * columns;
        for (int64_t i = 1; i < splits_; ++i) {
          for (int64_t c = 0; c < columns; c += S::kLanes)
            S::store(sum + c, S::add(S::load(sum + c), S::load(sum + i * dq_size_ + c)));
        }
        write_row<S>(sum, a_.head_dim, a_.scale,
                     kernel_.template row<T>(a_.dq, q, kv_head * group_ + g, q.q_base + t));
      }
    }
  }

  const Arguments& a_;
  const Kernel kernel_;
  const int64_t group_;
  int64_t splits_, items_, dq_size_, buffers_;
  int threads_;
  float* memory_ = nullptr;
  int* done_ = nullptr;
  int64_t next_ = 0;
  bool failed_ = false;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

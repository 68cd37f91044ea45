// The forward pass: threads take items from a counter. Where there are few items their keys are split as
// well, and the thread that ends last merges the parts.
#pragma once

#include "kernel/forward_item.h"
#include "threads.h"

namespace polyattn::POLYATTN_NAMESPACE {

// The memory in which parts of the keys meet: sums of rows, their states, and a count of parts done.
struct Parts {
  float* out = nullptr;
  RowStates state{};
  int* done = nullptr;
};

template <class S, class U, class T>
class Forward {
 public:
  static bool run(const Arguments& a) {
    Forward self(a);
    if (self.d_.items == 0) return true;
    const int64_t tasks = self.d_.items * self.d_.splits;
    if (self.d_.splits > 1 && !self.make_parts()) return false;
    parallel(worthwhile(a, tasks), [](void* p, int) { static_cast<Forward*>(p)->work(); }, &self);
    __builtin_free(self.memory_);
    return !self.failed_;
  }

 private:
  explicit Forward(const Arguments& a) : a_(a), d_(divide<S, U>(a)), item_(a, d_) {}

  bool make_parts() {
    const size_t rows = size_t(d_.items * d_.splits * d_.rows);
    const size_t sums = rows * size_t(d_.v_columns);
    memory_ = static_cast<float*>(
        __builtin_malloc((sums + 2 * rows) * sizeof(float) + size_t(d_.items) * sizeof(int)));
    if (!memory_) return false;
    parts_.out = memory_;
    parts_.state = {memory_ + sums, memory_ + sums + rows};
    parts_.done = reinterpret_cast<int*>(memory_ + sums + 2 * rows);
    std::memset(parts_.done, 0, size_t(d_.items) * sizeof(int));
    return true;
  }

  void work() {
    const size_t bytes = Workspace::layout(d_, item_.k_units(), nullptr, nullptr);
    float* base = reinterpret_cast<float*>(scratch(bytes));
    if (!base) {
      __atomic_store_n(&failed_, true, __ATOMIC_RELAXED);
      return;
    }
    Workspace w;
    Workspace::layout(d_, item_.k_units(), base, &w);
    const int64_t tasks = d_.items * d_.splits;
    for (;;) {
      const int64_t task = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
      if (task >= tasks) return;
      if (d_.splits == 1) {
        whole(w, task);
      } else {
        part(w, task % d_.items, task / d_.items);  // heads whose rows lie side by side, side by side
      }
    }
  }

  void whole(Workspace& w, int64_t number) {
    Item item;
    if (!open_item(a_, d_, number, w.strips, &item)) return;
    item_.attend(w, item, 0, 1, false);
    if (!item_.finish(w, item) && a_.terms > 0) {
      item_.attend(w, item, 0, 1, true);
      item_.finish(w, item);
    }
  }

  void part(Workspace& w, int64_t number, int64_t split) {
    Item item;
    if (!open_item(a_, d_, number, w.strips, &item)) return;
    item_.attend(w, item, split, d_.splits, false);
    keep(w, item, number * d_.splits + split);
    const int done = __atomic_add_fetch(&parts_.done[number], 1, __ATOMIC_ACQ_REL);
    if (done < d_.splits) return;
    merge(w, item, number);
    if (item_.finish(w, item) || a_.terms == 0) return;
    for (int64_t i = 0; i < d_.splits; ++i) {
      item_.attend(w, item, i, d_.splits, true);
      keep(w, item, number * d_.splits + i);
    }
    merge(w, item, number);
    item_.finish(w, item);
  }

  void keep(const Workspace& w, const Item& item, int64_t place) {
    std::memcpy(parts_.out + place * d_.rows * d_.v_columns, w.out, size_t(item.rows * d_.v_columns) * 4);
    std::memcpy(parts_.state.maximum + place * d_.rows, w.state.maximum, size_t(item.rows) * 4);
    std::memcpy(parts_.state.sum + place * d_.rows, w.state.sum, size_t(item.rows) * 4);
  }

  // In the order of the keys, whichever part was done first.
  void merge(Workspace& w, const Item& item, int64_t number) {
    const float unit = item_.scores() == Scores::natural ? kLog2E : 1.0f;
    for (int64_t r = 0; r < item.rows; ++r) {
      float top = -kInfinity;
      for (int64_t i = 0; i < d_.splits; ++i) {
        const float m = parts_.state.maximum[(number * d_.splits + i) * d_.rows + r];
        top = m > top ? m : top;
      }
      float* out = w.out + r * d_.v_columns;
      std::memset(out, 0, size_t(d_.v_columns) * 4);
      float total = 0;
      for (int64_t i = 0; i < d_.splits; ++i) {
        const int64_t place = (number * d_.splits + i) * d_.rows + r;
        const float maximum = parts_.state.maximum[place], sum = parts_.state.sum[place];
        if (sum == 0) continue;  // no visible keys
        // NaN scores leave no maximum, but a NaN sum
        const float weight = maximum == -kInfinity ? 1.0f : exp2_scalar<S, 5>((maximum - top) * unit);
        total += sum * weight;
        const float* from = parts_.out + place * d_.v_columns;
        const typename S::Vec f = S::fill(weight);
        for (int64_t c = 0; c < d_.v_columns; c += S::kLanes)
          S::store(out + c, S::fma(S::load(from + c), f, S::load(out + c)));
      }
      w.state.maximum[r] = top;
      w.state.sum[r] = total;
    }
  }

  const Arguments& a_;
  const Division d_;
  const ForwardItem<S, U, T> item_;
  Parts parts_;
  float* memory_ = nullptr;
  int64_t next_ = 0;
  bool failed_ = false;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

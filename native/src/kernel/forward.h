// The forward pass: threads take items from a counter. Where there are few items their keys are split as
// well, and the thread that ends last merges the parts. Where few rows meet many heads a thread begins with
// heads of its own.
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

// T: of queries and outputs; C: of keys and values as they are stored.
template <class S, class U, class T, class C = T>
class Forward {
 public:
  static bool run(const Arguments& a) {
    Forward self(a);
    if (self.d_.items == 0) return true;
    const int64_t tasks = self.tasks();
    if (self.d_.splits > 1 && !self.make_parts()) return false;
    self.threads_ = worthwhile(a, tasks);
    if (self.d_.splits == 1 && rows_of_head(a) <= kFewRows) {
      self.own_ = self.d_.tasks_per_batch * 3 / 4 / self.threads_;
    }
    parallel(self.threads_, [](void* p, int thread) { static_cast<Forward*>(p)->work(thread); }, &self);
    __builtin_free(self.memory_);
    return !self.failed_;
  }

 private:
  explicit Forward(const Arguments& a) : a_(a), d_(divide<S, U>(a)), item_(a, d_), along_(along(a, d_)) {}

  // Whether a thread goes along the keys, from one part to the next. Not where heads lie side by side that do not
  // walk together: neighbouring heads' parts are neighbours in memory then.
  static bool along(const Arguments& a, const Division& d) {
    return d.splits > 1 && rows_of_head(a) <= kFewRows && (d.together > 1 || a.k.head > a.k.row);
  }

  int64_t tasks() const { return a_.batch * d_.tasks_per_batch * d_.splits; }

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

  void work(int thread) {
    [[maybe_unused]] const typename U::Session session;
    const size_t bytes = Workspace::layout(a_, d_, item_.k_units(), nullptr, nullptr);
    float* base = reinterpret_cast<float*>(scratch(bytes));
    if (!base) {
      __atomic_store_n(&failed_, true, __ATOMIC_RELAXED);
      return;
    }
    Workspace w;
    Workspace::layout(a_, d_, item_.k_units(), base, &w);
    Fetcher fetcher;
    w.fetcher = &fetcher;
    if (d_.splits == 1 && rows_of_head(a_) > kFewRows) return whole_items(w);
    own_heads(w, thread);
    const int64_t rest = d_.tasks_per_batch - own_ * threads_, tasks = a_.batch * rest * d_.splits;
    const int64_t groups = tasks / d_.splits;
    for (int64_t task, end; take(tasks, &task, &end);) {
      for (const int64_t first = task; task < end; ++task) {
        const int64_t split = along_ ? task % d_.splits : task / groups;
        const Part part{split, d_.splits, along_ && task > first && split > 0,
                        along_ && task + 1 < end && split + 1 < d_.splits};
        const int64_t group = along_ ? task / d_.splits : task % groups;
        const int64_t sequence = own_ == 0 ? 0 : group / rest;
        const int64_t number =
            own_ == 0 ? group : sequence * d_.tasks_per_batch + own_ * threads_ + group % rest;
        d_.together == 1 ? alone(w, number, part) : together(w, number, part);
      }
    }
  }

  // Three quarters of each sequence's heads, in every call the same ones for each thread: their keys lie one behind
  // another, and a cache may hold them still. The others are taken by who is done first.
  void own_heads(Workspace& w, int thread) {
    for (int64_t sequence = 0; own_ > 0 && sequence < a_.batch; ++sequence) {
      const int64_t first = sequence * d_.tasks_per_batch + own_ * thread;
      for (int64_t task = first; task < first + own_; ++task) {
        d_.together == 1 ? alone(w, task, Part{0, 1}) : together(w, task, Part{0, 1});
      }
    }
  }

  // Whole items of many rows. Where there are many of these the next one is taken before one is run, so that what it
  // begins with is fetched meanwhile.
  void whole_items(Workspace& w) {
    Item items[2];
    Strip* const strips[2] = {w.strips, w.strips + kMostStrips};
    const int64_t tasks = this->tasks();
    int at = 0;
    for (bool here = open_next(strips[at], &items[at]); here; at ^= 1) {
      const int next = at ^ 1;
      const bool early = tasks - __atomic_load_n(&next_, __ATOMIC_RELAXED) > 2 * threads_;
      if (early) here = open_next(strips[next], &items[next]);
      const bool known = early && here && !item_.few(items[next]);
      w.strips = strips[at];
      whole(w, items[at], known ? Upcoming{&items[next], strips[next]} : Upcoming{});
      if (!early) here = open_next(strips[next], &items[next]);
    }
  }

  bool open_next(Strip* strips, Item* item) {
    const int64_t tasks = this->tasks();
    for (int64_t task; (task = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED)) < tasks;) {
      if (open_item(a_, d_, task, strips, item)) return true;
    }
    return false;
  }

  void whole(Workspace& w, const Item& item, const Upcoming& upcoming) {
    if (item_.few(item)) {  // the last rows of a sequence
      item_.attend(w, item, Part{0, 1}, false);
      end(w, item, 0, 0);
    } else if (!item_.attend_whole(w, item, upcoming, false) && item_.doubtful(item)) {
      item_.attend_whole(w, item, upcoming, true);
    }
  }

  // The next tasks, of which the first ones come many at a time where they are parts of the same keys; false if
  // there are none left.
  bool take(int64_t tasks, int64_t* first, int64_t* end) {
    int64_t count = 1;
    if (along_) {
      const int64_t left = tasks - __atomic_load_n(&next_, __ATOMIC_RELAXED);
      count = larger<int64_t>(left / (int64_t{2} * threads_), 1);
    }
    *first = __atomic_fetch_add(&next_, count, __ATOMIC_RELAXED);
    *end = smaller(*first + count, tasks);
    return *first < tasks;
  }

  void alone(Workspace& w, int64_t number, const Part& part) {
    Item item;
    if (!open_item(a_, d_, number, w.strips, &item)) return;
    item_.attend(w, item, part, false);
    end(w, item, number, part.split);
  }

  void together(Workspace& w, int64_t group, const Part& part) {
    const int64_t per_batch = d_.items / a_.batch, inner = group % d_.tasks_per_batch * d_.together;
    const int64_t first = group / d_.tasks_per_batch * per_batch + inner;
    const int count = int(smaller(d_.together, per_batch - inner));
    Item items[kMostTogether];
    for (int i = 0; i < count; ++i) {
      if (!open_item(a_, d_, first + i, w.strips + i, items + i)) return;
    }
    item_.attend_together(w, items, count, part);
    for (int i = 0; i < count; ++i) {
      Workspace own = w.of(d_, i);
      end(own, items[i], first + i, part.split);
    }
  }

  // What remains to do where a part of an item, or all of it, was attended to.
  void end(Workspace& w, const Item& item, int64_t number, int64_t split) {
    if (d_.splits == 1) {
      if (item_.finish(w, item, false) || !item_.doubtful(item)) return;
      item_.attend(w, item, Part{0, 1}, true);
      item_.finish(w, item, true);
      return;
    }
    keep(w, item, number * d_.splits + split);
    const int done = __atomic_add_fetch(&parts_.done[number], 1, __ATOMIC_ACQ_REL);
    if (done < d_.splits) return;
    merge(w, item, number);
    if (item_.finish(w, item, false) || !item_.doubtful(item)) return;
    for (int64_t i = 0; i < d_.splits; ++i) {
      item_.attend(w, item, Part{i, d_.splits}, true);
      keep(w, item, number * d_.splits + i);
    }
    merge(w, item, number);
    item_.finish(w, item, true);
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
  const ForwardItem<S, U, T, C> item_;
  const bool along_;
  int threads_ = 1;
  int64_t own_ = 0;  // tasks of a sequence that each thread begins with
  Parts parts_;
  float* memory_ = nullptr;
  int64_t next_ = 0;
  bool failed_ = false;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

// From sums of values and the rows' states to outputs, and to the lse where it is wanted.
#pragma once

#include <cstring>

#include "kernel/few_rows.h"

namespace polyattn::POLYATTN_NAMESPACE {

// T: of outputs.
template <class S, class U, class T>
class Outputs {
  using Vec = typename S::Vec;

 public:
  Outputs(const Arguments& a, const Division& d, const ScoreUnits<U>& units)
      : a_(a), d_(d), natural_(units.kind == Scores::natural) {}

  // A strip's rows; false if an output is NaN. `row`: the first of them in the workspace. `split`: as many sums have
  // even and odd columns apart.
  bool write(const Workspace& w, const Item& item, const Strip& s, int64_t row, int64_t split) const {
    const RowStates state{w.state.maximum + row, w.state.sum + row};
    alignas(64) float factors[kRows];
    for (int r = 0; r < kRows; r += S::kLanes) S::store(factors + r, S::fill(1.0f));
    uint64_t none = 0;  // rows that saw no key: there may be no sums of their values
    for (int r = 0; r < s.count; ++r) {
      none |= uint64_t{state.sum[r] == 0} << r;
      if (a_.sinks) factors[r] = add_sinks(s.head[r], state.maximum[r], state.sum[r]);
    }
    for (int r = 0; r < s.count; r += S::kLanes)
      S::store(factors + r, S::div(S::load(factors + r), S::load(state.sum + r)));
    Vec seen[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
    for (int r = 0; r < s.count; ++r) {
      T* const out = row_of<T>(a_.out, item, s.head[r], s.t[r]);
      if (none >> r & 1) {
        std::memset(out, 0, size_t(a_.value_dim) * sizeof(T));
      } else {
        write_row(w.out + (row + r) * d_.v_columns, factors[r], split, out, seen);
      }
      if (a_.lse.data) *row_of<float>(a_.lse, item, s.head[r], s.t[r]) = lse(state.maximum[r], state.sum[r]);
    }
    return !S::any_nan(S::add(S::add(seen[0], seen[1]), S::add(seen[2], seen[3])));
  }

 private:
  // Adds a head's sinks to a row's state; returns what its sums shrink by.
  float add_sinks(int64_t head, float& maximum, float& sum) const {
    // natural scores are kept as they are: the largest floats times log2(e) are infinite
    const float to_log2 = natural_ ? kLog2E : 1.0f;
    float shrink = 1.0f;
    for (int64_t m = 0; m < a_.sink_count; ++m) {
      const float sink = a_.sinks[head * a_.sink_count + m] * (natural_ ? 1.0f : kLog2E);
      if (sink > maximum) {
        const float factor = maximum == -kInfinity ? 0.0f : exp2_scalar<S, 5>((maximum - sink) * to_log2);
        if (sum != 0) sum *= factor;  // NaN stays
        shrink *= factor;
        maximum = sink;
      }
      if (sink != -kInfinity) sum += exp2_scalar<S, 5>((sink - maximum) * to_log2);
    }
    return shrink;
  }

  float lse(float maximum, float sum) const {
    if (sum == 0) return -kInfinity;
    return maximum * (natural_ ? 1.0f : kLn2) + __builtin_logf(sum);
  }

  // `seen` becomes NaN by NaN and infinities.
  POLYATTN_INLINE void write_row(const float* sums, float factor, int64_t split, T* out,
                                 Vec (&seen)[4]) const {
    constexpr int W = S::kLanes;
    const Vec f = S::fill(factor);
    int64_t c = 0;
    if constexpr (kApart<U, T>) {
      for (; c < split; c += 2 * W) {
        Vec x = S::mul(S::load(sums + c), f), y = S::mul(S::load(sums + c + W), f);
        seen[0] = S::fma(x, S::zero(), seen[0]);
        seen[1] = S::fma(y, S::zero(), seen[1]);
        S::put_together(x, y);
        S::store(out + c, x);
        S::store(out + c + W, y);
      }
    }
    for (; c + 4 * W <= a_.value_dim; c += 4 * W) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const Vec x = S::mul(S::load(sums + c + i * W), f);
        S::store(out + c + i * W, x);
        seen[i] = S::fma(x, S::zero(), seen[i]);
      }
    }
    for (; c < a_.value_dim; c += W) {
      const Vec x = S::mul(S::load(sums + c), f);
      if (a_.value_dim - c >= W) {
        S::store(out + c, x);
      } else {
        S::store_some(out + c, x, int(a_.value_dim - c));
      }
      seen[0] = S::fma(x, S::zero(), seen[0]);
    }
  }

  const Arguments& a_;
  const Division& d_;
  const bool natural_;
};

}  // namespace polyattn::POLYATTN_NAMESPACE

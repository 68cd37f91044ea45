// The forward pass on keys and values that are codes: which element types and units it runs in.
//
// Queries of bfloat16 take its products: every code is a bfloat16, scales of keys go into the scores. Many rows
// round the values that they share. Few rows, which read each key once, do so where the instruction set makes
// units of codes; else they are computed in float32, and so is all that has no better unit: queries of other
// types are converted before, outputs after.
#pragma once

#include "kernel/forward.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Queries and outputs of a call as float32, contiguous (B, N, T, H).
template <class S, class T>
class FloatCopies {
 public:
  explicit FloatCopies(const Arguments& a) : a_(a) {
    const int64_t rows = a.batch * a.q_heads * a.q_len;
    memory_ =
        static_cast<float*>(__builtin_malloc(size_t(rows * (a.head_dim + a.value_dim)) * sizeof(float)));
    q_ = memory_;
    out_ = memory_ + rows * a.head_dim;
  }
  ~FloatCopies() { __builtin_free(memory_); }
  FloatCopies(const FloatCopies&) = delete;

  // The call on the copies; false if there was no memory.
  template <class Run>
  bool run(Run run) {
    if (!memory_) return false;
    each_row(
        [this](int64_t row, int64_t place) {
          const T* from = static_cast<const T*>(a_.q.data) + place;
          convert(from, a_.head_dim, q_ + row * a_.head_dim);
        },
        a_.q);
    Arguments copied = a_;
    copied.dtype = DType::f32;
    copied.q = {q_, a_.q_heads * a_.q_len * a_.head_dim, a_.q_len * a_.head_dim, a_.head_dim, {}};
    copied.out = {out_, a_.q_heads * a_.q_len * a_.value_dim, a_.q_len * a_.value_dim, a_.value_dim, {}};
    if (!run(copied)) return false;
    each_row(
        [this](int64_t row, int64_t place) {
          T* to = static_cast<T*>(a_.out.data) + place;
          convert(out_ + row * a_.value_dim, a_.value_dim, to);
        },
        a_.out);
    return true;
  }

 private:
  template <class From, class To>
  static void convert(const From* from, int64_t n, To* to) {
    int64_t i = 0;
    for (; i + S::kLanes <= n; i += S::kLanes) S::store(to + i, S::load(from + i));
    if (i < n) S::store_some(to + i, S::load_some(from + i, int(n - i)), int(n - i));
  }

  template <class Each>
  void each_row(Each each, const Array& x) const {
    int64_t row = 0;
    for (int64_t b = 0; b < a_.batch; ++b) {
      for (int64_t n = 0; n < a_.q_heads; ++n) {
        for (int64_t t = 0; t < a_.q_len; ++t) each(row++, b * x.batch + n * x.head + t * x.row);
      }
    }
  }

  const Arguments& a_;
  float *memory_, *q_, *out_;
};

// The unit of codes that are not multiplied as bfloat16.
template <class Half, class C>
constexpr auto code_unit() {
  if constexpr (Half::kInTiles && std::is_same_v<C, int8_t>) {
    return ByteTileUnit<typename Half::Tiles>{};
  } else {
    return FloatUnit{};
  }
}

template <class S, class Half, class C>
bool forward_coded(const Arguments& a) {
  using Plain = Forward<S, decltype(code_unit<Half, C>()), float, C>;
  if (a.dtype == DType::f32) {
    Arguments exact = a;
    exact.quantised.exact = true;
    return Plain::run(exact);
  }
  if (a.dtype == DType::f16) return FloatCopies<S, F16>(a).run(Plain::run);
  if constexpr (Half::kValues > 1) {
    if (HasUnitsOf<S, C> || rows_of_head(a) > kFewRows) return Forward<S, Half, BF16, C>::run(a);
  }
  return FloatCopies<S, BF16>(a).run(Plain::run);
}

template <class S, class Half>
bool forward_codes(const Arguments& a) {
  return a.quantised.codes == Codes::int8 ? forward_coded<S, Half, int8_t>(a) : forward_coded<S, Half, F8>(a);
}

}  // namespace polyattn::POLYATTN_NAMESPACE

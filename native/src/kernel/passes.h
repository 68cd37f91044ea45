// From element type and instruction set to one instantiation of each pass.
#pragma once

#include "kernel/backward.h"
#include "kernel/forward_codes.h"
#include "kernel/spin.h"

namespace polyattn::POLYATTN_NAMESPACE {

// `Half` is the unit in which bfloat16 is multiplied; float16 has none and is computed in float32.
template <class S, class Half>
bool forward(const Arguments& a) {
  if (a.batch == 0 || a.q_heads == 0 || a.q_len == 0) return true;
  if (a.quantised.codes != Codes::none) return forward_codes<S, Half>(a);
  switch (a.dtype) {
    case DType::f32:
      return Forward<S, FloatUnit, float>::run(a);
    case DType::bf16:
      return Forward<S, Half, BF16>::run(a);
    case DType::f16:
      return Forward<S, FloatUnit, F16>::run(a);
  }
  return true;
}

template <class S, class Half>
bool backward(const Arguments& a) {
  switch (a.dtype) {
    case DType::f32:
      return Backward<S, FloatUnit, float>::run(a);
    case DType::bf16:
      return Backward<S, Half, BF16>::run(a);
    case DType::f16:
      return Backward<S, FloatUnit, F16>::run(a);
  }
  return true;
}

// For a set whose products are of bfloat16 alone: another set runs the other types.
template <class S, class Half>
bool forward_or(const Arguments& a, const Kernels& other) {
  if (a.dtype != DType::bf16) return other.forward(a);
  if (a.batch == 0 || a.q_heads == 0 || a.q_len == 0) return true;
  if (a.quantised.codes != Codes::none) return forward_codes<S, Half>(a);
  return Forward<S, Half, BF16>::run(a);
}

template <class S, class Half>
bool backward_or(const Arguments& a, const Kernels& other) {
  return a.dtype == DType::bf16 ? Backward<S, Half, BF16>::run(a) : other.backward(a);
}

template <class S, class Half>
double spin_both(bool bf16, int64_t iterations) {
  if (!bf16) return spin<S, FloatUnit>(iterations);
  if constexpr (Half::kInTiles) return spin_tiles<Half>(iterations);
  if constexpr (Half::kValues > 1) return spin<S, Half>(iterations);
  return 0;
}

}  // namespace polyattn::POLYATTN_NAMESPACE

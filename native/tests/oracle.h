// Attention by its definition, in double precision, over the same parameter struct as the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "polyattn/arguments.h"

namespace polyattn::testing {

// One sequence: in packed calls the rows q0 .. q0 + q_len of the arrays, else batch entry `place`.
struct Sequence {
  int64_t b, place, q0, q_len, k0, kv_len;
};

std::vector<Sequence> sequences(const Arguments& a);

// Where key j of the sequence lies; -1 on a page that does not exist.
int64_t key_offset(const Arguments& a, const Array& array, const Sequence& s, int64_t kv_head, int64_t j);

bool visible(const Arguments& a, const Sequence& s, int64_t n, int64_t t, int64_t j);

// What an array should hold and how far a right kernel may be from it, both contiguous over the
// array's own sizes (batch 1 when packed).
struct Expected {
  std::vector<double> value, tolerance;

  explicit Expected(int64_t count)
      : value(static_cast<size_t>(count)), tolerance(static_cast<size_t>(count)) {}
};

struct Forward {
  Expected out, lse;
};

struct Backward {
  Expected dq, dk, dv;
  Expected dbias;  // (B, N, T, S) before the sum over what the bias is shared over
};

Forward forward(const Arguments& a);

// Sum over h of dout * out, minus the gradient of lse: one value for each row, unrounded.
std::vector<double> delta(const Arguments& a, const Forward& expected, const std::vector<double>& dlse);

Backward backward(const Arguments& a, const std::vector<double>& delta);

}  // namespace polyattn::testing

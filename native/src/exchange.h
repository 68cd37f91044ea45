// Tensors read without a Python call: what they say of themselves through DLPack's C exchange.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "polyattn/arguments.h"

namespace polyattn {

// Reads tensors of the type whose `__dlpack_c_exchange_api__` it is made of. Complaints are Python's
// ValueError; what is no such tensor raises what its framework raises.
class Exchange {
 public:
  explicit Exchange(nanobind::handle capsule);

  // The four sizes of a tensor, in the order of its dims.
  void shape(nanobind::handle tensor, const char* name, int64_t (&sizes)[4]) const;

  // An array of these four sizes on the CPU, in this order in the tensor's shape; `head` and `row`
  // are the dims of the heads and of the rows.
  Array array(nanobind::handle tensor, const char* name, DType dtype, const int64_t (&sizes)[4], int head,
              int row) const;

  // What broadcasts to four sizes, (B, N, T, S): booleans as a term of a mask, floats as a bias.
  Term allowed(nanobind::handle tensor, const int64_t (&scores)[4]) const;
  Bias added(nanobind::handle tensor, const int64_t (&scores)[4]) const;

  // Whether all floats of `bias` are 0 or -inf: then `mask`, contiguous booleans of its shape, is set
  // to where they are 0.
  bool as_mask(nanobind::handle bias, nanobind::handle mask) const;

  // Whether one of the floats, whatever their type, on the CPU is zero.
  bool has_zero(nanobind::handle tensor) const;

 private:
  int (*read_)(void* tensor, void* description);
};

}  // namespace polyattn

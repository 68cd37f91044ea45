// Tensors read without a Python call: what they say of themselves through DLPack's C exchange.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "polyattn/arguments.h"

namespace polyattn {

// Rows of integers: in the tensor's memory, or where that has others than int64, in `copied`.
struct Integers {
  const int64_t* data = nullptr;
  int64_t rows = 0, columns = 0, row = 0;  // `row`: the stride between rows
  Extent extent;
  std::vector<int64_t> copied;
};

// Reads tensors of the type whose `__dlpack_c_exchange_api__` it is made of. Complaints are Python's
// ValueError; what is no such tensor raises what its framework raises.
class Exchange {
 public:
  explicit Exchange(nanobind::handle capsule);

  // The four sizes of a tensor, in the order of its dims.
  void shape(nanobind::handle tensor, const char* name, int64_t (&sizes)[4]) const;

  // Whether a tensor's entries lie without gaps, in the order of its dims.
  bool is_contiguous(nanobind::handle tensor) const;

  // The stride of its last dim; 1 where it has none.
  int64_t last_stride(nanobind::handle tensor) const;

  // An array of these four sizes on the CPU, in this order in the tensor's shape; `head` and `row`
  // are the dims of the heads and of the rows. Of entries of `dtype`, or of codes.
  Array array(nanobind::handle tensor, const char* name, DType dtype, Codes codes, const int64_t (&sizes)[4],
              int head, int row) const;

  // Which codes a tensor holds; a complaint if it holds none.
  Codes codes(nanobind::handle tensor) const;

  // float32 scales of these three sizes, (B, K, blocks), those of a head side by side.
  Scales scales(nanobind::handle tensor, const char* name, const int64_t (&sizes)[3]) const;

  // int32 or int64 of one or two dims on the CPU; one dim is rows of one column.
  Integers integers(nanobind::handle tensor, const char* name, int dims) const;

  // What broadcasts to four sizes, (B, N, T, S): booleans as a term of a mask, floats as a bias.
  Term allowed(nanobind::handle tensor, const int64_t (&scores)[4]) const;
  Bias added(nanobind::handle tensor, const int64_t (&scores)[4]) const;

  // Whether all floats of `bias` are 0 or -inf: then `mask`, contiguous booleans of its shape, is set
  // to where they are 0.
  bool as_mask(nanobind::handle bias, nanobind::handle mask) const;

  // Whether one of the floats, whatever their type, on the CPU is zero.
  bool has_zero(nanobind::handle tensor) const;

  // Whether the floats of a tensor on the CPU are all finite, and so small that scores made of them are.
  bool is_ordinary(nanobind::handle tensor) const;

  // Whether booleans on the CPU have a true one in each row of their last dim.
  bool has_no_empty_row(nanobind::handle mask) const;

 private:
  int (*read_)(void* tensor, void* description);
};

}  // namespace polyattn

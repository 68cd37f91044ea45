#include "exchange.h"

#include <cstddef>

#include "description.h"
#include "reach.h"
#include "reader.h"

namespace nb = nanobind;

namespace polyattn {
namespace {

// The strides of what broadcasts to the scores, 0 where it has one entry for all, and its bytes.
Extent broadcast(const Description& x, const char* name, const int64_t (&scores)[4],
                 int64_t* const (&strides)[4]) {
  if (x.device_type != kCpu || x.lanes != 1 || x.dims > 4 || (x.dims > 0 && x.strides == nullptr)) {
    refuse(complain("%s: expected a tensor of up to 4 dims on the CPU", name));
  }
  int64_t elements = 1;
  for (int i = 0; i < 4; ++i) {
    const int dim = i - (4 - x.dims);
    const int64_t size = dim < 0 ? 1 : x.shape[dim];
    if (size != 1 && size != scores[i]) {
      refuse(complain("%s: got %lld entries for dim %d of the scores, expected 1 or %lld", name,
                      static_cast<long long>(size), i, static_cast<long long>(scores[i])));
    }
    *strides[i] = size == 1 ? 0 : x.strides[dim];
    elements = size == 0 ? 0 : elements + (size - 1) * *strides[i];
  }
  return {elements * (x.bits / 8), 0};
}

// Whether `row` says so of a row of the last dim, which is given as the place of its first entry; ends with it.
template <typename Row>
bool any_row(const Description& x, Row row) {
  int64_t at[kMostDims] = {}, place = 0;
  while (true) {
    if (row(place)) return true;
    int dim = x.dims - 2;
    for (; dim >= 0 && ++at[dim] == x.shape[dim]; --dim) {
      place -= (x.shape[dim] - 1) * x.strides[dim];
      at[dim] = 0;
    }
    if (dim < 0) return false;
    place += x.strides[dim];
  }
}

// The entries of a readable tensor by the order in which they lie, each once, and as few dims as they need: for who does
// not mind the order. Rows of 16 entries would cost as much as their entries.
class Gathered {
 public:
  explicit Gathered(const Description& x) : x_(x) {
    int dims = 0;
    for (int i = 0; i < x.dims; ++i) {
      if (x.shape[i] == 1 || x.strides[i] == 0) continue;
      int at = dims++;
      for (; at > 0 && strides_[at - 1] < x.strides[i]; --at) set(at, shape_[at - 1], strides_[at - 1]);
      set(at, x.shape[i], x.strides[i]);
    }
    int last = 0;  // the dim that the next one may go on from
    for (int i = 1; i < dims; ++i) {
      if (strides_[last] == shape_[i] * strides_[i]) {
        set(last, shape_[last] * shape_[i], strides_[i]);
      } else {
        set(++last, shape_[i], strides_[i]);
      }
    }
    if (dims == 0) set(0, 1, 1);
    x_.dims = last + 1;
    x_.shape = shape_;
    x_.strides = strides_;
  }
  Gathered(const Gathered&) = delete;
  Gathered& operator=(const Gathered&) = delete;

  const Description& operator*() const { return x_; }

 private:
  void set(int at, int64_t size, int64_t stride) {
    shape_[at] = size;
    strides_[at] = stride;
  }

  Description x_;
  int64_t shape_[kMostDims] = {}, strides_[kMostDims] = {};
};

template <typename Bits>
const Bits* entries(const Description& x) {
  return reinterpret_cast<const Bits*>(static_cast<char*>(x.data) + x.byte_offset);
}

template <typename Bits>
constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;

template <typename Bits>
bool holds_zero(const Description& x) {
  const Bits* const floats = entries<Bits>(x);
  const int64_t count = x.shape[x.dims - 1], step = x.strides[x.dims - 1];
  return any_row(x, [&](int64_t place) {
    for (int64_t i = 0; i < count; ++i) {
      if ((floats[place + i * step] & kMagnitude<Bits>) == 0) return true;
    }
    return false;
  });
}

// Whether all magnitudes are below one, given as its bits.
template <typename Bits>
bool all_below(const Description& x, Bits limit) {
  constexpr Bits kSign = static_cast<Bits>(kMagnitude<Bits> + 1);
  const Bits more = static_cast<Bits>(kSign - limit);  // takes those that are not below into the sign
  const Bits* const floats = entries<Bits>(x);
  const int64_t count = x.shape[x.dims - 1], step = x.strides[x.dims - 1];
  return !any_row(x, [&](int64_t place) {
    constexpr int kAtOnce = 16;
    Bits found[kAtOnce] = {};
    int64_t i = 0;
    if (step == 1) {
      for (; i + kAtOnce <= count; i += kAtOnce) {
        for (int j = 0; j < kAtOnce; ++j) {
          found[j] = static_cast<Bits>(found[j] | ((floats[place + i + j] & kMagnitude<Bits>)+more));
        }
      }
    }
    for (; i < count; ++i) {
      found[0] = static_cast<Bits>(found[0] | ((floats[place + i * step] & kMagnitude<Bits>)+more));
    }
    for (int j = 1; j < kAtOnce; ++j) found[0] = static_cast<Bits>(found[0] | found[j]);
    return (found[0] & kSign) != 0;
  });
}

// Ends at the first float that is neither: of biases that are no masks little is read.
template <typename Bits>
bool read_mask(const Description& x, uint8_t* out, Bits shut) {
  const Bits* const floats = entries<Bits>(x);
  const int64_t count = x.shape[x.dims - 1], step = x.strides[x.dims - 1];
  return !any_row(x, [&](int64_t place) {
    bool strange = false;
    for (int64_t i = 0; i < count; ++i) {
      const Bits value = floats[place + i * step];
      const bool open = (value & kMagnitude<Bits>) == 0;
      strange |= !open & (value != shut);
      *out++ = open;
    }
    return strange;
  });
}

// Whether it has 1 to 8 dims on the CPU, none of them empty.
bool is_readable(const Description& x) {
  bool fits = x.device_type == kCpu && x.lanes == 1 && x.dims >= 1 && x.dims <= kMostDims &&
              x.strides != nullptr && x.data != nullptr;
  for (int i = 0; fits && i < x.dims; ++i) fits = x.shape[i] > 0;
  return fits;
}

}  // namespace

Exchange::Exchange(nb::handle capsule) : read_(nullptr) {
  const void* pointer = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  if (pointer == nullptr) throw nb::python_error();
  const Table& table = *static_cast<const Table*>(pointer);
  if (table.version.major == 1) read_ = table.description_of_object;
  if (read_ == nullptr) refuse("exchange: expected version 1, with a description of tensors");
}

void Exchange::shape(nb::handle tensor, const char* name, int64_t (&sizes)[4]) const {
  Description x;
  if (read_(tensor.ptr(), &x) != 0) throw nb::python_error();
  if (x.dims != 4) refuse(complain("%s: expected a tensor of 4 dims", name));
  for (int i = 0; i < 4; ++i) sizes[i] = x.shape[i];
}

bool Exchange::is_contiguous(nb::handle tensor) const {
  Description x;
  if (read_(tensor.ptr(), &x) != 0) throw nb::python_error();
  if (x.strides == nullptr) return true;
  int64_t entries = 1;
  bool without = false;
  for (int i = x.dims - 1; i >= 0; --i) {
    without = without || x.shape[i] == 0;
    if (x.shape[i] != 1 && x.strides[i] != entries && !without) return false;
    entries *= x.shape[i];
  }
  return true;
}

int64_t Exchange::last_stride(nb::handle tensor) const {
  Description x;
  if (read_(tensor.ptr(), &x) != 0) throw nb::python_error();
  return x.dims == 0 || x.strides == nullptr ? 1 : x.strides[x.dims - 1];
}

Array Exchange::array(nb::handle tensor, const char* name, DType dtype, Codes codes,
                      const int64_t (&sizes)[4], int head, int row) const {
  Description x;
  if (read_(tensor.ptr(), &x) != 0) throw nb::python_error();
  const bool fits = codes == Codes::none ? is_of(x, dtype) : is_of(x, codes);
  if (x.device_type != kCpu || !fits || x.dims != 4 || x.strides == nullptr) {
    refuse(complain("%s: expected a tensor of 4 dims of the call's dtype on the CPU", name));
  }
  Array array{static_cast<char*>(x.data) + x.byte_offset, x.strides[0], x.strides[head], x.strides[row], {}};
  int64_t elements = 1;
  for (int i = 0; i < 4; ++i) {
    if (x.shape[i] != sizes[i]) {
      refuse(complain("%s: got %lld entries in dim %d, expected %lld", name,
                      static_cast<long long>(x.shape[i]), i, static_cast<long long>(sizes[i])));
    }
    elements += (x.shape[i] - 1) * x.strides[i];
  }
  if (x.strides[3] != 1 && x.shape[3] != 1) {
    refuse(complain("%s: expected a contiguous last dim", name));
  }
  // Its own sizes and strides say what its memory holds; that much its framework sees to.
  array.extent.bytes = elements * (x.bits / 8);
  if (x.data == nullptr) array.data = nullptr;
  return array;
}

Codes Exchange::codes(nb::handle tensor) const {
  Description x;
  if (read_(tensor.ptr(), &x) != 0) throw nb::python_error();
  if (is_of(x, Codes::int8)) return Codes::int8;
  if (!is_of(x, Codes::f8)) refuse("expected codes of int8 or float8_e4m3fn");
  return Codes::f8;
}

Scales Exchange::scales(nb::handle tensor, const char* name, const int64_t (&sizes)[3]) const {
  Description x;
  if (read_(tensor.ptr(), &x) != 0) throw nb::python_error();
  if (x.device_type != kCpu || !is_of(x, DType::f32) || x.dims != 3 || x.strides == nullptr) {
    refuse(complain("%s: expected float32 of 3 dims on the CPU", name));
  }
  int64_t elements = 1;
  for (int i = 0; i < 3; ++i) {
    if (x.shape[i] != sizes[i]) {
      refuse(complain("%s: got %lld entries in dim %d, expected %lld", name,
                      static_cast<long long>(x.shape[i]), i, static_cast<long long>(sizes[i])));
    }
    elements = x.shape[i] == 0 ? 0 : elements + (x.shape[i] - 1) * x.strides[i];
  }
  if (x.strides[2] != 1 && x.shape[2] > 1) refuse(complain("%s: expected a contiguous last dim", name));
  const auto* const data =
      x.data == nullptr ? nullptr
                        : reinterpret_cast<const float*>(static_cast<const char*>(x.data) + x.byte_offset);
  return {data, x.strides[0], x.strides[1], {elements * 4, 0}};
}

Integers Exchange::integers(nb::handle tensor, const char* name, int dims) const {
  Description x;
  if (read_(tensor.ptr(), &x) != 0) throw nb::python_error();
  const bool fits = x.code == kInt && (x.bits == 32 || x.bits == 64) && x.lanes == 1;
  if (x.device_type != kCpu || !fits || x.dims != dims || x.strides == nullptr) {
    refuse(complain("%s: expected int32 or int64 of %d dims on the CPU", name, dims));
  }
  Integers found;
  found.rows = x.shape[0], found.columns = dims == 1 ? 1 : x.shape[1];
  const int64_t row = x.strides[0], column = dims == 1 ? 1 : x.strides[1];
  if (x.data == nullptr || found.rows == 0 || found.columns == 0) refuse(complain("%s: no entries", name));
  const char* const data = static_cast<const char*>(x.data) + x.byte_offset;
  if (x.bits == 64 && (found.columns == 1 || column == 1)) {
    found.data = reinterpret_cast<const int64_t*>(data);
    found.row = row;
    found.extent = {((found.rows - 1) * row + found.columns) * 8, 0};
    return found;
  }
  found.copied.reserve(static_cast<std::size_t>(found.rows * found.columns));
  for (int64_t i = 0; i < found.rows; ++i) {
    for (int64_t j = 0; j < found.columns; ++j) {
      const int64_t at = i * row + j * column;
      found.copied.push_back(x.bits == 64 ? reinterpret_cast<const int64_t*>(data)[at]
                                          : reinterpret_cast<const int32_t*>(data)[at]);
    }
  }
  found.data = found.copied.data();
  found.row = found.columns;
  found.extent = {found.rows * found.columns * 8, 0};
  return found;
}

Term Exchange::allowed(nb::handle tensor, const int64_t (&scores)[4]) const {
  Description x;
  if (read_(tensor.ptr(), &x) != 0) throw nb::python_error();
  if (x.code != kBool || x.bits != 8) refuse("mask: expected booleans");
  Term term;
  term.kind = TermKind::dense;
  term.extent = broadcast(x, "mask", scores, {&term.batch, &term.head, &term.row, &term.column});
  term.bytes = x.data == nullptr ? nullptr : static_cast<uint8_t*>(x.data) + x.byte_offset;
  return term;
}

Bias Exchange::added(nb::handle tensor, const int64_t (&scores)[4]) const {
  Description x;
  if (read_(tensor.ptr(), &x) != 0) throw nb::python_error();
  Bias bias;
  if (is_of(x, DType::f32)) {
    bias.dtype = DType::f32;
  } else if (is_of(x, DType::bf16)) {
    bias.dtype = DType::bf16;
  } else if (is_of(x, DType::f16)) {
    bias.dtype = DType::f16;
  } else {
    refuse("bias: expected float32, bfloat16 or float16");
  }
  bias.extent = broadcast(x, "bias", scores, {&bias.batch, &bias.head, &bias.row, &bias.column});
  bias.data = x.data == nullptr ? nullptr : static_cast<char*>(x.data) + x.byte_offset;
  return bias;
}

bool Exchange::as_mask(nb::handle bias, nb::handle mask) const {
  Description x, y;
  if (read_(bias.ptr(), &x) != 0 || read_(mask.ptr(), &y) != 0) throw nb::python_error();
  bool fits = x.device_type == kCpu && x.lanes == 1 && x.dims >= 1 && x.dims <= kMostDims &&
              x.strides != nullptr && y.device_type == kCpu && y.code == kBool && y.bits == 8 &&
              y.dims == x.dims && y.strides != nullptr;
  int64_t step = 1;
  for (int i = x.dims - 1; fits && i >= 0; --i) {
    if (x.shape[i] == 0) return false;
    fits = y.shape[i] == x.shape[i] && (y.strides[i] == step || y.shape[i] == 1);
    step *= x.shape[i];
  }
  if (!fits) refuse("expected floats of 1 to 8 dims and contiguous booleans of their shape, on the CPU");
  auto* const out = static_cast<uint8_t*>(y.data) + y.byte_offset;
  if (is_of(x, DType::f32)) return read_mask<uint32_t>(x, out, 0xFF800000U);
  if (is_of(x, DType::bf16)) return read_mask<uint16_t>(x, out, 0xFF80U);
  if (is_of(x, DType::f16)) return read_mask<uint16_t>(x, out, 0xFC00U);
  return false;
}

bool Exchange::has_zero(nb::handle tensor) const {
  Description x;
  if (read_(tensor.ptr(), &x) != 0) throw nb::python_error();
  const bool is_float = (x.code == kFloat || x.code == kBFloat) && x.lanes == 1;
  if (x.device_type != kCpu || !is_float || x.dims < 1 || x.dims > kMostDims || x.strides == nullptr) {
    constexpr const char* kForm =
        "got a tensor of %d dims on a device of type %d, expected floats of 1 to 8 dims on the CPU";
    refuse(complain(kForm, x.dims, x.device_type));
  }
  for (int i = 0; i < x.dims; ++i) {
    if (x.shape[i] == 0) return false;
  }
  switch (x.bits) {
    case 16:
      return holds_zero<uint16_t>(x);
    case 32:
      return holds_zero<uint32_t>(x);
    case 64:
      return holds_zero<uint64_t>(x);
    default:
      refuse(complain("got floats of %d bits, expected 16, 32 or 64", x.bits));
  }
}

bool Exchange::is_ordinary(nb::handle tensor) const {
  Description x;
  if (read_(tensor.ptr(), &x) != 0) throw nb::python_error();
  if (!is_readable(x)) return false;
  const Gathered all(x);
  // 2**50: products of two, and their sums, are far from infinity in float32
  if (is_of(x, DType::f32)) return all_below<uint32_t>(*all, 0x58800000U);
  if (is_of(x, DType::bf16)) return all_below<uint16_t>(*all, 0x5880U);
  return is_of(x, DType::f16) && all_below<uint16_t>(*all, 0x7C00U);
}

bool Exchange::has_no_empty_row(nb::handle mask) const {
  Description x;
  if (read_(mask.ptr(), &x) != 0) throw nb::python_error();
  if (!is_readable(x) || x.code != kBool || x.bits != 8) return false;
  const auto* const allowed = entries<uint8_t>(x);
  const int64_t count = x.shape[x.dims - 1], step = x.strides[x.dims - 1];
  return !any_row(x, [&](int64_t place) {
    for (int64_t i = 0; i < count; ++i) {
      if (allowed[place + i * step] != 0) return false;
    }
    return true;
  });
}

}  // namespace polyattn

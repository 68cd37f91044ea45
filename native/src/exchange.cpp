#include "exchange.h"

#include "reach.h"
#include "reader.h"

namespace nb = nanobind;

namespace polyattn {
namespace {

// The part of dlpack.h that is used here, in its fixed layout of version 1.
struct Description {  // DLTensor
  void* data;
  int32_t device_type, device_id, dims;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct Table {  // DLPackExchangeAPI
  struct {
    uint32_t major, minor;
  } version;
  Table* previous;
  void *allocate, *managed_from_object, *managed_to_object;
  int (*description_of_object)(void* tensor, void* description);
};

constexpr int32_t kCpu = 1;
constexpr uint8_t kFloat = 2, kBFloat = 4;

bool is_of(const Description& x, DType dtype) {
  const uint8_t code = dtype == DType::bf16 ? kBFloat : kFloat;
  return x.code == code && x.bits == (dtype == DType::f32 ? 32 : 16) && x.lanes == 1;
}

}  // namespace

Exchange::Exchange(nb::handle capsule) : read_(nullptr) {
  const void* pointer = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  if (pointer == nullptr) throw nb::python_error();
  const Table& table = *static_cast<const Table*>(pointer);
  if (table.version.major == 1) read_ = table.description_of_object;
  if (read_ == nullptr) refuse("exchange: expected version 1, with a description of tensors");
}

Array Exchange::array(nb::handle tensor, const char* name, DType dtype, const int64_t (&sizes)[4],
                      int head, int row) const {
  Description x;
  if (read_(tensor.ptr(), &x) != 0) throw nb::python_error();
  if (x.device_type != kCpu || !is_of(x, dtype) || x.dims != 4 || x.strides == nullptr) {
    refuse(complain("%s: expected a tensor of 4 dims of the call's dtype on the CPU", name));
  }
  Array array{static_cast<char*>(x.data) + x.byte_offset, x.strides[0], x.strides[head],
              x.strides[row], {}};
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

}  // namespace polyattn

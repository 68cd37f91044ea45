// What a tensor says of itself through DLPack's C exchange. A part of exchange.cpp.
#pragma once

#include <cstdint>

#include "polyattn/arguments.h"

namespace polyattn {

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

constexpr int32_t kCpu = 1, kMostDims = 8;
constexpr uint8_t kInt = 0, kFloat = 2, kBFloat = 4, kBool = 6, kFloat8E4M3Fn = 10;

inline bool is_of(const Description& x, DType dtype) {
  const uint8_t code = dtype == DType::bf16 ? kBFloat : kFloat;
  return x.code == code && x.bits == (dtype == DType::f32 ? 32 : 16) && x.lanes == 1;
}

inline bool is_of(const Description& x, Codes codes) {
  return x.code == (codes == Codes::int8 ? kInt : kFloat8E4M3Fn) && x.bits == 8 && x.lanes == 1;
}

}  // namespace polyattn

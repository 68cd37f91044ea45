// XLA's foreign function interface, as far as a handler on CPUs needs it: the C structs that a call
// comes in. Written from the interface of xla/ffi/api/c_api.h (OpenXLA; version 0.1 to 0.3 of it), so
// that a build needs no header of jaxlib; native/tests/xla_abi_test.cpp holds them to that header
// where there is one. Structs say their own size, and only grow at their ends.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyattn::xla {

struct Extension {
  size_t struct_size;
  int type;  // 1: metadata is asked for
  Extension* next;
};

struct Version {
  size_t struct_size;
  Extension* extensions;
  int major, minor;
};

struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Error;

struct ErrorArguments {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  int code;
};

struct Api {
  size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*create_error)(ErrorArguments*);
};

// Of enum XLA_FFI_DataType.
enum class Type : int { pred = 1, s32 = 4, s64 = 5, f16 = 10, f32 = 11, bf16 = 16 };

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

// Of arguments and of results.
struct Buffers {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;  // 1: a buffer
  void** each;
};

struct Span {
  const char* data;
  size_t size;
};

struct Numbers {
  int dtype;
  size_t size;
  void* data;
};

constexpr int kArray = 1, kString = 4;  // of enum XLA_FFI_AttrType

struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;
  Span** names;
  void** each;
};

struct Frame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  void* context;
  int stage;  // 3: execute
  Buffers arguments, results;
  Attributes attributes;
};

}  // namespace polyattn::xla

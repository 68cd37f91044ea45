// The handlers of XLA's foreign function interface: a call that comes in its structs gives the bits of
// the same call made directly, each way to spoil one is refused in words, and our structs are XLA's.
//
// Build from: xla_test.cpp, ../src/xla.cpp and the kernels.
#include "xla.h"

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "polyattn/arguments.h"

#if __has_include("xla/ffi/api/c_api.h")
#include "xla/ffi/api/c_api.h"
#define POLYATTN_HAVE_XLA 1
#endif

namespace {

using namespace polyattn;
using xla::Type;

int failures = 0;

void expect(bool right, const char* what) {
  if (right) return;
  std::printf("xla: %s\n", what);
  ++failures;
}

std::string complaint;

xla::Error* create_error(xla::ErrorArguments* arguments) {
  complaint = arguments->message;
  return reinterpret_cast<xla::Error*>(&complaint);
}

// An array with its numbers, as a buffer of XLA.
struct Held {
  std::vector<int64_t> dims;
  std::vector<char> bytes;  // from operator new: aligned for every number
  xla::Buffer buffer;

  Held(Type type, std::vector<int64_t> sizes, size_t width) : dims(std::move(sizes)) {
    size_t count = 1;
    for (const int64_t size : dims) count *= static_cast<size_t>(size);
    bytes.resize(count * width + 64);
    buffer = {sizeof buffer, nullptr, static_cast<int>(type), bytes.data(), static_cast<int64_t>(dims.size()),
              dims.data()};
  }

  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(bytes.data());
  }

  int64_t count() const {
    int64_t entries = 1;
    for (const int64_t size : dims) entries *= size;
    return entries;
  }
};

// One call: B=2, T=5, S=7, N=4, K=2, H=8 in BTNH, lengths of keys, causal, a bias and sinks.
struct Given {
  std::mt19937 random{7};
  std::vector<std::unique_ptr<Held>> arguments, results;
  std::vector<int64_t> call{0, 0, 2, 1, 1, 1, -(int64_t{1} << 62), 0, 1, 2, 0, 0, 0, 7, 0, 0, 0};
  double scales[2] = {0.25, 2.0};
  std::string isa = "generic";
  xla::Api api{sizeof api, nullptr, {sizeof(xla::Version), nullptr, 0, 3}, nullptr, create_error};

  Held& floats(std::vector<std::unique_ptr<Held>>& to, std::vector<int64_t> dims) {
    to.push_back(std::make_unique<Held>(Type::f32, std::move(dims), 4));
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < to.back()->count(); ++i) to.back()->as<float>()[i] = normal(random);
    return *to.back();
  }

  explicit Given(Pass pass) {
    floats(arguments, {2, 5, 4, 8});
    floats(arguments, {2, 7, 2, 8});
    floats(arguments, {2, 7, 2, 8});
    arguments.push_back(std::make_unique<Held>(Type::s32, std::vector<int64_t>{2}, 4));
    arguments.back()->as<int32_t>()[0] = 3;
    arguments.back()->as<int32_t>()[1] = 7;
    floats(arguments, {1, 4, 1, 7});
    floats(arguments, {4, 3});
    if (pass == Pass::forward) {
      floats(results, {2, 5, 4, 8});
      floats(results, {2, 4, 5});
      return;
    }
    floats(arguments, {2, 4, 5});
    floats(arguments, {2, 5, 4, 8});
    floats(arguments, {2, 4, 5});
    floats(results, {2, 5, 4, 8});
    floats(results, {2, 7, 2, 8});
    floats(results, {2, 7, 2, 8});
    floats(results, {1, 4, 1, 7});
  }

  // Hands the call over; returns whether it went well.
  bool run(xla::Error* (*handler)(xla::Frame*)) {
    std::vector<void*> in, out;
    for (const auto& one : arguments) in.push_back(&one->buffer);
    for (const auto& one : results) out.push_back(&one->buffer);
    std::vector<int> types(in.size() + out.size(), 1);
    xla::Numbers numbers{static_cast<int>(Type::s64), call.size(), call.data()};
    xla::Numbers pair{12, 2, scales};
    xla::Span text{isa.data(), isa.size()}, names[] = {{"call", 4}, {"isa", 3}, {"scales", 6}};
    xla::Span* named[] = {&names[0], &names[1], &names[2]};
    int kinds[] = {xla::kArray, xla::kString, xla::kArray};
    void* values[] = {&numbers, &text, &pair};
    xla::Frame frame{};
    frame.struct_size = sizeof frame;
    frame.api = &api;
    frame.stage = 3;
    frame.arguments = {sizeof(xla::Buffers), nullptr, static_cast<int64_t>(in.size()), types.data(),
                       in.data()};
    frame.results = {sizeof(xla::Buffers), nullptr, static_cast<int64_t>(out.size()), types.data(),
                     out.data()};
    frame.attributes = {sizeof(xla::Attributes), nullptr, 3, kinds, named, values};
    complaint.clear();
    return handler(&frame) == nullptr;
  }

  static Array rows(Held& x) {
    const int64_t heads = x.dims[2], columns = x.dims[3];
    return {x.as<float>(), x.dims[1] * heads * columns, columns, heads * columns, {x.count() * 4, 0}};
  }

  static Array sums(Held& x) {
    return {x.as<float>(), x.dims[1] * x.dims[2], x.dims[2], 1, {x.count() * 4, 0}};
  }

  // The same call without XLA, into the results of another one of these.
  Arguments direct(Given& other, Pass pass, std::vector<int64_t>& lengths) {
    Arguments a;
    a.batch = 2, a.q_heads = 4, a.kv_heads = 2, a.q_len = 5, a.kv_len = 7, a.head_dim = a.value_dim = 8;
    a.threads = 2, a.scale = 0.25f, a.softcap = 2.0f, a.terms = 3;
    a.q = rows(*arguments[0]), a.k = rows(*arguments[1]), a.v = rows(*arguments[2]);
    a.term[0].kind = TermKind::band, a.term[0].high = 0, a.term[0].bottom_right = 1;
    a.term[1].kind = TermKind::kv_limit, a.term[1].lengths = lengths.data(), a.term[1].extent = {16, 0};
    a.term[2].kind = TermKind::both;
    a.bias.data = arguments[4]->as<float>(), a.bias.extent = {4 * 28, 0}, a.bias.head = 7, a.bias.column = 1;
    a.sinks = arguments[5]->as<float>(), a.sinks_extent = {48, 0}, a.sink_count = 3;
    if (pass == Pass::forward) {
      a.out = rows(*other.results[0]), a.lse = sums(*other.results[1]);
      return a;
    }
    a.lse = sums(*arguments[6]), a.dout = rows(*arguments[7]), a.delta = sums(*arguments[8]);
    a.dq = rows(*other.results[0]), a.dk = rows(*other.results[1]), a.dv = rows(*other.results[2]);
    std::memset(other.results[3]->bytes.data(), 0, 4 * 28);
    a.dbias = other.results[3]->as<float>(), a.dbias_extent = {4 * 28, 0}, a.dbias_head = 7,
    a.dbias_column = 1;
    return a;
  }
};

void gives_the_same_bits(Pass pass) {
  Given given(pass), other(pass);
  std::vector<int64_t> lengths{3, 7};
  const Kernels* kernels = find("generic");
  const Arguments a = given.direct(other, pass, lengths);
  const char* refused = check(a, pass);
  expect(refused == nullptr, refused != nullptr ? refused : "");
  expect((pass == Pass::forward ? kernels->forward : kernels->backward)(a), "the direct call has no memory");
  const bool went = given.run(pass == Pass::forward ? xla::forward : xla::backward);
  expect(went, complaint.c_str());
  for (size_t i = 0; i < given.results.size(); ++i) {
    const size_t size = static_cast<size_t>(given.results[i]->count()) * 4;
    const bool same = std::memcmp(given.results[i]->bytes.data(), other.results[i]->bytes.data(), size) == 0;
    expect(same, "a result differs from that of the direct call");
  }
}

void refuses(const char* words, Pass pass, const std::function<void(Given&)>& spoil) {
  Given given(pass);
  spoil(given);
  const bool went = given.run(pass == Pass::forward ? xla::forward : xla::backward);
  if (!went && complaint.find(words) != std::string::npos) return;
  std::printf("xla: expected a refusal with \"%s\", got \"%s\"\n", words, went ? "" : complaint.c_str());
  ++failures;
}

void refuses_what_is_none() {
  const Pass f = Pass::forward, b = Pass::backward;
  refuses("expected 5 integers", f, [](Given& g) { g.call.resize(3); });
  refuses("names no array", f, [](Given& g) { g.call[10] = 40; });
  refuses("names no array", f, [](Given& g) { g.call[10] = -1; });
  refuses("a program that is none", f, [](Given& g) { g.call[5] = 99; });
  refuses("a layout that is none", f, [](Given& g) { g.call[1] = 7; });
  refuses("a dtype", f, [](Given& g) { g.call[0] = 9; });
  refuses("another type", f, [](Given& g) { g.call[0] = 1; });
  refuses("another rank", f, [](Given& g) { g.arguments[0]->buffer.rank = 3; });
  refuses("holds no integers", f, [](Given& g) { g.arguments[3]->buffer.dtype = 11; });
  refuses("more arrays", f, [](Given& g) { g.call[4] = 0; });
  refuses("fewer arrays", f, [](Given& g) { g.arguments.pop_back(); });
  refuses("fewer results", f, [](Given& g) { g.results.clear(); });
  refuses("fewer results", b, [](Given& g) { g.results.resize(2); });
  refuses("compile it here", f, [](Given& g) { g.isa = "sse9"; });
  refuses("polyattn: ", f, [](Given& g) { g.arguments[1]->dims[1] = 9; });  // more keys than memory
  refuses("polyattn: ", f,
          [](Given& g) { g.arguments[3]->dims[0] = 1; });  // fewer lengths than batch entries
  refuses("polyattn: ", b, [](Given& g) { g.results[1]->dims[1] = 6; });
}

void answers_for_metadata() {
  xla::Api api{sizeof api, nullptr, {sizeof(xla::Version), nullptr, 0, 3}, nullptr, create_error};
  xla::Metadata metadata{sizeof metadata, {sizeof(xla::Version), nullptr, 7, 7}, 7};
  xla::MetadataExtension extension{{sizeof extension, 1, nullptr}, &metadata};
  xla::Frame frame{};
  frame.api = &api;
  frame.extensions = &extension.base;
  expect(xla::forward(&frame) == nullptr, "a question for metadata fails");
  const bool told = metadata.version.major == 0 && metadata.version.minor == 3 && metadata.traits == 0;
  expect(told, "metadata is not told");
  frame.api = nullptr;  // as JAX 0.8.0 asks
  expect(xla::forward(&frame) == nullptr && metadata.version.minor == 1, "metadata without an interface");
}

#if defined(POLYATTN_HAVE_XLA)
#define SAME(ours, our_field, theirs, their_field)                            \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field) && \
                    sizeof(ours::our_field) == sizeof(theirs::their_field),   \
                "XLA's " #theirs " has changed")
SAME(xla::Extension, type, XLA_FFI_Extension_Base, type);
SAME(xla::Extension, next, XLA_FFI_Extension_Base, next);
SAME(xla::Version, major, XLA_FFI_Api_Version, major_version);
SAME(xla::Version, minor, XLA_FFI_Api_Version, minor_version);
SAME(xla::Metadata, version, XLA_FFI_Metadata, api_version);
SAME(xla::Metadata, traits, XLA_FFI_Metadata, traits);
SAME(xla::MetadataExtension, metadata, XLA_FFI_Metadata_Extension, metadata);
SAME(xla::ErrorArguments, message, XLA_FFI_Error_Create_Args, message);
SAME(xla::ErrorArguments, code, XLA_FFI_Error_Create_Args, errc);
SAME(xla::Api, version, XLA_FFI_Api, api_version);
SAME(xla::Api, create_error, XLA_FFI_Api, XLA_FFI_Error_Create);
SAME(xla::Buffer, dtype, XLA_FFI_Buffer, dtype);
SAME(xla::Buffer, data, XLA_FFI_Buffer, data);
SAME(xla::Buffer, rank, XLA_FFI_Buffer, rank);
SAME(xla::Buffer, dims, XLA_FFI_Buffer, dims);
SAME(xla::Buffers, size, XLA_FFI_Args, size);
SAME(xla::Buffers, each, XLA_FFI_Args, args);
SAME(xla::Buffers, size, XLA_FFI_Rets, size);
SAME(xla::Buffers, each, XLA_FFI_Rets, rets);
SAME(xla::Span, data, XLA_FFI_ByteSpan, ptr);
SAME(xla::Span, size, XLA_FFI_ByteSpan, len);
SAME(xla::Numbers, size, XLA_FFI_Array, size);
SAME(xla::Numbers, data, XLA_FFI_Array, data);
SAME(xla::Attributes, types, XLA_FFI_Attrs, types);
SAME(xla::Attributes, names, XLA_FFI_Attrs, names);
SAME(xla::Attributes, each, XLA_FFI_Attrs, attrs);
SAME(xla::Frame, api, XLA_FFI_CallFrame, api);
SAME(xla::Frame, stage, XLA_FFI_CallFrame, stage);
SAME(xla::Frame, arguments, XLA_FFI_CallFrame, args);
SAME(xla::Frame, results, XLA_FFI_CallFrame, rets);
SAME(xla::Frame, attributes, XLA_FFI_CallFrame, attrs);
static_assert(static_cast<int>(Type::pred) == XLA_FFI_DataType_PRED &&
              static_cast<int>(Type::s32) == XLA_FFI_DataType_S32 &&
              static_cast<int>(Type::s64) == XLA_FFI_DataType_S64 &&
              static_cast<int>(Type::f16) == XLA_FFI_DataType_F16 &&
              static_cast<int>(Type::f32) == XLA_FFI_DataType_F32 &&
              static_cast<int>(Type::bf16) == XLA_FFI_DataType_BF16 &&
              static_cast<int>(xla::kArray) == XLA_FFI_AttrType_ARRAY &&
              static_cast<int>(xla::kString) == XLA_FFI_AttrType_STRING);
constexpr const char* kHeld = ", structs held to jaxlib's";
#else
constexpr const char* kHeld = ", without jaxlib's header";
#endif

}  // namespace

int main() {
  gives_the_same_bits(Pass::forward);
  gives_the_same_bits(Pass::backward);
  refuses_what_is_none();
  answers_for_metadata();
  std::printf("xla: %d failures%s\n", failures, kHeld);
  return failures != 0;
}

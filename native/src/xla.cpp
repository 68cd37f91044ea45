// The passes as handlers of XLA's foreign function interface, so that JAX calls them under jit: no
// Python, no copies. What a call is comes in three attributes:
//   call    int64: dtype, layout (0 BTNH, 1 BNTH, 2 packed), threads, bias (0 none, 1 dense, 2 slopes),
//           whether there are sinks, then the program of the mask (polyattn/native/program.py)
//   scales  float64: scale, soft cap
//   isa     the name of the instruction set
// and its arrays in order: q, k, v, those that the program names, bias or slopes, sinks; for the backward
// pass then lse, dout, delta. Results: out and, if a second one is asked for, lse; or dq, dk, dv and, if a
// fourth one is, dbias. All are row-major. JAX has integers of 32 bits where it has no others.
#include "xla.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "polyattn/arguments.h"
#include "xla_reply.h"

namespace polyattn {
namespace {

using xla::Buffer;
using xla::Frame;
using xla::Type;

enum Layout : int64_t { kRowsFirst = 0, kHeadsFirst = 1, kPacked = 2 };
constexpr int kWidth = 4;  // integers of a term, as polyattn/native/program.py writes them
constexpr int kHeading = 5;

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void refuse(const std::string& text) { throw Refused(text); }

int64_t size_of(Type type) {
  switch (type) {
    case Type::pred:
      return 1;
    case Type::f16:
    case Type::bf16:
      return 2;
    case Type::s32:
    case Type::f32:
      return 4;
    case Type::s64:
      return 8;
  }
  refuse("got an array of a type that the kernels do not read");
}

int64_t count(const Buffer& x) {
  int64_t entries = 1;
  for (int64_t i = 0; i < x.rank; ++i) entries *= x.dims[i];
  return entries;
}

Extent extent(const Buffer& x) { return {count(x) * size_of(static_cast<Type>(x.dtype)), 0}; }

class Call {
 public:
  explicit Call(const Frame& frame) : frame_(frame) {
    numbers_ = integers("call");
    if (numbers_.size() < kHeading || (numbers_.size() - kHeading) % kWidth != 0) {
      refuse("call: expected 5 integers and a program");
    }
    layout_ = static_cast<Layout>(numbers_[1]);
    a_.dtype = static_cast<DType>(numbers_[0]);
    a_.threads = static_cast<int32_t>(numbers_[2]);
    const auto scales = attribute<xla::Numbers>("scales", xla::kArray);
    if (scales->size != 2) refuse("scales: expected scale and soft cap");
    a_.scale = static_cast<float>(static_cast<const double*>(scales->data)[0]);
    a_.softcap = static_cast<float>(static_cast<const double*>(scales->data)[1]);
  }

  const Kernels& kernels() {
    const auto name = attribute<xla::Span>("isa", xla::kString);
    const std::string text(name->data, name->size);
    const Kernels* found = find(text.c_str());
    if (found == nullptr) {
      refuse("got code that was compiled for " + text +
             ", which this build or this processor lacks; compile it here");
    }
    if (found->prepare != nullptr) {
      if (const char* refusal = found->prepare()) refuse(refusal);
    }
    return *found;
  }

  Arguments& arguments(Pass pass) {
    read_sizes();
    a_.q = rows(taken(), float_type());
    a_.k = rows(taken(), float_type());
    a_.v = rows(taken(), float_type());
    read_program();
    if (numbers_[3] == 1) read_bias(taken());
    if (numbers_[3] == 2) read_slopes(taken());
    if (numbers_[4] != 0) read_sinks(taken());
    if (pass == Pass::forward) {
      a_.out = rows(result(0), float_type());
      if (frame_.results.size > 1) a_.lse = sums(result(1));
    } else {
      a_.lse = sums(taken());
      a_.dout = rows(taken(), float_type());
      a_.delta = sums(taken());
      a_.dq = rows(result(0), float_type());
      a_.dk = rows(result(1), float_type());
      a_.dv = rows(result(2), float_type());
      if (frame_.results.size > 3) read_dbias(result(3));
    }
    if (next_ != frame_.arguments.size) refuse("got more arrays than the call names");
    if (const char* complaint = check(a_, pass)) refuse(complaint);
    return a_;
  }

 private:
  template <typename T>
  const T* attribute(const char* name, int type) {
    const xla::Attributes& every = frame_.attributes;
    for (int64_t i = 0; i < every.size; ++i) {
      const xla::Span& found = *every.names[i];
      if (std::string(found.data, found.size) != name) continue;
      if (every.types[i] != type) break;
      return static_cast<const T*>(every.each[i]);
    }
    refuse(std::string("got no attribute ") + name + " of the expected type");
  }

  std::vector<int64_t> integers(const char* name) {
    const auto found = attribute<xla::Numbers>(name, xla::kArray);
    if (found->dtype != static_cast<int>(Type::s64)) refuse(std::string(name) + ": expected int64");
    const auto* data = static_cast<const int64_t*>(found->data);
    return {data, data + found->size};
  }

  const Buffer& taken() {
    if (next_ >= frame_.arguments.size) refuse("got fewer arrays than the call names");
    return *static_cast<const Buffer*>(frame_.arguments.each[next_++]);
  }

  const Buffer& result(int64_t i) {
    if (i >= frame_.results.size) refuse("got fewer results than the pass has");
    return *static_cast<const Buffer*>(frame_.results.each[i]);
  }

  Type float_type() const {
    switch (a_.dtype) {
      case DType::f32:
        return Type::f32;
      case DType::bf16:
        return Type::bf16;
      case DType::f16:
        return Type::f16;
    }
    refuse("got a dtype that the kernels do not compute in");
  }

  static void expect(const Buffer& x, Type type, int64_t rank) {
    if (x.dtype != static_cast<int>(type) || x.rank != rank) refuse("got an array of another type or rank");
  }

  // B, heads, rows and columns of an array in the call's layout; B is 1 where rows are packed.
  void dims_of(const Buffer& x, int64_t (&dims)[4]) const {
    if (x.rank != (layout_ == kPacked ? 3 : 4)) refuse("got an array of another rank");
    const int64_t* d = x.dims;
    const int64_t ordered[3][4] = {
        {d[0], d[2], d[1], d[x.rank - 1]}, {d[0], d[1], d[2], d[x.rank - 1]}, {1, d[1], d[0], d[2]}};
    std::memcpy(dims, ordered[layout_], sizeof dims);
  }

  void read_sizes() {
    if (layout_ < kRowsFirst || layout_ > kPacked) refuse("got a layout that is none");
    int64_t q[4], k[4], v[4];
    if (frame_.arguments.size < 3) refuse("got fewer arrays than q, k and v");
    const auto at = [&](int i) -> const Buffer& {
      return *static_cast<const Buffer*>(frame_.arguments.each[i]);
    };
    dims_of(at(0), q), dims_of(at(1), k), dims_of(at(2), v);
    a_.batch = q[0], a_.q_heads = q[1], a_.q_len = q[2], a_.head_dim = q[3];
    a_.kv_heads = k[1], a_.kv_len = k[2], a_.value_dim = v[3];
  }

  Array rows(const Buffer& x, Type type) const {
    if (x.dtype != static_cast<int>(type)) refuse("got an array of another type");
    int64_t dims[4];
    dims_of(x, dims);
    const auto [batch, heads, length, columns] = dims;
    Array array;
    array.data = x.data;
    array.extent = extent(x);
    array.batch = layout_ == kPacked ? 0 : heads * length * columns;
    array.head = layout_ == kHeadsFirst ? length * columns : columns;
    array.row = layout_ == kHeadsFirst ? columns : heads * columns;
    return array;
  }

  // One float32 for each query: (B, N, T), or (N, total) where rows are packed.
  Array sums(const Buffer& x) const {
    expect(x, Type::f32, layout_ == kPacked ? 2 : 3);
    Array array;
    array.data = x.data;
    array.extent = extent(x);
    array.row = 1;
    array.head = x.dims[x.rank - 1];
    array.batch = layout_ == kPacked ? 0 : x.dims[1] * x.dims[2];
    return array;
  }

  const int64_t* long_integers(const Buffer& x) {
    const int64_t entries = count(x);
    if (x.dtype == static_cast<int>(Type::s64)) return static_cast<const int64_t*>(x.data);
    if (x.dtype != static_cast<int>(Type::s32)) refuse("got an array of the mask that holds no integers");
    const auto* data = static_cast<const int32_t*>(x.data);
    // one more, so that none is empty: check() takes a null pointer for none
    std::vector<int64_t>& copy = copies_.emplace_back(data, data + entries);
    copy.push_back(0);
    return copy.data();
  }

  static Extent long_extent(const Buffer& x) { return {count(x) * 8, 0}; }

  // Which array of the mask a term names; they come in the order of their numbers.
  const Buffer& named(int64_t number) const {
    const int64_t place = 3 + number;
    if (number < 0 || place >= frame_.arguments.size) refuse("got a program that names no array of the call");
    return *static_cast<const Buffer*>(frame_.arguments.each[place]);
  }

  void read_program() {
    int64_t arrays = 0;
    for (size_t i = kHeading; i < numbers_.size(); i += kWidth) {
      const int64_t kind = numbers_[i], x = numbers_[i + 1], y = numbers_[i + 2], z = numbers_[i + 3];
      if (kind == kTermKinds) {  // no term: where packed sequences lie
        a_.cu_q = long_integers(named(x)), a_.cu_q_extent = long_extent(named(x));
        a_.cu_kv = long_integers(named(y)), a_.cu_kv_extent = long_extent(named(y));
        a_.batch = count(named(x)) - 1;
        arrays = std::max({arrays, x + 1, y + 1});
        continue;
      }
      if (kind < 0 || kind > kTermKinds || a_.terms >= kMaxTerms) refuse("got a program that is none");
      Term& term = a_.term[a_.terms++];
      term.kind = static_cast<TermKind>(kind);
      switch (term.kind) {
        case TermKind::band:
          term.low = x, term.high = y, term.bottom_right = z != 0;
          break;
        case TermKind::chunk:
        case TermKind::step:
        case TermKind::first_keys:
          term.size = x, term.bottom_right = y != 0;
          break;
        case TermKind::kv_limit:
        case TermKind::q_limit:
        case TermKind::kv_start:
        case TermKind::q_start:
          term.lengths = long_integers(named(x)), term.extent = long_extent(named(x));
          arrays = std::max(arrays, x + 1);
          break;
        case TermKind::segments:
          term.q_ids = long_integers(named(x)), term.extent = long_extent(named(x));
          term.kv_ids = long_integers(named(y)), term.kv_extent = long_extent(named(y));
          term.q_ids_batch = step_of_ids(named(x)), term.kv_ids_batch = step_of_ids(named(y));
          arrays = std::max({arrays, x + 1, y + 1});
          break;
        case TermKind::blocks:
        case TermKind::dense:
          read_bytes(named(x), term);
          term.block_q = y, term.block_k = z;
          arrays = std::max(arrays, x + 1);
          break;
        case TermKind::everything:
        case TermKind::both:
        case TermKind::either:
        case TermKind::complement:
          break;
      }
    }
    next_ += arrays;
  }

  static int64_t step_of_ids(const Buffer& x) {
    if (x.rank != 1 && x.rank != 2) refuse("got segment ids of another rank than 1 or 2");
    return x.rank == 1 || x.dims[0] == 1 ? 0 : x.dims[1];
  }

  // The steps of four dims, 0 where an array broadcasts.
  template <typename T>
  static void steps(const Buffer& x, T& to) {
    if (x.rank != 4) refuse("got an array of another rank than 4");
    int64_t step[4], size = 1;
    for (int i = 3; i >= 0; --i) {
      step[i] = x.dims[i] == 1 ? 0 : size;
      size *= x.dims[i];
    }
    to.batch = step[0], to.head = step[1], to.row = step[2], to.column = step[3];
  }

  static void read_bytes(const Buffer& x, Term& term) {
    expect(x, Type::pred, 4);
    term.bytes = static_cast<const uint8_t*>(x.data);
    term.extent = extent(x);
    steps(x, term);
  }

  void read_bias(const Buffer& x) {
    const Type type = static_cast<Type>(x.dtype);
    if (type != Type::f32 && type != Type::bf16 && type != Type::f16) refuse("got a bias of another type");
    a_.bias.dtype = type == Type::f32 ? DType::f32 : type == Type::bf16 ? DType::bf16 : DType::f16;
    a_.bias.data = x.data;
    a_.bias.extent = extent(x);
    steps(x, a_.bias);
  }

  void read_slopes(const Buffer& x) {
    expect(x, Type::f32, 2);
    a_.slopes.data = static_cast<const float*>(x.data);
    a_.slopes.extent = extent(x);
    a_.slopes.batch = x.dims[0] == 1 ? 0 : x.dims[1];
    a_.slopes.head = 1;
  }

  void read_sinks(const Buffer& x) {
    expect(x, Type::f32, 2);
    a_.sinks = static_cast<const float*>(x.data);
    a_.sinks_extent = extent(x);
    a_.sink_count = x.dims[1];
  }

  void read_dbias(const Buffer& x) {
    expect(x, Type::f32, 4);
    std::memset(x.data, 0, static_cast<size_t>(extent(x).bytes));  // it is added to
    Bias step;
    steps(x, step);
    a_.dbias = static_cast<float*>(x.data);
    a_.dbias_extent = extent(x);
    a_.dbias_batch = step.batch, a_.dbias_head = step.head;
    a_.dbias_row = step.row, a_.dbias_column = step.column;
  }

  const Frame& frame_;
  Arguments a_;
  Layout layout_ = kRowsFirst;
  int64_t next_ = 0;
  std::vector<int64_t> numbers_;
  std::vector<std::vector<int64_t>> copies_;
};

// Whether there was memory for the scratch; what is no call throws.
bool ran(const Frame& frame, Pass pass) {
  Call call(frame);
  const Kernels& kernels = call.kernels();
  const Arguments& a = call.arguments(pass);
  const bool nothing = a.batch == 0 || a.q_heads == 0 || a.q_len == 0;
  if (pass == Pass::forward && nothing) return true;
  return (pass == Pass::forward ? kernels.forward : kernels.backward)(a);
}

xla::Error* handle(const Frame& frame, Pass pass) {
  const auto no_memory = [&] {
    return xla::failed(frame, "polyattn: there is no memory for the scratch of a call",
                       xla::kResourceExhausted);
  };
  if (xla::tells_metadata(frame)) return nullptr;
  try {
    return ran(frame, pass) ? nullptr : no_memory();
  } catch (const Refused& refused) {
    return xla::failed(frame, (std::string("polyattn: ") + refused.what()).c_str(), xla::kInvalidArgument);
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
}

}  // namespace

namespace xla {

Error* forward(Frame* frame) { return handle(*frame, Pass::forward); }
Error* backward(Frame* frame) { return handle(*frame, Pass::backward); }

}  // namespace xla
}  // namespace polyattn

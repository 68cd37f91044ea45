// The Python module polyattn._native: tuples of integers in, one kernel call, nothing kept.
//
// Arrays arrive as pointers and strides, so that torch, NumPy and JAX share one binary. All
// arguments are positional and tuples are read with the C API: a call costs well below 1 us.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "door.h"
#include "polyattn/arguments.h"
#include "statistics/statistics.h"
#include "threads.h"
#include "trace_classes.h"

namespace nb = nanobind;

namespace polyattn {
namespace {

// Reads the integers of one tuple. Complaints name the argument and what it should hold.
class Reader {
 public:
  Reader(nb::handle tuple, const char* name, const char* expected, int count)
      : tuple_(tuple.ptr()), name_(name) {
    if (!PyTuple_Check(tuple_)) {
      PyErr_Format(PyExc_TypeError, "%s: got %R, expected a tuple %s", name, tuple_, expected);
      throw nb::python_error();
    }
    const Py_ssize_t size = NB_TUPLE_GET_SIZE(tuple_);
    if (size != count) {
      PyErr_Format(PyExc_ValueError, "%s: got a tuple of %zd, expected %s", name, size, expected);
      throw nb::python_error();
    }
  }

  int64_t integer() {
    const int64_t value = PyLong_AsLongLong(NB_TUPLE_GET_ITEM(tuple_, next_));
    if (value == -1 && PyErr_Occurred() != nullptr) fail("an integer of 64 bits");
    ++next_;
    return value;
  }

  template <class T>
  T* pointer() {
    return reinterpret_cast<T*>(static_cast<intptr_t>(integer()));
  }

 private:
  [[noreturn]] void fail(const char* expected) const {
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "%s[%zd]: got %R, expected %s", name_, next_,
                 NB_TUPLE_GET_ITEM(tuple_, next_), expected);
    throw nb::python_error();
  }

  PyObject* tuple_;
  const char* name_;
  Py_ssize_t next_ = 0;
};

[[noreturn]] void refuse(const char* complaint) { throw nb::value_error(complaint); }

Array read_array(nb::handle value, const char* name) {
  Reader reader(value, name, "(pointer, batch, head, row)", 4);
  Array array;
  array.data = reader.pointer<void>();
  array.batch = reader.integer();
  array.head = reader.integer();
  array.row = reader.integer();
  return array;
}

// The kind is known when the rest of the tuple is read: its length depends on it.
Term read_term(nb::handle value) {
  if (!PyTuple_Check(value.ptr()) || NB_TUPLE_GET_SIZE(value.ptr()) == 0) {
    PyErr_Format(PyExc_TypeError, "terms: got %R, expected a tuple that begins with a kind",
                 value.ptr());
    throw nb::python_error();
  }
  const long kind = PyLong_AsLong(NB_TUPLE_GET_ITEM(value.ptr(), 0));
  if (kind == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  struct Form {
    const char* text;
    int count;
  };
  static constexpr Form forms[] = {
      {"(0,)", 1},
      {"(1, low, high, bottom_right)", 4},
      {"(2, lengths_ptr)", 2},
      {"(3, lengths_ptr)", 2},
      {"(4, q_ids_ptr, q_batch_stride, kv_ids_ptr, kv_batch_stride)", 5},
      {"(5, ptr, batch, head, row, column, block_q, block_k)", 8},
      {"(6, ptr, batch, head, row, column)", 6},
      {"(7,)", 1},
      {"(8,)", 1}};
  if (kind < 0 || kind > 8) refuse("a mask term's kind is not 0 to 8");
  Reader reader(value, "term", forms[kind].text, forms[kind].count);
  Term term;
  term.kind = static_cast<TermKind>(reader.integer());
  switch (term.kind) {
    case TermKind::band:
      term.low = reader.integer();
      term.high = reader.integer();
      term.bottom_right = reader.integer() != 0;
      break;
    case TermKind::kv_limit:
    case TermKind::q_limit:
      term.lengths = reader.pointer<const int64_t>();
      break;
    case TermKind::segments:
      term.q_ids = reader.pointer<const int64_t>();
      term.q_ids_batch = reader.integer();
      term.kv_ids = reader.pointer<const int64_t>();
      term.kv_ids_batch = reader.integer();
      break;
    case TermKind::blocks:
    case TermKind::dense:
      term.bytes = reader.pointer<const uint8_t>();
      term.batch = reader.integer();
      term.head = reader.integer();
      term.row = reader.integer();
      term.column = reader.integer();
      if (term.kind == TermKind::blocks) {
        term.block_q = reader.integer();
        term.block_k = reader.integer();
      }
      break;
    case TermKind::everything:
    case TermKind::both:
    case TermKind::either:
      break;
  }
  return term;
}

void read_sizes(nb::handle value, Arguments& a) {
  Reader reader(value, "sizes", "(B, N, K, T, S, H, Hv)", 7);
  for (int64_t* size : {&a.batch, &a.q_heads, &a.kv_heads, &a.q_len, &a.kv_len, &a.head_dim,
                        &a.value_dim}) {
    *size = reader.integer();
  }
}

void read_terms(nb::handle value, Arguments& a) {
  if (!PyTuple_Check(value.ptr())) {
    PyErr_Format(PyExc_TypeError, "terms: got %R, expected a tuple of tuples", value.ptr());
    throw nb::python_error();
  }
  const Py_ssize_t count = NB_TUPLE_GET_SIZE(value.ptr());
  if (count > kMaxTerms) refuse("a mask must have 0 to 32 terms");
  a.terms = static_cast<int32_t>(count);
  for (Py_ssize_t i = 0; i < count; ++i) a.term[i] = read_term(NB_TUPLE_GET_ITEM(value.ptr(), i));
}

void read_packed(nb::handle value, Arguments& a) {
  if (value.is_none()) return;
  Reader reader(value, "packed", "(cu_q_ptr, cu_kv_ptr)", 2);
  a.cu_q = reader.pointer<const int64_t>();
  a.cu_kv = reader.pointer<const int64_t>();
  if (a.cu_q == nullptr || a.cu_kv == nullptr) refuse("packed: got a null pointer");
}

void read_bias(nb::handle value, Arguments& a) {
  if (value.is_none()) return;
  Reader reader(value, "bias", "(ptr, dtype, batch, head, row, column)", 6);
  a.bias.data = reader.pointer<const void>();
  a.bias.dtype = static_cast<DType>(reader.integer());
  a.bias.batch = reader.integer();
  a.bias.head = reader.integer();
  a.bias.row = reader.integer();
  a.bias.column = reader.integer();
}

void read_slopes(nb::handle value, Arguments& a) {
  if (value.is_none()) return;
  Reader reader(value, "slopes", "(ptr, batch, head)", 3);
  a.slopes.data = reader.pointer<const float>();
  a.slopes.batch = reader.integer();
  a.slopes.head = reader.integer();
}

void read_sinks(nb::handle value, Arguments& a) {
  if (value.is_none()) return;
  Reader reader(value, "sinks", "(ptr, count)", 2);
  a.sinks = reader.pointer<const float>();
  a.sink_count = reader.integer();
}

void read_pages(nb::handle value, Arguments& a) {
  if (value.is_none()) return;
  Reader reader(value, "pages", "(table_ptr, table_row_stride, page_size, page_count)", 4);
  a.pages.table = reader.pointer<const int64_t>();
  a.pages.row = reader.integer();
  a.pages.page_size = reader.integer();
  a.pages.count = reader.integer();
  if (a.pages.table == nullptr) refuse("pages: got a null pointer");
}

void read_dbias(nb::handle value, Arguments& a) {
  if (value.is_none()) return;
  Reader reader(value, "dbias", "(ptr, batch, head, row, column)", 5);
  a.dbias = reader.pointer<float>();
  a.dbias_batch = reader.integer();
  a.dbias_head = reader.integer();
  a.dbias_row = reader.integer();
  a.dbias_column = reader.integer();
}

const Kernels& chosen(int isa) {
  const Kernels* const* sets = available();
  for (int i = 0; isa >= 0 && sets[i] != nullptr; ++i) {
    if (i == isa) return *sets[i];
  }
  refuse("isa: expected an index into isas()");
}

bool without_queries(const Arguments& a) {
  return a.batch == 0 || a.q_heads == 0 || a.q_len == 0;
}

void run(bool (*pass)(const Arguments&), const Arguments& a) {
  bool done;
  {
    const nb::gil_scoped_release released;
    done = pass(a);
  }
  if (!done) throw std::bad_alloc();  // MemoryError
}

// What both passes take.
Arguments read_call(int threads, int dtype, nb::handle sizes, double scale, double softcap,
                    nb::handle q, nb::handle k, nb::handle v, nb::handle terms, nb::handle packed,
                    nb::handle bias, nb::handle slopes, nb::handle sinks) {
  Arguments a;
  a.threads = threads;
  a.dtype = static_cast<DType>(dtype);
  read_sizes(sizes, a);
  a.scale = static_cast<float>(scale);
  a.softcap = static_cast<float>(softcap);
  a.q = read_array(q, "q");
  a.k = read_array(k, "k");
  a.v = read_array(v, "v");
  read_terms(terms, a);
  read_packed(packed, a);
  read_bias(bias, a);
  read_slopes(slopes, a);
  read_sinks(sinks, a);
  return a;
}

void forward(int isa, int threads, int dtype, nb::handle sizes, double scale, double softcap,
             nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
             nb::handle terms, nb::handle packed, nb::handle bias, nb::handle slopes,
             nb::handle sinks, nb::handle pages) {
  const Kernels& kernels = chosen(isa);
  Arguments a = read_call(threads, dtype, sizes, scale, softcap, q, k, v, terms, packed, bias,
                          slopes, sinks);
  a.out = read_array(out, "out");
  if (!lse.is_none()) a.lse = read_array(lse, "lse");
  read_pages(pages, a);
  if (const char* complaint = check(a, Pass::forward)) refuse(complaint);
  if (without_queries(a)) return;
  run(kernels.forward, a);
}

void backward(int isa, int threads, int dtype, nb::handle sizes, double scale, double softcap,
              nb::handle q, nb::handle k, nb::handle v, nb::handle lse, nb::handle terms,
              nb::handle packed, nb::handle bias, nb::handle slopes, nb::handle sinks,
              nb::handle dout, nb::handle delta, nb::handle dq, nb::handle dk, nb::handle dv,
              nb::handle dbias) {
  const Kernels& kernels = chosen(isa);
  Arguments a = read_call(threads, dtype, sizes, scale, softcap, q, k, v, terms, packed, bias,
                          slopes, sinks);
  a.lse = read_array(lse, "lse");
  a.dout = read_array(dout, "dout");
  a.delta = read_array(delta, "delta");
  a.dq = read_array(dq, "dq");
  a.dk = read_array(dk, "dk");
  a.dv = read_array(dv, "dv");
  read_dbias(dbias, a);
  if (const char* complaint = check(a, Pass::backward)) refuse(complaint);
  // Without queries the gradients of keys and values are still to be set to 0.
  run(kernels.backward, a);
}

Tensor read_tensor(int element, int64_t data, nb::handle sizes, nb::handle strides) {
  Tensor tensor;
  tensor.data = reinterpret_cast<const void*>(static_cast<intptr_t>(data));
  tensor.element = static_cast<Element>(element);
  const Py_ssize_t dims = PyTuple_Check(sizes.ptr()) ? NB_TUPLE_GET_SIZE(sizes.ptr()) : 0;
  if (dims > kMaxDims) refuse("sizes: expected 0 to 64 of them");
  tensor.dims = static_cast<int32_t>(dims);
  Reader size(sizes, "sizes", "of integers", tensor.dims);
  Reader stride(strides, "strides", "as long as sizes", tensor.dims);
  for (int i = 0; i < tensor.dims; ++i) {
    tensor.sizes[i] = size.integer();
    tensor.strides[i] = stride.integer();
  }
  return tensor;
}

void trace_statistics(int isa, int threads, int element, int64_t data, nb::handle sizes,
                      nb::handle strides, int64_t out) {
  const Tensor tensor = read_tensor(element, data, sizes, strides);
  if (const char* complaint = check(tensor)) refuse(complaint);
  double* const row = reinterpret_cast<double*>(static_cast<intptr_t>(out));
  if (row == nullptr) refuse("out: got a null pointer");
  if (!summarize_unlocked(isa, threads, tensor, row)) throw std::bad_alloc();  // MemoryError
}

struct Spin {
  const Kernels* kernels;
  bool bf16;
  int64_t iterations;
  std::vector<double> operations;
};

void spin_one(void* context, int thread) {
  Spin& spin = *static_cast<Spin*>(context);
  spin.operations[static_cast<size_t>(thread)] = spin.kernels->spin(spin.bf16, spin.iterations);
}

std::pair<double, double> spin(int isa, bool bf16, int64_t iterations, int threads) {
  if (threads < 1 || threads > 1024) refuse("threads must be 1 to 1024");
  if (iterations < 1) refuse("iterations must be 1 or more");
  Spin work{&chosen(isa), bf16, iterations, std::vector<double>(static_cast<size_t>(threads))};
  const nb::gil_scoped_release released;
  // The first region only wakes the workers and raises the clock.
  Spin warm_up{work.kernels, bf16, iterations / 16 + 1, work.operations};
  parallel(threads, spin_one, &warm_up);
  const auto start = std::chrono::steady_clock::now();
  parallel(threads, spin_one, &work);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  double operations = 0;
  for (const double count : work.operations) operations += count;
  return {operations, seconds.count()};
}

nb::list names(const Kernels* const* sets) {
  nb::list list;
  for (; *sets != nullptr; ++sets) list.append((*sets)->name);
  return list;
}

std::string compiler() {
#if defined(__apple_build_version__)
  const char* const name = "AppleClang";
#elif defined(__clang__)
  const char* const name = "Clang";
#else
  const char* const name = "GNU";
#endif
#if defined(__clang__)
  const int version[] = {__clang_major__, __clang_minor__, __clang_patchlevel__};
#else
  const int version[] = {__GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__};
#endif
  return std::string(name) + " " + std::to_string(version[0]) + "." + std::to_string(version[1]) +
         "." + std::to_string(version[2]);
}

nb::dict build() {
  nb::dict facts;
  facts["compiler"] = compiler();
  facts["compiled"] = names(compiled());
  facts["version"] = POLYATTN_VERSION;
  return facts;
}

}  // namespace

bool summarize_unlocked(int isa, int threads, const Tensor& tensor, double* row) {
  constexpr int64_t kShort = 32768;  // others wait for these for some microseconds
  const Kernels& kernels = chosen(isa);
  if (threads < 1 || threads > 1024) refuse("threads must be 1 to 1024");
  int64_t count = 1;
  for (int i = 0; i < tensor.dims; ++i) count *= tensor.sizes[i];
  if (count <= kShort) return statistics(kernels, 1, tensor, row);
  const nb::gil_scoped_release released;
  return statistics(kernels, threads, tensor, row);
}

}  // namespace polyattn

NB_MODULE(_native, m) {
  nanobind::set_leak_warnings(false);  // a trace may be open while the program ends
  using namespace nanobind::literals;
  m.doc() = "Tiled CPU attention kernels. Use polyattn.native or the native_cpu backend.";
  m.def("isas", [] { return polyattn::names(polyattn::available()); },
        "Instruction sets that this processor runs, best first.");
  m.def("build", &polyattn::build, "Compiler, compiled instruction sets, version.");
  m.def("forward", &polyattn::forward, "isa"_a, "threads"_a, "dtype"_a, "sizes"_a, "scale"_a,
        "softcap"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a.none(), "terms"_a, "packed"_a.none(),
        "bias"_a.none(), "slopes"_a.none(), "sinks"_a.none(), "pages"_a.none(),
        "out and lse of one attention call.");
  m.def("backward", &polyattn::backward, "isa"_a, "threads"_a, "dtype"_a, "sizes"_a, "scale"_a,
        "softcap"_a, "q"_a, "k"_a, "v"_a, "lse"_a, "terms"_a, "packed"_a.none(), "bias"_a.none(),
        "slopes"_a.none(), "sinks"_a.none(), "dout"_a, "delta"_a, "dq"_a, "dk"_a, "dv"_a,
        "dbias"_a.none(), "Gradients of one attention call.");
  m.def("statistics", &polyattn::trace_statistics, "isa"_a, "threads"_a, "element"_a, "data"_a,
        "sizes"_a, "strides"_a, "out"_a,
        "85 float64 numbers of a tensor: see native/src/statistics/statistics.h.");
  polyattn::add_door(m);
  polyattn::add_trace_lines(m);
  polyattn::add_trace_record(m);
  m.def("spin", &polyattn::spin, "isa"_a, "bf16"_a, "iterations"_a, "threads"_a,
        "(operations, seconds) of multiply-adds from registers only: the peak of this processor.");
  m.def("threads_in_use", &polyattn::pool_name, "Whose threads the kernels run on.");
}

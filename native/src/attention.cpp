// forward() and backward() of the Python module: tuples of integers in, one kernel call, nothing kept.
//
// Arrays arrive as pointers, the bytes that their memory has from there on, and strides, so that
// torch, NumPy and JAX share one binary. All arguments are positional.
#include <nanobind/nanobind.h>

#include <new>

#include "call_parts.h"
#include "module_parts.h"
#include "polyattn/arguments.h"
#include "reader.h"
#include "unlocked.h"

namespace nb = nanobind;

namespace polyattn {
namespace {

// How many bytes the memory has from its pointer on.
Extent read_extent(Reader& reader) {
  const int64_t bytes = reader.integer();
  if (bytes < 0) refuse("bytes: expected 0 or more of them behind a pointer");
  return {bytes, 0};
}

Array read_array(nb::handle value, const char* name) {
  Reader reader(value, name, "(pointer, bytes, batch, head, row)", 5);
  Array array;
  array.data = reader.pointer<void>();
  array.extent = read_extent(reader);
  array.batch = reader.integer();
  array.head = reader.integer();
  array.row = reader.integer();
  return array;
}

// The kind is known when the rest of the tuple is read: its length depends on it.
Term read_term(nb::handle value) {
  if (!PyTuple_Check(value.ptr()) || NB_TUPLE_GET_SIZE(value.ptr()) == 0) {
    PyErr_Format(PyExc_TypeError, "terms: got %R, expected a tuple that begins with a kind", value.ptr());
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
      {"(2, lengths_ptr, bytes)", 3},
      {"(3, lengths_ptr, bytes)", 3},
      {"(4, q_ids_ptr, bytes, q_batch_stride, kv_ids_ptr, bytes, kv_batch_stride)", 7},
      {"(5, ptr, bytes, batch, head, row, column, block_q, block_k)", 9},
      {"(6, ptr, bytes, batch, head, row, column)", 7},
      {"(7,)", 1},
      {"(8,)", 1},
      {"(9, starts_ptr, bytes)", 3},
      {"(10, starts_ptr, bytes)", 3},
      {"(11, size, bottom_right)", 3},
      {"(12, count)", 2},
      {"(13, step, bottom_right)", 3},
      {"(14,)", 1}};
  static_assert(sizeof(forms) / sizeof(forms[0]) == kTermKinds);
  if (kind < 0 || kind >= kTermKinds) refuse("a mask term's kind is not 0 to 14");
  Reader reader(value, "term", forms[kind].text, forms[kind].count);
  Term term;
  term.kind = static_cast<TermKind>(reader.integer());
  switch (term.kind) {
    case TermKind::band:
      term.low = reader.integer();
      term.high = reader.integer();
      term.bottom_right = reader.integer() != 0;
      break;
    case TermKind::chunk:
    case TermKind::step:
      term.size = reader.integer();
      term.bottom_right = reader.integer() != 0;
      break;
    case TermKind::first_keys:
      term.size = reader.integer();
      break;
    case TermKind::kv_limit:
    case TermKind::q_limit:
    case TermKind::kv_start:
    case TermKind::q_start:
      term.lengths = reader.pointer<const int64_t>();
      term.extent = read_extent(reader);
      break;
    case TermKind::segments:
      term.q_ids = reader.pointer<const int64_t>();
      term.extent = read_extent(reader);
      term.q_ids_batch = reader.integer();
      term.kv_ids = reader.pointer<const int64_t>();
      term.kv_extent = read_extent(reader);
      term.kv_ids_batch = reader.integer();
      break;
    case TermKind::blocks:
    case TermKind::dense:
      term.bytes = reader.pointer<const uint8_t>();
      term.extent = read_extent(reader);
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
    case TermKind::complement:
      break;
  }
  return term;
}

}  // namespace

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

void run_pass(bool (*pass)(const Arguments&), const Arguments& a) {
  bool done;
  {
    const Unlocked unlocked;
    done = pass(a);
  }
  if (!done) throw std::bad_alloc();  // MemoryError
}

namespace {

void read_sizes(nb::handle value, Arguments& a) {
  Reader reader(value, "sizes", "(B, N, K, T, S, H, Hv)", 7);
  for (int64_t* size : {&a.batch, &a.q_heads, &a.kv_heads, &a.q_len, &a.kv_len, &a.head_dim, &a.value_dim}) {
    *size = reader.integer();
  }
}

void read_packed(nb::handle value, Arguments& a) {
  if (value.is_none()) return;
  Reader reader(value, "packed", "(cu_q_ptr, bytes, cu_kv_ptr, bytes)", 4);
  a.cu_q = reader.pointer<const int64_t>();
  a.cu_q_extent = read_extent(reader);
  a.cu_kv = reader.pointer<const int64_t>();
  a.cu_kv_extent = read_extent(reader);
  if (a.cu_q == nullptr || a.cu_kv == nullptr) refuse("packed: got a null pointer");
}

void read_bias(nb::handle value, Arguments& a) {
  if (value.is_none()) return;
  Reader reader(value, "bias", "(ptr, bytes, dtype, batch, head, row, column)", 7);
  a.bias.data = reader.pointer<const void>();
  a.bias.extent = read_extent(reader);
  a.bias.dtype = static_cast<DType>(reader.integer());
  a.bias.batch = reader.integer();
  a.bias.head = reader.integer();
  a.bias.row = reader.integer();
  a.bias.column = reader.integer();
}

void read_slopes(nb::handle value, Arguments& a) {
  if (value.is_none()) return;
  Reader reader(value, "slopes", "(ptr, bytes, batch, head)", 4);
  a.slopes.data = reader.pointer<const float>();
  a.slopes.extent = read_extent(reader);
  a.slopes.batch = reader.integer();
  a.slopes.head = reader.integer();
}

void read_sinks(nb::handle value, Arguments& a) {
  if (value.is_none()) return;
  Reader reader(value, "sinks", "(ptr, bytes, count)", 3);
  a.sinks = reader.pointer<const float>();
  a.sinks_extent = read_extent(reader);
  a.sink_count = reader.integer();
}

void read_pages(nb::handle value, Arguments& a) {
  if (value.is_none()) return;
  Reader reader(value, "pages",
                "(table_ptr, bytes, table_row_stride, page_size, page_count, lengths_ptr, bytes)", 7);
  a.pages.table = reader.pointer<const int64_t>();
  a.pages.extent = read_extent(reader);
  a.pages.row = reader.integer();
  a.pages.page_size = reader.integer();
  a.pages.count = reader.integer();
  a.pages.lengths = reader.pointer<const int64_t>();
  a.pages.lengths_extent = read_extent(reader);
  if (a.pages.page_size == 0) refuse("page_size must be 1 to 2**48");
}

Scales read_scales(Reader& reader) {
  Scales scales;
  scales.data = reader.pointer<const float>();
  scales.extent = read_extent(reader);
  scales.batch = reader.integer();
  scales.head = reader.integer();
  return scales;
}

void read_quantised(nb::handle value, Arguments& a) {
  if (value.is_none()) return;
  Reader reader(value, "quantised",
                "(codes, block, k_scales_ptr, bytes, batch, head, v_scales_ptr, bytes, batch, head)", 10);
  a.quantised.codes = static_cast<Codes>(reader.integer());
  a.quantised.block = reader.integer();
  a.quantised.k = read_scales(reader);
  a.quantised.v = read_scales(reader);
  if (a.quantised.codes == Codes::none) refuse("codes must be 1 (int8) or 2 (f8)");
}

void read_dbias(nb::handle value, Arguments& a) {
  if (value.is_none()) return;
  Reader reader(value, "dbias", "(ptr, bytes, batch, head, row, column)", 6);
  a.dbias = reader.pointer<float>();
  a.dbias_extent = read_extent(reader);
  a.dbias_batch = reader.integer();
  a.dbias_head = reader.integer();
  a.dbias_row = reader.integer();
  a.dbias_column = reader.integer();
}

// What both passes take.
Arguments read_call(int threads, int dtype, nb::handle sizes, double scale, double softcap, nb::handle q,
                    nb::handle k, nb::handle v, nb::handle terms, nb::handle packed, nb::handle bias,
                    nb::handle slopes, nb::handle sinks) {
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

void forward(int isa, int threads, int dtype, nb::handle sizes, double scale, double softcap, nb::handle q,
             nb::handle k, nb::handle v, nb::handle out, nb::handle lse, nb::handle terms, nb::handle packed,
             nb::handle bias, nb::handle slopes, nb::handle sinks, nb::handle pages, nb::handle quantised) {
  const Kernels& kernels = chosen(isa);
  Arguments a = read_call(threads, dtype, sizes, scale, softcap, q, k, v, terms, packed, bias, slopes, sinks);
  a.out = read_array(out, "out");
  if (!lse.is_none()) a.lse = read_array(lse, "lse");
  read_pages(pages, a);
  read_quantised(quantised, a);
  if (const char* complaint = check(a, Pass::forward)) refuse(complaint);
  if (without_queries(a)) return;
  run_pass(kernels.forward, a);
}

void backward(int isa, int threads, int dtype, nb::handle sizes, double scale, double softcap, nb::handle q,
              nb::handle k, nb::handle v, nb::handle lse, nb::handle terms, nb::handle packed,
              nb::handle bias, nb::handle slopes, nb::handle sinks, nb::handle dout, nb::handle delta,
              nb::handle dq, nb::handle dk, nb::handle dv, nb::handle dbias) {
  const Kernels& kernels = chosen(isa);
  Arguments a = read_call(threads, dtype, sizes, scale, softcap, q, k, v, terms, packed, bias, slopes, sinks);
  a.lse = read_array(lse, "lse");
  a.dout = read_array(dout, "dout");
  a.delta = read_array(delta, "delta");
  a.dq = read_array(dq, "dq");
  a.dk = read_array(dk, "dk");
  a.dv = read_array(dv, "dv");
  read_dbias(dbias, a);
  if (const char* complaint = check(a, Pass::backward)) refuse(complaint);
  // Without queries the gradients of keys and values are still to be set to 0.
  run_pass(kernels.backward, a);
}

}  // namespace

void add_attention(nb::module_& m) {
  using namespace nanobind::literals;
  m.def("forward", &forward, "isa"_a, "threads"_a, "dtype"_a, "sizes"_a, "scale"_a, "softcap"_a, "q"_a, "k"_a,
        "v"_a, "out"_a, "lse"_a.none(), "terms"_a, "packed"_a.none(), "bias"_a.none(), "slopes"_a.none(),
        "sinks"_a.none(), "pages"_a.none(), "quantised"_a.none(), "out and lse of one attention call.");
  m.def("backward", &backward, "isa"_a, "threads"_a, "dtype"_a, "sizes"_a, "scale"_a, "softcap"_a, "q"_a,
        "k"_a, "v"_a, "lse"_a, "terms"_a, "packed"_a.none(), "bias"_a.none(), "slopes"_a.none(),
        "sinks"_a.none(), "dout"_a, "delta"_a, "dq"_a, "dk"_a, "dv"_a, "dbias"_a.none(),
        "Gradients of one attention call.");
}

}  // namespace polyattn

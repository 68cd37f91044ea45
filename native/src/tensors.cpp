// forward_tensors() and backward_tensors() of the Python module: tensors in, which C reads by itself, and one
// kernel call.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "call_parts.h"
#include "exchange.h"
#include "module_parts.h"
#include "polyattn/arguments.h"
#include "reader.h"

namespace nb = nanobind;

namespace polyattn {
namespace {

nb::handle item(nb::handle tuple, const char* name, Py_ssize_t count, Py_ssize_t i) {
  if (!PyTuple_Check(tuple.ptr()) || PyTuple_GET_SIZE(tuple.ptr()) != count) {
    PyErr_Format(PyExc_TypeError, "%s: got %R, expected a tuple of %zd", name, tuple.ptr(), count);
    throw nb::python_error();
  }
  return PyTuple_GET_ITEM(tuple.ptr(), i);
}

// The largest of 64 bits for those beyond.
int64_t integer(nb::handle value) {
  int beyond = 0;
  const int64_t found = PyLong_AsLongLongAndOverflow(value.ptr(), &beyond);
  if (found == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return beyond > 0 ? std::numeric_limits<int64_t>::max() : found;
}

// (key_scales, value_scales, block) of codes.
void read_scales(const Exchange& tensors, nb::handle quantised, nb::handle keys, Arguments& a) {
  const char* const name = "quantised";
  const nb::handle k = item(quantised, name, 3, 0), v = item(quantised, name, 3, 1);
  a.quantised.codes = tensors.codes(keys);
  a.quantised.block = integer(item(quantised, name, 3, 2));
  if (a.quantised.block < 1) refuse("a block of quantised keys must be 1 or more");
  a.quantised.block = std::min(a.quantised.block, std::max<int64_t>(a.kv_len, 1));  // none is longer
  const int64_t blocks = (a.kv_len + a.quantised.block - 1) / a.quantised.block;
  const int64_t sizes[] = {a.batch, a.kv_heads, blocks};
  a.quantised.k = tensors.scales(k, "key_scales", sizes);
  a.quantised.v = tensors.scales(v, "value_scales", sizes);
}

// What is held while pages are read: a table of sequences, and how many keys each has.
struct Held {
  Integers table, lengths;
};

// (block_table, lengths) of keys in `count` pages of `page_size`.
void read_pages(const Exchange& tensors, nb::handle pages, int64_t count, int64_t page_size, Arguments& a,
                Held& held) {
  held.table = tensors.integers(item(pages, "pages", 2, 0), "block_table", 2);
  held.lengths = tensors.integers(item(pages, "pages", 2, 1), "lengths", 1);
  if (held.table.rows != a.batch || held.lengths.rows != a.batch || page_size < 1) {
    refuse("pages: expected a row of the table and a length for each sequence, and pages of keys");
  }
  // of one dim, whose entries may lie apart
  if (held.lengths.row != 1 && a.batch > 1) refuse("lengths: expected contiguous entries");
  if (__builtin_mul_overflow(held.table.columns, page_size, &a.kv_len)) refuse("pages: more than 2**63 keys");
  a.pages = {held.table.data,   held.table.row,    page_size,          count,
             held.table.extent, held.lengths.data, held.lengths.extent};
}

// The sizes of a call and its arrays, as tensors say them. `rows_first`: they are (B, T, N, H), else (B, N, T, H).
class Call {
 public:
  Call(const Exchange& tensors, int threads, int dtype, bool rows_first, double scale, double softcap)
      : tensors_(tensors), head_(rows_first ? 2 : 1) {
    a.threads = threads;
    a.dtype = static_cast<DType>(dtype);
    a.scale = static_cast<float>(scale);
    a.softcap = static_cast<float>(softcap);
  }
  Call(const Call&) = delete;

  // `pages`, `quantised`: see forward_tensors.
  void read_inputs(nb::handle q, nb::handle k, nb::handle v, nb::handle quantised, nb::handle pages) {
    int64_t queries[4], keys[4], values[4];
    tensors_.shape(q, "q", queries);
    tensors_.shape(k, "k", keys);
    tensors_.shape(v, "v", values);
    const int row = 3 - head_;
    a.batch = queries[0], a.q_heads = queries[head_], a.q_len = queries[row], a.head_dim = queries[3];
    a.kv_heads = keys[head_], a.kv_len = keys[row], a.value_dim = values[3];
    holders_ = pages.is_none() ? a.batch : keys[0], stored_ = a.kv_len;
    if (!pages.is_none()) read_pages(tensors_, pages, keys[0], stored_, a, held_);
    if (!quantised.is_none()) read_scales(tensors_, quantised, k, a);
    a.q = array_of_queries(q, "q", a.head_dim);
    a.k = array_of_keys(k, "k", a.head_dim, a.quantised.codes);
    a.v = array_of_keys(v, "v", a.value_dim, a.quantised.codes);
  }

  // The terms are those of a mask without arrays; `mask` (booleans) and `bias` broadcast to the scores.
  void read_mask(nb::handle terms, nb::handle mask, nb::handle bias) {
    read_terms(terms, a);
    const int64_t scores[] = {a.batch, a.q_heads, a.q_len, a.kv_len};
    if (!mask.is_none()) {
      if (a.terms != 0) refuse("mask: got an array beside terms, expected one of them");
      a.term[a.terms++] = tensors_.allowed(mask, scores);
    }
    if (!bias.is_none()) a.bias = tensors_.added(bias, scores);
  }

  Array array_of_queries(nb::handle tensor, const char* name, int64_t columns) const {
    return array(tensor, name, Codes::none, a.batch, a.q_heads, a.q_len, columns);
  }
  Array array_of_keys(nb::handle tensor, const char* name, int64_t columns, Codes codes = Codes::none) const {
    return array(tensor, name, codes, holders_, a.kv_heads, stored_, columns);
  }

  // (B, N, T) of float32, contiguous.
  Array sums(nb::handle tensor, const char* name) const {
    const int64_t sizes[] = {a.batch, a.q_heads, a.q_len};
    const Scales found = tensors_.scales(tensor, name, sizes);
    return {const_cast<float*>(found.data), found.batch, found.head, 1, found.extent};
  }

  Arguments a;

 private:
  Array array(nb::handle tensor, const char* name, Codes codes, int64_t batch, int64_t heads, int64_t rows,
              int64_t columns) const {
    const bool rows_first = head_ == 2;
    const int64_t shape[] = {batch, rows_first ? rows : heads, rows_first ? heads : rows, columns};
    return tensors_.array(tensor, name, a.dtype, codes, shape, head_, 3 - head_);
  }

  const Exchange& tensors_;
  const int head_;
  int64_t holders_ = 0, stored_ = 0;
  Held held_;
};

void forward_tensors(nb::handle exchange, int isa, int threads, int dtype, bool rows_first, double scale,
                     double softcap, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
                     nb::handle terms, nb::handle mask, nb::handle bias, nb::handle quantised,
                     nb::handle pages, nb::handle lse) {
  attend_tensors(Exchange(exchange), {isa, threads, dtype, rows_first, scale, softcap},
                 {q, k, v, out, terms, mask, bias, quantised, pages, lse});
}

// The backward pass of an output alone: no gradient comes in to the lse. (dq, dk, dv) are written.
void backward_tensors(nb::handle exchange, int isa, int threads, int dtype, bool rows_first, double scale,
                      double softcap, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
                      nb::handle lse, nb::handle dout, nb::handle gradients, nb::handle terms,
                      nb::handle mask) {
  const Kernels& kernels = chosen(isa);
  const Exchange tensors(exchange);
  Call call(tensors, threads, dtype, rows_first, scale, softcap);
  Arguments& a = call.a;
  call.read_inputs(q, k, v, nb::none(), nb::none());
  call.read_mask(terms, mask, nb::none());
  a.out = call.array_of_queries(out, "out", a.value_dim);
  a.lse = call.sums(lse, "lse");
  a.dout = call.array_of_queries(dout, "dout", a.value_dim);
  a.dq = call.array_of_queries(item(gradients, "gradients", 3, 0), "dq", a.head_dim);
  a.dk = call.array_of_keys(item(gradients, "gradients", 3, 1), "dk", a.head_dim);
  a.dv = call.array_of_keys(item(gradients, "gradients", 3, 2), "dv", a.value_dim);
  if (const char* complaint = check(a, Pass::backward)) refuse(complaint);
  // Without queries the gradients of keys and values are still to be set to 0.
  run_pass(kernels.backward, a);
}

// A call that loses a NaN is told by its lse; see polyattn/backends/sdpa/torch/short_ways.py.
bool has_zero(nb::handle exchange, nb::handle tensor) { return Exchange(exchange).has_zero(tensor); }

// Of what is ordinary torch's kernel loses and leaks nothing; see polyattn/backends/sdpa/torch/short_ways.py.
bool are_ordinary(nb::handle exchange, nb::handle q, nb::handle k, nb::handle v, nb::handle mask) {
  const Exchange tensors(exchange);
  const bool open = mask.is_none() || tensors.has_no_empty_row(mask);
  return open && tensors.is_ordinary(q) && tensors.is_ordinary(k) && tensors.is_ordinary(v);
}

// Masks that come as numbers; see polyattn/backends/native_cpu/torch/bare_kernel.py.
bool as_mask(nb::handle exchange, nb::handle bias, nb::handle mask) {
  return Exchange(exchange).as_mask(bias, mask);
}

}  // namespace

void attend_tensors(const Exchange& tensors, const OfProblem& problem, const OfCall& given) {
  const Kernels& kernels = chosen(problem.isa);
  Call call(tensors, problem.threads, problem.dtype, problem.rows_first, problem.scale, problem.softcap);
  Arguments& a = call.a;
  call.read_inputs(given.q, given.k, given.v, given.quantised, given.pages);
  call.read_mask(given.terms, given.mask, given.bias);
  a.out = call.array_of_queries(given.out, "out", a.value_dim);
  if (!given.lse.is_none()) a.lse = call.sums(given.lse, "lse");
  if (const char* complaint = check(a, Pass::forward)) refuse(complaint);
  if (without_queries(a)) return;
  run_pass(kernels.forward, a);
}

void add_tensors(nb::module_& m) {
  using namespace nanobind::literals;
  m.def("forward_tensors", &forward_tensors, "exchange"_a, "isa"_a, "threads"_a, "dtype"_a, "rows_first"_a,
        "scale"_a, "softcap"_a, "q"_a, "k"_a, "v"_a, "out"_a, "terms"_a, "mask"_a.none(), "bias"_a.none(),
        "quantised"_a.none(), "pages"_a.none(), "lse"_a.none() = nb::none(),
        "out of one attention call on tensors that have DLPack's C exchange.");
  m.def("backward_tensors", &backward_tensors, "exchange"_a, "isa"_a, "threads"_a, "dtype"_a, "rows_first"_a,
        "scale"_a, "softcap"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "dout"_a, "gradients"_a, "terms"_a,
        "mask"_a.none(), "Gradients of one attention call on such tensors.");
  m.def("has_zero", &has_zero, "exchange"_a, "tensor"_a, "Whether one of a tensor's floats is zero.");
  m.def("are_ordinary", &are_ordinary, "exchange"_a, "q"_a, "k"_a, "v"_a, "mask"_a.none(),
        "Whether no float is huge or not finite, and each row of the mask, if there is one, holds a true "
        "entry.");
  m.def("as_mask", &as_mask, "exchange"_a, "bias"_a, "mask"_a,
        "Whether a bias is 0 or -inf everywhere; then the booleans of `mask` are where it is 0.");
}

}  // namespace polyattn

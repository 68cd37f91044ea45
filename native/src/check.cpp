// What a call must satisfy before a kernel may run it: no kernel checks anything by itself.
//
// Each function returns nullptr or the complaint. Complaints are constants, or written when there is
// one: an ordinary call costs a few dozen comparisons and no allocation.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "polyattn/arguments.h"
#include "reach.h"

namespace polyattn {
namespace {

// Sizes below this and band limits within kUnbounded keep t + offset + limit inside 64 bits.
constexpr int64_t kMaxSize = int64_t{1} << 48;
// OpenMP ends the process when it cannot start as many threads as it was asked for.
constexpr int32_t kMaxThreads = 1024;

int64_t element_size(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

bool known(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16; }

bool aligned(const void* data, int64_t size) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(size) == 0;
}

struct Shape {
  int64_t batch, heads, rows, columns;
};

const char* check_array(const char* name, const Array& array, const Shape& shape, int64_t size,
                        bool written) {
  const bool empty = shape.batch == 0 || shape.heads == 0 || shape.rows == 0;
  if (array.data == nullptr && !empty) {
    return complain("%s has elements but no data pointer", name);
  }
  if (const char* complaint =
          check_reach(name, {{shape.rows, array.row}, {shape.heads, array.head}, {shape.batch, array.batch}},
                      shape.columns, size, array.extent)) {
    return complaint;
  }
  if (empty) return nullptr;
  if (!aligned(array.data, size)) {
    return complain("%s's pointer is not aligned to its element size", name);
  }
  Dimension dimensions[] = {{shape.rows, array.row}, {shape.heads, array.head}, {shape.batch, array.batch}};
  if (written && overlapping(dimensions, shape.columns)) {
    return complain("%s's rows overlap: each written row needs its own place", name);
  }
  return nullptr;
}

const char* check_sizes(const Arguments& a) {
  for (const int64_t size : {a.batch, a.q_heads, a.kv_heads, a.q_len, a.kv_len}) {
    if (size < 0) return "a size is negative";
    if (size >= kMaxSize) return "a size is 2**48 or more";
  }
  if (a.head_dim < 1 || a.head_dim > kMaxHeadDim) return "head_dim must be 1 to 1024";
  if (a.value_dim < 1 || a.value_dim > kMaxHeadDim) return "value_dim must be 1 to 1024";
  if (a.q_heads > 0) {
    if (a.kv_heads == 0) return "kv_heads is 0, but there are query heads";
    if (a.q_heads % a.kv_heads != 0) return "q_heads must be a multiple of kv_heads";
  }
  int64_t rows = 0, keys = 0;  // the kernels number all rows of all heads
  if (__builtin_mul_overflow(a.batch, a.q_heads, &rows) || __builtin_mul_overflow(rows, a.q_len, &rows) ||
      __builtin_mul_overflow(a.batch, a.kv_heads, &keys) || __builtin_mul_overflow(keys, a.kv_len, &keys) ||
      rows > kMaxExtent || keys > kMaxExtent) {
    return "batch * heads * length is more than 2**61";
  }
  if (!known(a.dtype)) return "dtype must be 0 (float32), 1 (bfloat16) or 2 (float16)";
  if (!std::isfinite(a.scale)) return "scale must be finite";
  if (!std::isfinite(a.softcap) || a.softcap < 0) {
    return "softcap must be finite and positive, or 0 for none";
  }
  if (a.threads < 1 || a.threads > kMaxThreads) return "threads must be 1 to 1024";
  return nullptr;
}

const char* check_lengths(const Arguments& a, const Term& term) {
  if (a.batch == 0) return nullptr;
  if (term.lengths == nullptr) return "a length term has no lengths";
  if (!aligned(term.lengths, 8)) return "a length term's pointer is not aligned to int64";
  return check_reach("a mask's lengths", {}, a.batch, 8, term.extent);
}

const char* check_segments(const Arguments& a, const Term& term) {
  if (a.batch == 0) return nullptr;
  if ((a.q_len > 0 && term.q_ids == nullptr) || (a.kv_len > 0 && term.kv_ids == nullptr)) {
    return "a segments term has no ids";
  }
  if (!aligned(term.q_ids, 8) || !aligned(term.kv_ids, 8)) {
    return "a segments term's pointer is not aligned to int64";
  }
  if (const char* complaint =
          check_reach("a mask's query segments", {{a.batch, term.q_ids_batch}}, a.q_len, 8, term.extent)) {
    return complaint;
  }
  return check_reach("a mask's key segments", {{a.batch, term.kv_ids_batch}}, a.kv_len, 8, term.kv_extent);
}

const char* check_bytes(const Arguments& a, const Term& term) {
  int64_t rows = a.q_len, columns = a.kv_len;
  if (term.kind == TermKind::blocks) {
    if (term.block_q < 1 || term.block_k < 1) return "a block map's block sizes must be 1 or more";
    rows = rows / term.block_q + (rows % term.block_q != 0);
    columns = columns / term.block_k + (columns % term.block_k != 0);
  }
  const bool empty = a.batch == 0 || a.q_heads == 0 || rows == 0 || columns == 0;
  if (term.bytes == nullptr && !empty) return "a block map or dense mask has no data pointer";
  return check_reach(
      term.kind == TermKind::blocks ? "a block map" : "a dense mask",
      {{a.batch, term.batch}, {a.q_heads, term.head}, {rows, term.row}, {columns, term.column}}, 1, 1,
      term.extent);
}

const char* check_term(const Arguments& a, const Term& term) {
  switch (term.kind) {
    case TermKind::everything:
    case TermKind::both:
    case TermKind::either:
    case TermKind::complement:
      return nullptr;
    case TermKind::band:
      if (term.low < -kUnbounded || term.low > kUnbounded || term.high < -kUnbounded ||
          term.high > kUnbounded) {
        return "a band's limits must lie within -2**62 and 2**62";
      }
      return nullptr;
    case TermKind::chunk:
    case TermKind::step:
      if (term.size < 1 || term.size > kUnbounded) return "a chunk's or a step's size must be 1 to 2**62";
      return nullptr;
    case TermKind::first_keys:
      if (term.size < 0 || term.size > kUnbounded) return "the number of first keys must be 0 to 2**62";
      return nullptr;
    case TermKind::kv_limit:
    case TermKind::q_limit:
    case TermKind::kv_start:
    case TermKind::q_start:
      return check_lengths(a, term);
    case TermKind::segments:
      return check_segments(a, term);
    case TermKind::blocks:
    case TermKind::dense:
      return check_bytes(a, term);
  }
  static_assert(kTermKinds == 15);
  return "a mask term's kind is not 0 to 14";
}

// By how many masks the stack grows.
int places(const Term& term) {
  if (term.kind == TermKind::complement) return 0;
  return term.kind == TermKind::both || term.kind == TermKind::either ? -1 : 1;
}

const char* check_program(const Arguments& a) {
  if (a.terms < 0 || a.terms > kMaxTerms) return "a mask must have 0 to 32 terms";
  int depth = 0;
  for (int i = 0; i < a.terms; ++i) {
    if (const char* complaint = check_term(a, a.term[i])) return complaint;
    depth += places(a.term[i]);
    if (depth < 1) return "a mask term joins two masks, but only one is there";
    if (depth > kMaxDepth) return "a mask is nested more than 8 deep";
  }
  if (a.terms > 0 && depth != 1) return "a mask's terms leave more than one mask unjoined";
  return nullptr;
}

const char* check_offsets(const int64_t* offsets, const Extent& extent, int64_t count, int64_t total) {
  if (!aligned(offsets, 8)) return "the packed offsets' pointer is not aligned to int64";
  if (const char* complaint = check_reach("the packed offsets", {}, count + 1, 8, extent)) {
    return complaint;
  }
  if (offsets[0] != 0) return "the first packed offset must be 0";
  for (int64_t i = 0; i < count; ++i) {
    if (offsets[i + 1] < offsets[i]) return "the packed offsets must not decrease";
  }
  if (offsets[count] != total) return "the last packed offset must be the total length";
  return nullptr;
}

bool packed(const Arguments& a) { return a.cu_q != nullptr || a.cu_kv != nullptr; }

const char* check_packed(const Arguments& a, Pass pass) {
  if (!packed(a)) return nullptr;
  if (a.cu_q == nullptr || a.cu_kv == nullptr) return "packed sequences need both offset arrays";
  if (a.pages.page_size != 0) return "packed sequences with paged keys are not supported";
  if (const char* complaint = check_offsets(a.cu_q, a.cu_q_extent, a.batch, a.q_len)) {
    return complaint;
  }
  if (const char* complaint = check_offsets(a.cu_kv, a.cu_kv_extent, a.batch, a.kv_len)) {
    return complaint;
  }
  const char* const stride = "packed arrays need a batch stride of 0";
  for (const Array* array : {&a.q, &a.k, &a.v}) {
    if (array->batch != 0) return stride;
  }
  if (a.lse.data != nullptr && a.lse.batch != 0) return stride;
  if (pass == Pass::forward) return a.out.batch != 0 ? stride : nullptr;
  for (const Array* array : {&a.dout, &a.dq, &a.dk, &a.dv, a.delta.data != nullptr ? &a.delta : &a.out}) {
    if (array->batch != 0) return stride;
  }
  return nullptr;
}

// The keys that some query of sequence b may see: below every kv_limit that the rest of the mask is
// joined to by "and". In postfix order, walked from the end, a join comes before its two masks, and a
// complement before its one.
int64_t reachable_keys(const Arguments& a, int64_t b) {
  int64_t limit = a.pages.lengths != nullptr ? a.pages.lengths[b] : a.kv_len;
  int skip = 0;  // masks under an "either" or a complement, which bound nothing by themselves
  for (int i = a.terms - 1; i >= 0; --i) {
    const Term& term = a.term[i];
    if (skip > 0) {
      skip -= places(term);
    } else if (term.kind == TermKind::either) {
      skip = 2;
    } else if (term.kind == TermKind::complement) {
      skip = 1;
    } else if (term.kind == TermKind::kv_limit) {
      limit = std::min(limit, term.lengths[b]);
    }
  }
  return std::max<int64_t>(limit, 0);
}

const char* check_pages(const Arguments& a, Pass pass) {
  const Pages& pages = a.pages;
  const bool none = pages.table == nullptr && pages.page_size == 0 && pages.count == 0;
  if (none) return pages.lengths == nullptr ? nullptr : "the lengths of pages have no pages";
  if (pass == Pass::backward) return "paged keys have no backward pass";
  if (pages.page_size < 1 || pages.page_size >= kMaxSize) return "page_size must be 1 to 2**48";
  if (pages.count < 0 || pages.count >= kMaxSize) return "the page count must be 0 to 2**48";
  const int64_t columns = a.kv_len / pages.page_size + (a.kv_len % pages.page_size != 0);
  if (pages.table == nullptr && a.batch > 0 && columns > 0) return "paged keys have no page table";
  if (!aligned(pages.table, 8)) return "the page table's pointer is not aligned to int64";
  if (const char* complaint =
          check_reach("the page table", {{a.batch, pages.row}}, columns, 8, pages.extent)) {
    return complaint;
  }
  if (pages.lengths != nullptr) {
    if (!aligned(pages.lengths, 8)) return "the lengths of pages are not aligned to int64";
    const char* const short_of = check_reach("the lengths of pages", {}, a.batch, 8, pages.lengths_extent);
    if (short_of != nullptr) return short_of;
    const auto [least, most] = std::minmax_element(pages.lengths, pages.lengths + a.batch);
    if (a.batch > 0 && (*least < 0 || *most > a.kv_len)) return "a length of pages is not 0 to kv_len";
  }
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t keys = reachable_keys(a, b);
    const int64_t used = keys / pages.page_size + (keys % pages.page_size != 0);
    const int64_t* row = pages.table + b * pages.row;
    for (int64_t i = 0; i < used; ++i) {
      if (row[i] < 0 || row[i] >= pages.count) return "a page table entry is not 0 to count - 1";
    }
  }
  return nullptr;
}

const char* check_scales(const char* name, const Arguments& a, const Scales& scales) {
  const int64_t blocks = a.kv_len / a.quantised.block + (a.kv_len % a.quantised.block != 0);
  const bool empty = a.batch == 0 || a.kv_heads == 0 || blocks == 0;
  if (scales.data == nullptr && !empty) return complain("%s have elements but no data pointer", name);
  if (!aligned(scales.data, 4)) return complain("%s' pointer is not aligned to float32", name);
  return check_reach(name, {{a.batch, scales.batch}, {a.kv_heads, scales.head}}, blocks, 4, scales.extent);
}

const char* check_quantised(const Arguments& a, Pass pass) {
  const Quantised& x = a.quantised;
  if (x.codes == Codes::none) return nullptr;
  if (x.codes != Codes::int8 && x.codes != Codes::f8) return "codes must be 0 (none), 1 (int8) or 2 (f8)";
  if (pass == Pass::backward) return "quantised keys have no backward pass";
  if (packed(a)) return "packed sequences with quantised keys are not supported";
  if (a.pages.page_size != 0) return "paged keys that are quantised are not supported";
  if (x.block < 1 || x.block >= kMaxSize) return "a block of quantised keys must be 1 to 2**48";
  if (const char* complaint = check_scales("the scales of keys", a, x.k)) return complaint;
  return check_scales("the scales of values", a, x.v);
}

const char* check_bias(const Arguments& a) {
  if (!known(a.bias.dtype)) return "the bias dtype must be 0 (float32), 1 (bf16) or 2 (f16)";
  const int64_t size = element_size(a.bias.dtype);
  if (!aligned(a.bias.data, size)) return "the bias's pointer is not aligned to its element size";
  return check_reach(
      "the bias",
      {{a.batch, a.bias.batch}, {a.q_heads, a.bias.head}, {a.q_len, a.bias.row}, {a.kv_len, a.bias.column}},
      1, size, a.bias.extent);
}

const char* check_sinks(const Arguments& a) {
  if (!aligned(a.sinks, 4)) return "the sinks' pointer is not aligned to float32";
  int64_t count = 0;
  if (a.sink_count < 1 || __builtin_mul_overflow(a.sink_count, a.q_heads, &count) || count > kMaxExtent / 4) {
    return "the sinks' count must be 1 or more for each query head";
  }
  return check_reach("the sinks", {}, count, 4, a.sinks_extent);
}

const char* check_extras(const Arguments& a) {
  const char* complaint = nullptr;
  if (a.bias.data != nullptr && (complaint = check_bias(a))) return complaint;
  if (a.slopes.data != nullptr) {
    if (!aligned(a.slopes.data, 4)) return "the slopes' pointer is not aligned to float32";
    complaint = check_reach("the slopes", {{a.batch, a.slopes.batch}, {a.q_heads, a.slopes.head}}, 1, 4,
                            a.slopes.extent);
    if (complaint != nullptr) return complaint;
  }
  return a.sinks != nullptr ? check_sinks(a) : nullptr;
}

// A dimension that dbias shares over is summed over: right only where the bias is shared too.
const char* check_dbias(const Arguments& a) {
  if (a.dbias == nullptr) return nullptr;
  if (a.bias.data == nullptr) return "there is a dbias but no bias";
  if (!aligned(a.dbias, 4)) return "dbias's pointer is not aligned to float32";
  const Dimension dimensions[] = {{a.kv_len, a.dbias_column},
                                  {a.q_len, a.dbias_row},
                                  {a.q_heads, a.dbias_head},
                                  {a.batch, a.dbias_batch}};
  const int64_t bias[] = {a.bias.column, a.bias.row, a.bias.head, a.bias.batch};
  int64_t covered = 1, elements = 1;
  for (int i = 0; i < 4; ++i) {
    const auto [size, stride] = dimensions[i];
    if (stride != 0 && __builtin_mul_overflow(elements, size, &elements)) elements = kMaxExtent;
    if (size <= 1) continue;
    if (stride == 0 && bias[i] != 0) return "dbias's strides may be 0 only where the bias's are";
    if (stride == 0) continue;
    if (stride != covered) return "dbias must be contiguous";
    if (__builtin_mul_overflow(covered, size, &covered) || covered > kMaxExtent / 4) {
      return "dbias's strides are beyond 2**48 elements or reach beyond 2**61 bytes";
    }
  }
  // A stride of 0 is one element, also where the call has none of them.
  return check_reach("dbias", {}, elements, 4, a.dbias_extent);
}

const char* check_arrays(const Arguments& a, Pass pass) {
  const int64_t size = element_size(a.dtype), stored = a.quantised.codes == Codes::none ? size : 1;
  const int64_t batch = packed(a) ? (a.batch > 0) : a.batch;
  const bool paged = a.pages.page_size != 0;
  const int64_t holders = paged ? a.pages.count : batch;
  const int64_t keys = paged && a.kv_len > 0 ? a.pages.page_size : a.kv_len;
  const Shape q{batch, a.q_heads, a.q_len, a.head_dim}, k{holders, a.kv_heads, keys, a.head_dim};
  const Shape v{holders, a.kv_heads, keys, a.value_dim};
  const Shape out{batch, a.q_heads, a.q_len, a.value_dim}, row{batch, a.q_heads, a.q_len, 1};
  const char* complaint = nullptr;
  if ((complaint = check_array("q", a.q, q, size, false))) return complaint;
  if ((complaint = check_array("k", a.k, k, stored, false))) return complaint;
  if ((complaint = check_array("v", a.v, v, stored, false))) return complaint;
  if (pass == Pass::forward) {
    if ((complaint = check_array("out", a.out, out, size, true))) return complaint;
    return a.lse.data != nullptr ? check_array("lse", a.lse, row, 4, true) : nullptr;
  }
  if ((complaint = check_array("lse", a.lse, row, 4, false))) return complaint;
  if ((complaint = check_array("dout", a.dout, out, size, false))) return complaint;
  const bool made = a.delta.data == nullptr;  // of dout and out
  complaint =
      made ? check_array("out", a.out, out, size, false) : check_array("delta", a.delta, row, 4, false);
  if (complaint) return complaint;
  if ((complaint = check_array("dq", a.dq, q, size, true))) return complaint;
  if ((complaint = check_array("dk", a.dk, k, size, true))) return complaint;
  return check_array("dv", a.dv, v, size, true);
}

}  // namespace

const char* check(const Arguments& a, Pass pass) {
  if (const char* complaint = check_sizes(a)) return complaint;
  if (const char* complaint = check_program(a)) return complaint;
  if (const char* complaint = check_packed(a, pass)) return complaint;
  if (const char* complaint = check_pages(a, pass)) return complaint;
  if (const char* complaint = check_quantised(a, pass)) return complaint;
  if (const char* complaint = check_arrays(a, pass)) return complaint;
  if (const char* complaint = check_extras(a)) return complaint;
  return pass == Pass::backward ? check_dbias(a) : nullptr;
}

}  // namespace polyattn

// Hostile values in the parameter struct: what check() accepts must run without leaving its arrays,
// and check() itself must not leave those that it reads.
//
// Build from: fuzz_arguments.cpp and CMake's library polyattn_kernels, with the address and
// undefined-behaviour sanitizers, and either Clang's -fsanitize=fuzzer or fuzz_main.cpp.
//
// An input first makes an ordinary small call, then overwrites up to three of its integers. Half of
// the calls have their memory before that, of the size that the ordinary call needs: whatever the
// integers claim then, check() has to keep the kernels inside. The others get their memory
// afterwards, of exactly the size that the integers tell, so that odd calls run, too.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <vector>

#include "fuzz_memory.h"
#include "permitted.h"
#include "polyattn/arguments.h"

namespace polyattn::testing {

bool fuzzed_passes[2] = {true, true};
int64_t accepted_calls = 0;

namespace {

class Call {
 public:
  Call(Bytes& bytes, Pass pass) : bytes_(bytes), pass_(pass) {
    sizes();
    strides();
    mask();
    extras();
    if (bytes_.chance(128)) ready_ = indices() && allocate();
    for (int64_t mutations = bytes_.below(4); mutations > 0; --mutations) {
      int64_t* field = fields_[static_cast<size_t>(bytes_.next() % fields_.size())];
      *field = hostile(bytes_, *field);
    }
    if (bytes_.chance(8)) a_.threads = static_cast<int32_t>(hostile(bytes_, 1));
    if (bytes_.chance(8)) a_.scale = INFINITY;
    if (bytes_.chance(8)) a_.softcap = -1;
    if (bytes_.chance(8)) a_.terms = static_cast<int32_t>(hostile(bytes_, a_.terms));
    if (bytes_.chance(8)) a_.dtype = static_cast<DType>(bytes_.next());
    if (bytes_.chance(8)) a_.quantised.codes = static_cast<Codes>(bytes_.next());
    if (bytes_.chance(8)) a_.term[0].kind = static_cast<TermKind>(bytes_.next());
    if (limits(a_.term[0])) a_.term[0].extent = of_lengths_;
  }

  void run() {
    if (!ready_ && !indices()) return;
    ready_ = ready_ || allocate();
    if (!ready_) pretend();
    // Too large to be made, or to run, is no fault.
    if (check(a_, pass_) != nullptr || !ready_) return;
    const double work = static_cast<double>(a_.batch) * static_cast<double>(a_.q_heads) *
                        static_cast<double>(a_.q_len) * static_cast<double>(a_.kv_len);
    if (work > 200000 || a_.batch > 64 || a_.q_heads > 64 || a_.kv_heads > 64 || a_.threads > 8 ||
        std::max(a_.q_len, a_.kv_len) > 4096 || a_.sink_count > 64) {
      return;
    }
    if (pass_ == Pass::forward && (a_.batch == 0 || a_.q_heads == 0 || a_.q_len == 0)) return;
    ++accepted_calls;
    for (const Kernels* set : permitted()) {
      pass_ == Pass::forward ? set->forward(a_) : set->backward(a_);
    }
  }

 private:
  std::vector<Array*> arrays() {
    if (pass_ == Pass::forward) return {&a_.q, &a_.k, &a_.v, &a_.out, &a_.lse};
    Array* const sums = without_sums_ ? &a_.out : &a_.delta;
    return {&a_.q, &a_.k, &a_.v, &a_.lse, &a_.dout, sums, &a_.dq, &a_.dk, &a_.dv};
  }

  void field(int64_t& value) { fields_.push_back(&value); }

  void sizes() {
    a_.dtype = static_cast<DType>(bytes_.below(3));
    a_.batch = bytes_.below(3);
    a_.kv_heads = 1 + bytes_.below(2);
    a_.q_heads = a_.kv_heads * (1 + bytes_.below(3));
    a_.q_len = bytes_.chance(40) ? bytes_.below(140) : bytes_.below(9);
    a_.kv_len = bytes_.chance(40) ? bytes_.next() : bytes_.below(20);
    a_.head_dim = 1 + bytes_.below(20);
    a_.value_dim = bytes_.chance(128) ? a_.head_dim : 1 + bytes_.below(70);
    a_.threads = static_cast<int32_t>(1 + bytes_.below(3));
    a_.scale = static_cast<float>(bytes_.next()) / 100;
    a_.softcap = bytes_.chance(60) ? 3.0f : 0.0f;
    packed_ = bytes_.chance(50);
    without_sums_ = pass_ == Pass::backward && bytes_.chance(60);
    paged_ = !packed_ && pass_ == Pass::forward && bytes_.chance(60);
    if (!packed_ && !paged_ && pass_ == Pass::forward && bytes_.chance(80)) quantised();
    for (int64_t* size :
         {&a_.batch, &a_.q_heads, &a_.kv_heads, &a_.q_len, &a_.kv_len, &a_.head_dim, &a_.value_dim}) {
      field(*size);
    }
  }

  void quantised() {
    Quantised& x = a_.quantised;
    x.codes = bytes_.chance(128) ? Codes::int8 : Codes::f8;
    x.block = 1 + bytes_.below(70);
    for (Scales* scales : {&x.k, &x.v}) {
      scales->head = blocks();
      scales->batch = bytes_.chance(40) ? 0 : scales->head * a_.kv_heads;
      field(scales->head);
      field(scales->batch);
    }
    field(x.block);
  }

  bool coded() const { return a_.quantised.codes != Codes::none; }
  int64_t blocks() const {
    const int64_t size = a_.quantised.block;
    return a_.kv_len / size + (a_.kv_len % size != 0);
  }

  void strides() {
    if (paged_) {
      a_.pages.page_size = bytes_.chance(64) ? 16 * (1 + bytes_.below(4)) : 1 + bytes_.below(20);
      a_.pages.count = 1 + bytes_.below(20);
      a_.pages.row = a_.kv_len / a_.pages.page_size + 1;
      for (int64_t* value : {&a_.pages.page_size, &a_.pages.count, &a_.pages.row}) field(*value);
    }
    for (Array* array : arrays()) {
      const bool value = array == &a_.v || array == &a_.out || array == &a_.dout || array == &a_.dv;
      const bool row = array == &a_.lse || array == &a_.delta;
      const bool key = array == &a_.k || array == &a_.v || array == &a_.dk || array == &a_.dv;
      const int64_t heads = key ? a_.kv_heads : a_.q_heads;
      const int64_t length = key ? (paged_ ? a_.pages.page_size : a_.kv_len) : a_.q_len;
      const int64_t width = row ? 1 : value ? a_.value_dim : a_.head_dim;
      array->row = bytes_.chance(128) ? width : width * heads;
      array->head = array->row == width ? width * std::max<int64_t>(length, 1) : width;
      array->batch = packed_ ? 0 : width * heads * std::max<int64_t>(length, 1);
      for (int64_t* stride : {&array->row, &array->head, &array->batch}) field(*stride);
    }
  }

  void mask() {
    int depth = 0;
    const int64_t leaves = bytes_.below(4);
    for (int64_t i = 0; i < leaves; ++i) {
      Term& term = a_.term[a_.terms++];
      const int64_t kind = bytes_.below(kTermKinds - 3);  // neither a join nor the complement, which is last
      term.kind = static_cast<TermKind>(kind < 7 ? kind : kind + 2);
      term.size = bytes_.below(100);
      term.bottom_right = bytes_.chance(128);
      if (bytes_.chance(128)) term.low = bytes_.below(40) - 20;
      if (bytes_.chance(128)) term.high = bytes_.below(40) - 20;
      term.block_q = 1 + bytes_.below(70);
      term.block_k = 1 + bytes_.below(70);
      const bool blocks = term.kind == TermKind::blocks;
      const int64_t rows = blocks ? (a_.q_len + term.block_q - 1) / term.block_q : a_.q_len;
      const int64_t columns = blocks ? (a_.kv_len + term.block_k - 1) / term.block_k : a_.kv_len;
      term.column = bytes_.chance(200);
      term.row = bytes_.chance(200) ? columns : 0;
      term.head = bytes_.chance(128) ? rows * columns : 0;
      term.batch = bytes_.chance(128) ? rows * columns * a_.q_heads : 0;
      term.q_ids_batch = packed_ || bytes_.chance(128) ? 0 : a_.q_len;
      term.kv_ids_batch = packed_ || bytes_.chance(128) ? 0 : a_.kv_len;
      for (int64_t* value : {&term.low, &term.high, &term.size, &term.block_q, &term.block_k, &term.column,
                             &term.row, &term.head, &term.batch, &term.q_ids_batch, &term.kv_ids_batch}) {
        field(*value);
      }
      if (bytes_.chance(30)) a_.term[a_.terms++].kind = TermKind::complement;
      if (++depth == 2) {
        a_.term[a_.terms++].kind = bytes_.chance(128) ? TermKind::both : TermKind::either;
        --depth;
      }
    }
  }

  void extras() {
    bias_ = bytes_.chance(60);
    dbias_ = bias_ && pass_ == Pass::backward && bytes_.chance(200);
    slopes_ = bytes_.chance(40);
    sinks_ = bytes_.chance(40);
    a_.bias.dtype = bytes_.chance(128) ? a_.dtype : DType::f32;
    a_.bias.column = bytes_.chance(200);
    a_.bias.row = bytes_.chance(200) ? (a_.bias.column != 0 ? a_.kv_len : 1) : 0;
    a_.dbias_column = a_.bias.column;
    a_.dbias_row = a_.bias.row;
    a_.slopes.head = bytes_.chance(128);
    a_.sink_count = sinks_ ? 1 + bytes_.below(3) : 0;
    for (int64_t* value :
         {&a_.bias.column, &a_.bias.row, &a_.bias.head, &a_.bias.batch, &a_.slopes.head, &a_.slopes.batch,
          &a_.sink_count, &a_.dbias_column, &a_.dbias_row, &a_.dbias_head, &a_.dbias_batch}) {
      field(*value);
    }
  }

  int64_t* integers(int64_t count, int64_t range, Extent& extent) {
    if (count < 0 || count > Heap::kLimit) return nullptr;
    int64_t* values = static_cast<int64_t*>(heap_.make({{count, 1}}, 8, DType::f32, bytes_, false, extent));
    for (int64_t i = 0; i < count; ++i) {
      values[i] = bytes_.chance(6) ? hostile(bytes_, range) : bytes_.below(std::max<int64_t>(range, 1));
    }
    return values;
  }

  const int64_t* cuts(int64_t total, Extent& extent) {
    int64_t* offsets = integers(a_.batch + 1, std::clamp<int64_t>(total, 0, 254) + 1, extent);
    if (offsets == nullptr) return nullptr;
    if (bytes_.chance(240)) std::sort(offsets, offsets + a_.batch + 1);
    if (bytes_.chance(240)) offsets[0] = 0;
    if (bytes_.chance(240)) offsets[a_.batch] = total;
    return offsets;
  }

  static bool limits(const Term& term) {
    return term.kind == TermKind::kv_limit || term.kind == TermKind::q_limit ||
           term.kind == TermKind::kv_start || term.kind == TermKind::q_start;
  }

  // False when the struct tells of more than can be made: no caller could have filled it.
  bool indices() {
    if (a_.batch < 0 || a_.batch > 64) {
      return !packed_ && !paged_ && std::none_of(a_.term, a_.term + kMaxTerms, limits);
    }
    if (packed_) {
      a_.cu_q = cuts(a_.q_len, a_.cu_q_extent);
      a_.cu_kv = cuts(a_.kv_len, a_.cu_kv_extent);
      if (a_.cu_q == nullptr || a_.cu_kv == nullptr) return false;
    }
    for (Term& term : a_.term) {
      term.lengths = integers(a_.batch, 30, of_lengths_);
      if (limits(term)) term.extent = of_lengths_;
    }
    if (!paged_) return true;
    const int64_t size = a_.pages.page_size;
    if (size < 1 || a_.kv_len < 0) return true;  // refused before the table is read
    const int64_t columns = a_.kv_len / size + (a_.kv_len % size != 0);
    int64_t* table = static_cast<int64_t*>(
        heap_.make({{a_.batch, a_.pages.row}, {columns, 1}}, 8, DType::f32, bytes_, false, a_.pages.extent));
    a_.pages.table = table;
    if (table == nullptr) return false;
    const int64_t keys = std::min<int64_t>(a_.kv_len, 254) + 1;
    if (bytes_.chance(100)) a_.pages.lengths = integers(a_.batch, keys, a_.pages.lengths_extent);
    for (int64_t b = 0; b < a_.batch; ++b) {
      for (int64_t i = 0; i < columns; ++i) {
        table[b * a_.pages.row + i] = bytes_.chance(1)
                                          ? hostile(bytes_, a_.pages.count)
                                          : bytes_.below(std::clamp<int64_t>(a_.pages.count, 1, 255));
      }
    }
    return true;
  }

  // For check() alone, which reads none of these: memory without an end.
  void pretend() {
    constexpr int64_t endless = std::numeric_limits<int64_t>::max();
    alignas(64) static uint8_t anywhere[64];
    const auto floats = reinterpret_cast<float*>(anywhere);
    for (Array* array : arrays()) array->data = anywhere, array->extent = {endless, endless};
    for (Scales* scales : {&a_.quantised.k, &a_.quantised.v}) {
      if (coded()) scales->data = floats, scales->extent = {endless, endless};
    }
    if (bias_) a_.bias.data = anywhere, a_.bias.extent = {endless, endless};
    if (dbias_) a_.dbias = floats, a_.dbias_extent = {endless, endless};
    if (slopes_) a_.slopes.data = floats, a_.slopes.extent = {endless, endless};
    if (sinks_) a_.sinks = floats, a_.sinks_extent = {endless, endless};
    for (int i = 0; i < std::clamp(a_.terms, 0, kMaxTerms); ++i) {
      Term& term = a_.term[i];
      if (limits(term)) continue;
      term.bytes = anywhere;
      term.q_ids = term.kv_ids = reinterpret_cast<int64_t*>(anywhere);
      term.extent = term.kv_extent = {endless, endless};
    }
  }

  bool allocate() {
    const int64_t batch = packed_ ? (a_.batch > 0) : a_.batch;
    for (Array* array : arrays()) {
      const bool value = array == &a_.v || array == &a_.out || array == &a_.dout || array == &a_.dv;
      const bool row = array == &a_.lse || array == &a_.delta;
      const bool key = array == &a_.k || array == &a_.v || array == &a_.dk || array == &a_.dv;
      const bool pages = key && a_.pages.table != nullptr;
      const int64_t heads = key ? a_.kv_heads : a_.q_heads, length = key ? a_.kv_len : a_.q_len;
      const Span batches{pages ? a_.pages.count : batch, array->batch};
      const Span rows{pages ? a_.pages.page_size : length, array->row};
      const Span columns{row ? 1 : value ? a_.value_dim : a_.head_dim, 1};
      const bool code = key && coded();
      const DType type = row                                 ? DType::f32
                         : !code                             ? a_.dtype
                         : a_.quantised.codes == Codes::int8 ? kInt8
                                                             : kF8;
      array->data = heap_.make({batches, {heads, array->head}, rows, columns}, size_of(type), type, bytes_,
                               !code, array->extent);
      if (array->data == nullptr) return false;
      if (code) codes(*array);
    }
    if (coded() && !allocate_scales()) return false;
    if (a_.terms < 0 || a_.terms > kMaxTerms) return false;
    for (int i = 0; i < a_.terms; ++i) {
      if (!allocate_term(a_.term[i])) return false;
    }
    const Span batches{a_.batch, a_.bias.batch}, heads{a_.q_heads, a_.bias.head};
    const Span rows{a_.q_len, a_.bias.row}, columns{a_.kv_len, a_.bias.column};
    if (bias_) {
      a_.bias.data = heap_.make({batches, heads, rows, columns}, size_of(a_.bias.dtype), a_.bias.dtype,
                                bytes_, true, a_.bias.extent);
    }
    if (dbias_) {
      // A stride of 0 means that there is one element, even where the call has a size of 0.
      const auto own = [](int64_t size, int64_t stride) { return Span{stride ? size : 1, stride}; };
      a_.dbias =
          static_cast<float*>(heap_.make({own(a_.batch, a_.dbias_batch), own(a_.q_heads, a_.dbias_head),
                                          own(a_.q_len, a_.dbias_row), own(a_.kv_len, a_.dbias_column)},
                                         4, DType::f32, bytes_, false, a_.dbias_extent));
    }
    if (slopes_) {
      a_.slopes.data =
          static_cast<float*>(heap_.make({{a_.batch, a_.slopes.batch}, {a_.q_heads, a_.slopes.head}}, 4,
                                         DType::f32, bytes_, true, a_.slopes.extent));
    }
    if (sinks_) {
      a_.sinks = static_cast<float*>(heap_.make({{a_.q_heads, a_.sink_count}, {a_.sink_count, 1}}, 4,
                                                DType::f32, bytes_, true, a_.sinks_extent));
    }
    return (!bias_ || a_.bias.data) && (!dbias_ || a_.dbias) && (!slopes_ || a_.slopes.data) &&
           (!sinks_ || a_.sinks);
  }

  // Any byte is a code.
  void codes(const Array& array) {
    uint8_t* const at = static_cast<uint8_t*>(array.data) - array.extent.before;
    for (int64_t i = 0; i < array.extent.before + array.extent.bytes; ++i) at[i] = bytes_.next();
  }

  bool allocate_scales() {
    if (a_.quantised.block < 1 || a_.kv_len < 0) return false;
    for (Scales* scales : {&a_.quantised.k, &a_.quantised.v}) {
      const Span batches{a_.batch, scales->batch}, heads{a_.kv_heads, scales->head};
      scales->data = static_cast<float*>(
          heap_.make({batches, heads, {blocks(), 1}}, 4, DType::f32, bytes_, true, scales->extent));
      if (scales->data == nullptr) return false;
    }
    return true;
  }

  bool allocate_term(Term& term) {
    if (term.kind == TermKind::segments) {
      term.q_ids = static_cast<int64_t*>(heap_.make({{a_.batch, term.q_ids_batch}, {a_.q_len, 1}}, 8,
                                                    DType::f32, bytes_, false, term.extent));
      term.kv_ids = static_cast<int64_t*>(heap_.make({{a_.batch, term.kv_ids_batch}, {a_.kv_len, 1}}, 8,
                                                     DType::f32, bytes_, false, term.kv_extent));
      return term.q_ids != nullptr && term.kv_ids != nullptr;
    }
    if (term.kind != TermKind::blocks && term.kind != TermKind::dense) return true;
    int64_t rows = a_.q_len, columns = a_.kv_len;
    if (term.kind == TermKind::blocks) {
      if (term.block_q < 1 || term.block_k < 1) return false;
      rows = rows / term.block_q + (rows % term.block_q != 0);
      columns = columns / term.block_k + (columns % term.block_k != 0);
    }
    // A row of bytes is made whole, then read as 0 or 1.
    term.bytes = static_cast<uint8_t*>(heap_.make(
        {{a_.batch, term.batch}, {a_.q_heads, term.head}, {rows, term.row}, {columns, term.column}}, 1,
        DType::f32, bytes_, false, term.extent));
    if (term.bytes != nullptr && a_.batch > 0 && a_.q_heads > 0 && rows > 0 && columns > 0) {
      for (int64_t i = 0; i < rows * columns; ++i) {
        const_cast<uint8_t*>(term.bytes)[i / columns * term.row + i % columns * term.column] =
            bytes_.chance(128);
      }
    }
    return term.bytes != nullptr;
  }

  Bytes& bytes_;
  Pass pass_;
  Arguments a_;
  Heap heap_;
  std::vector<int64_t*> fields_;
  Extent of_lengths_;
  bool ready_ = false, packed_ = false, without_sums_ = false, paged_ = false, bias_ = false, dbias_ = false,
       slopes_ = false, sinks_ = false;
};

}  // namespace
}  // namespace polyattn::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace polyattn;
  testing::Bytes bytes(data, size);
  const Pass pass = bytes.chance(128) ? Pass::forward : Pass::backward;
  if (!testing::fuzzed_passes[pass == Pass::backward]) return 0;
  testing::Call(bytes, pass).run();
  return 0;
}

// Hostile values in the parameter struct: what check() accepts must run without leaving its arrays,
// and check() itself must not leave those that it reads.
//
// Build from: fuzz_arguments.cpp and all of ../src except binding.cpp, with the address and
// undefined-behaviour sanitizers, and either Clang's -fsanitize=fuzzer or fuzz_main.cpp.
//
// An input first makes an ordinary small call, then overwrites up to three of its integers. Arrays
// that check() reads (offsets, lengths, page tables) exist before it runs, of exactly the size that
// the struct tells; all others are made when it has accepted, again of exactly that size.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <memory>
#include <vector>

#include "numbers.h"
#include "polyattn/arguments.h"

namespace polyattn::testing {

bool fuzzed_passes[2] = {true, true};  // forward, backward
int64_t accepted_calls = 0;

namespace {

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t next() { return at_ < size_ ? data_[at_++] : 0; }
  int64_t below(int64_t count) { return next() % count; }
  bool chance(int of_256) { return next() < of_256; }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
};

int64_t hostile(Bytes& bytes, int64_t ordinary) {
  constexpr int64_t smallest = std::numeric_limits<int64_t>::min();
  constexpr int64_t largest = std::numeric_limits<int64_t>::max();
  const int64_t choices[] = {0,           -1,           1,           smallest,     largest,
                             largest - 1, int64_t{1} << 31, int64_t{1} << 48, int64_t{1} << 62,
                             -kUnbounded, kUnbounded + 1};
  const int64_t which = bytes.below(16);
  if (which < 11) return choices[which];
  if (which == 11) return static_cast<int64_t>(uint64_t{0} - static_cast<uint64_t>(ordinary));
  return static_cast<int64_t>(static_cast<uint64_t>(ordinary) +
                              static_cast<uint64_t>(bytes.below(9) - 4));
}

struct Span {
  int64_t size, stride;
};

// Allocations that end with the call; none is larger than kLimit elements.
class Heap {
 public:
  static constexpr int64_t kLimit = 1 << 16;

  // Memory for exactly the elements that the spans reach, filled by `bytes`; nullptr when that is
  // too much, or a size is negative. The result points at element 0, wherever negative strides put
  // it.
  void* make(std::initializer_list<Span> spans, int64_t width, DType dtype, Bytes& bytes,
             bool values) {
    double low = 0, high = 0;  // exact below kLimit, and far above it where not
    bool empty = false;
    for (const Span& span : spans) {
      if (span.size < 0) return nullptr;
      empty |= span.size == 0;
      const double reach = static_cast<double>(span.size - 1) * static_cast<double>(span.stride);
      if (span.size > 1) (reach < 0 ? low : high) += reach;
    }
    if (high - low >= kLimit) return nullptr;
    const int64_t count = empty ? 0 : static_cast<int64_t>(high - low) + 1;
    blocks_.emplace_back(std::malloc(static_cast<size_t>(std::max<int64_t>(count * width, 1))),
                         &std::free);
    uint8_t* block = static_cast<uint8_t*>(blocks_.back().get());
    for (int64_t i = 0; i < count * width; ++i) block[i] = 0;
    for (int64_t i = 0; values && i < count; ++i) {
      static constexpr double odd[] = {NAN, INFINITY, -INFINITY, 3e38, -3e38, 1e-40, -0.0};
      const int64_t byte = bytes.next();
      put(dtype, block, i, byte < 7 ? odd[byte] : static_cast<double>(byte - 128) / 50);
    }
    return empty ? block : block - static_cast<int64_t>(low) * width;
  }

 private:
  std::vector<std::unique_ptr<void, decltype(&std::free)>> blocks_;
};

class Call {
 public:
  Call(Bytes& bytes, Pass pass) : bytes_(bytes), pass_(pass) {
    sizes();
    strides();
    mask();
    extras();
    for (int64_t mutations = bytes_.below(4); mutations > 0; --mutations) {
      int64_t* field = fields_[static_cast<size_t>(bytes_.next() % fields_.size())];
      *field = hostile(bytes_, *field);
    }
    if (bytes_.chance(8)) a_.threads = static_cast<int32_t>(hostile(bytes_, 1));
    if (bytes_.chance(8)) a_.scale = INFINITY;
    if (bytes_.chance(8)) a_.softcap = -1;
    if (bytes_.chance(8)) a_.terms = static_cast<int32_t>(hostile(bytes_, a_.terms));
    if (bytes_.chance(8)) a_.dtype = static_cast<DType>(bytes_.next());
    if (bytes_.chance(8)) a_.term[0].kind = static_cast<TermKind>(bytes_.next());
  }

  void run() {
    if (!indices()) return;
    // Any aligned pointer will do for what check() does not read.
    alignas(64) static uint8_t anywhere[64];
    for (Array* array : arrays()) array->data = anywhere;
    if (bias_) a_.bias.data = anywhere;
    if (dbias_) a_.dbias = reinterpret_cast<float*>(anywhere);
    if (slopes_) a_.slopes.data = reinterpret_cast<float*>(anywhere);
    if (sinks_) a_.sinks = reinterpret_cast<float*>(anywhere);
    for (int i = 0; i < std::clamp(a_.terms, 0, kMaxTerms); ++i) {
      Term& term = a_.term[i];
      term.bytes = anywhere;
      term.q_ids = term.kv_ids = reinterpret_cast<int64_t*>(anywhere);
    }
    if (check(a_, pass_) != nullptr) return;
    // Accepted: every size is in its range. Too large to run is no fault.
    const double work = static_cast<double>(a_.batch) * static_cast<double>(a_.q_heads) *
                        static_cast<double>(a_.q_len) * static_cast<double>(a_.kv_len);
    if (work > 200000 || a_.batch > 64 || a_.q_heads > 64 || a_.kv_heads > 64 || a_.threads > 8 ||
        std::max(a_.q_len, a_.kv_len) > 4096 || a_.sink_count > 64) {
      return;
    }
    if (!allocate() || check(a_, pass_) != nullptr) return;
    if (pass_ == Pass::forward && (a_.batch == 0 || a_.q_heads == 0 || a_.q_len == 0)) return;
    ++accepted_calls;
    for (const Kernels* const* set = available(); *set != nullptr; ++set) {
      pass_ == Pass::forward ? (*set)->forward(a_) : (*set)->backward(a_);
    }
  }

 private:
  std::vector<Array*> arrays() {
    if (pass_ == Pass::forward) return {&a_.q, &a_.k, &a_.v, &a_.out, &a_.lse};
    return {&a_.q, &a_.k, &a_.v, &a_.lse, &a_.dout, &a_.delta, &a_.dq, &a_.dk, &a_.dv};
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
    paged_ = !packed_ && pass_ == Pass::forward && bytes_.chance(60);
    for (int64_t* size : {&a_.batch, &a_.q_heads, &a_.kv_heads, &a_.q_len, &a_.kv_len, &a_.head_dim,
                          &a_.value_dim}) {
      field(*size);
    }
  }

  void strides() {
    if (paged_) {
      a_.pages.page_size = 1 + bytes_.below(20);
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
      term.kind = static_cast<TermKind>(bytes_.below(7));
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
      for (int64_t* value : {&term.low, &term.high, &term.block_q, &term.block_k, &term.column,
                             &term.row, &term.head, &term.batch, &term.q_ids_batch,
                             &term.kv_ids_batch}) {
        field(*value);
      }
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
    for (int64_t* value : {&a_.bias.column, &a_.bias.row, &a_.bias.head, &a_.bias.batch,
                           &a_.slopes.head, &a_.slopes.batch, &a_.sink_count, &a_.dbias_column,
                           &a_.dbias_row, &a_.dbias_head, &a_.dbias_batch}) {
      field(*value);
    }
  }

  int64_t* integers(int64_t count, int64_t range) {
    if (count < 0 || count > Heap::kLimit) return nullptr;
    int64_t* values = static_cast<int64_t*>(heap_.make({{count, 1}}, 8, DType::f32, bytes_, false));
    for (int64_t i = 0; i < count; ++i) {
      values[i] = bytes_.chance(6) ? hostile(bytes_, range)
                                   : bytes_.below(std::max<int64_t>(range, 1));
    }
    return values;
  }

  const int64_t* cuts(int64_t total) {
    int64_t* offsets = integers(a_.batch + 1, std::clamp<int64_t>(total, 0, 254) + 1);
    if (offsets == nullptr) return nullptr;
    if (bytes_.chance(240)) std::sort(offsets, offsets + a_.batch + 1);
    if (bytes_.chance(240)) offsets[0] = 0;
    if (bytes_.chance(240)) offsets[a_.batch] = total;
    return offsets;
  }

  // False when the struct tells of more than can be made: no caller could have filled it.
  bool indices() {
    if (a_.batch < 0 || a_.batch > 64) {
      const auto limits = [](const Term& term) {
        return term.kind == TermKind::kv_limit || term.kind == TermKind::q_limit;
      };
      return !packed_ && !paged_ && std::none_of(a_.term, a_.term + kMaxTerms, limits);
    }
    if (packed_) {
      a_.cu_q = cuts(a_.q_len);
      a_.cu_kv = cuts(a_.kv_len);
      if (a_.cu_q == nullptr || a_.cu_kv == nullptr) return false;
    }
    for (Term& term : a_.term) term.lengths = integers(a_.batch, 30);
    if (!paged_) return true;
    const int64_t size = a_.pages.page_size;
    if (size < 1 || a_.kv_len < 0) return true;  // refused before the table is read
    const int64_t columns = a_.kv_len / size + (a_.kv_len % size != 0);
    int64_t* table = static_cast<int64_t*>(
        heap_.make({{a_.batch, a_.pages.row}, {columns, 1}}, 8, DType::f32, bytes_, false));
    a_.pages.table = table;
    if (table == nullptr) return false;
    for (int64_t b = 0; b < a_.batch; ++b) {
      for (int64_t i = 0; i < columns; ++i) {
        table[b * a_.pages.row + i] =
            bytes_.chance(1) ? hostile(bytes_, a_.pages.count)
                             : bytes_.below(std::clamp<int64_t>(a_.pages.count, 1, 255));
      }
    }
    return true;
  }

  bool allocate() {
    const int64_t batch = packed_ ? (a_.batch > 0) : a_.batch;
    for (Array* array : arrays()) {
      const bool value = array == &a_.v || array == &a_.out || array == &a_.dout || array == &a_.dv;
      const bool row = array == &a_.lse || array == &a_.delta;
      const bool key = array == &a_.k || array == &a_.v || array == &a_.dk || array == &a_.dv;
      const bool pages = key && a_.pages.table != nullptr;
      array->data = heap_.make(
          {{pages ? a_.pages.count : batch, array->batch},
           {key ? a_.kv_heads : a_.q_heads, array->head},
           {pages ? a_.pages.page_size : key ? a_.kv_len : a_.q_len, array->row},
           {row ? 1 : value ? a_.value_dim : a_.head_dim, 1}},
          row ? 4 : size_of(a_.dtype), row ? DType::f32 : a_.dtype, bytes_, true);
      if (array->data == nullptr) return false;
    }
    for (int i = 0; i < a_.terms; ++i) {
      if (!allocate_term(a_.term[i])) return false;
    }
    const Span batches{a_.batch, a_.bias.batch}, heads{a_.q_heads, a_.bias.head};
    const Span rows{a_.q_len, a_.bias.row}, columns{a_.kv_len, a_.bias.column};
    if (bias_) {
      a_.bias.data = heap_.make({batches, heads, rows, columns}, size_of(a_.bias.dtype),
                                a_.bias.dtype, bytes_, true);
    }
    if (dbias_) {
      // A stride of 0 means that there is one element, even where the call has a size of 0.
      const auto own = [](int64_t size, int64_t stride) { return Span{stride ? size : 1, stride}; };
      a_.dbias = static_cast<float*>(
          heap_.make({own(a_.batch, a_.dbias_batch), own(a_.q_heads, a_.dbias_head),
                      own(a_.q_len, a_.dbias_row), own(a_.kv_len, a_.dbias_column)},
                     4, DType::f32, bytes_, false));
    }
    if (slopes_) {
      a_.slopes.data = static_cast<float*>(
          heap_.make({{a_.batch, a_.slopes.batch}, {a_.q_heads, a_.slopes.head}}, 4, DType::f32,
                     bytes_, true));
    }
    if (sinks_) {
      a_.sinks = static_cast<float*>(heap_.make(
          {{a_.q_heads, a_.sink_count}, {a_.sink_count, 1}}, 4, DType::f32, bytes_, true));
    }
    return (!bias_ || a_.bias.data) && (!dbias_ || a_.dbias) && (!slopes_ || a_.slopes.data) &&
           (!sinks_ || a_.sinks);
  }

  bool allocate_term(Term& term) {
    if (term.kind == TermKind::segments) {
      term.q_ids = static_cast<int64_t*>(heap_.make(
          {{a_.batch, term.q_ids_batch}, {a_.q_len, 1}}, 8, DType::f32, bytes_, false));
      term.kv_ids = static_cast<int64_t*>(heap_.make(
          {{a_.batch, term.kv_ids_batch}, {a_.kv_len, 1}}, 8, DType::f32, bytes_, false));
      return term.q_ids != nullptr && term.kv_ids != nullptr;
    }
    if (term.kind != TermKind::blocks && term.kind != TermKind::dense) return true;
    int64_t rows = a_.q_len, columns = a_.kv_len;
    if (term.kind == TermKind::blocks) {
      rows = rows / term.block_q + (rows % term.block_q != 0);
      columns = columns / term.block_k + (columns % term.block_k != 0);
    }
    // A row of bytes is made whole, then read as 0 or 1.
    term.bytes = static_cast<uint8_t*>(heap_.make({{a_.batch, term.batch},
                                                   {a_.q_heads, term.head},
                                                   {rows, term.row},
                                                   {columns, term.column}},
                                                  1, DType::f32, bytes_, false));
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
  bool packed_ = false, paged_ = false, bias_ = false, dbias_ = false, slopes_ = false,
       sinks_ = false;
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

// check(): ordinary calls of each kind are accepted; each way to spoil one is refused by its name.
//
// Build from: check_test.cpp, ../src/check.cpp and ../src/reach.cpp.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>

#include "ordinary_calls.h"
#include "polyattn/arguments.h"

namespace polyattn::testing {
namespace {

constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
constexpr int64_t kSmallest = std::numeric_limits<int64_t>::min();

int failures = 0;

void accept(const char* what, const Arguments& a, Pass pass) {
  const char* complaint = check(a, pass);
  if (complaint == nullptr) return;
  ++failures;
  std::printf("FAILED: %s is refused: %s\n", what, complaint);
}

void accept(const char* what, const Arguments& a) {
  accept(what, a, Pass::forward);
  const bool forward_only = a.pages.table != nullptr || a.quantised.codes != Codes::none;
  if (!forward_only) accept(what, a, Pass::backward);
}

// `part` is in the complaint about the spoilt call.
void refuse(const char* part, Arguments a, const std::function<void(Arguments&)>& spoil,
            Pass pass = Pass::forward) {
  spoil(a);
  const char* complaint = check(a, pass);
  if (complaint != nullptr && std::strstr(complaint, part) != nullptr) return;
  ++failures;
  std::printf("FAILED: expected a complaint about '%s', got %s\n", part,
              complaint != nullptr ? complaint : "none");
}

void* shifted(int64_t count) { return reinterpret_cast<uint8_t*>(anywhere) + count; }

void accepted() {
  accept("a plain call", plain());
  accept("packed sequences", packed());
  accept("a page table", paged());
  accept("a bias", with_bias());
  accept("a mask", with_terms({TermKind::band, TermKind::segments, TermKind::dense, TermKind::both,
                               TermKind::either, TermKind::blocks, TermKind::both}));
  accept("a mask and its complement",
         with_terms({TermKind::chunk, TermKind::step, TermKind::both, TermKind::complement,
                     TermKind::kv_start, TermKind::complement, TermKind::either, TermKind::q_start,
                     TermKind::first_keys, TermKind::either, TermKind::both, TermKind::complement}));
  Arguments a = plain();
  a.lse.data = nullptr;
  accept("no lse", a, Pass::forward);
  a = plain();
  a.kv_len = 0;
  a.k.data = a.v.data = a.dk.data = a.dv.data = nullptr;
  accept("no keys, no data", a);
  a = plain();
  a.batch = 0;
  for (Array* array : {&a.q, &a.k, &a.v, &a.out, &a.lse}) array->data = nullptr;
  accept("no batch", a, Pass::forward);
  a = plain();
  a.q.row = -8;
  a.q.extent.before = 4 * 8 * 4;
  a.k.batch = 0;
  a.k.extent.bytes = 2 * 7 * 8 * 4;
  accept("inputs with negative or shared strides", a);
  a = with_terms({TermKind::kv_limit});
  int64_t odd[] = {kLargest, kSmallest};
  a.term[0].lengths = odd;
  accept("lengths beyond the keys and below 0", a);
  a = paged();
  a.terms = 0;
  a.term[1] = a.term[0];
  a.term[0] = Term{};
  a.term[2].kind = TermKind::both;
  a.terms = 3;
  accept("a page table with lengths inside an 'and'", a);
  a.term[1] = a.term[0];
  a.term[0].kind = TermKind::chunk;
  a.term[0].size = 3;
  a.term[1].kind = TermKind::complement;
  a.term[2] = paged().term[0];
  a.term[3].kind = TermKind::both;
  a.terms = 4;
  accept("a page table with lengths beside a complement", a);
}

void sizes() {
  refuse("negative", plain(), [](Arguments& a) { a.kv_len = -1; });
  refuse("2**48", plain(), [](Arguments& a) { a.q_len = kLargest; });
  refuse("2**61", plain(), [](Arguments& a) { a.q_len = a.batch = int64_t{1} << 40; });
  refuse("head_dim", plain(), [](Arguments& a) { a.head_dim = 0; });
  refuse("head_dim", plain(), [](Arguments& a) { a.head_dim = 1025; });
  refuse("value_dim", plain(), [](Arguments& a) { a.value_dim = -8; });
  refuse("multiple of kv_heads", plain(), [](Arguments& a) { a.kv_heads = 3; });
  refuse("kv_heads is 0", plain(), [](Arguments& a) { a.kv_heads = 0; });
  refuse("dtype", plain(), [](Arguments& a) { a.dtype = static_cast<DType>(3); });
  refuse("scale", plain(), [](Arguments& a) { a.scale = NAN; });
  refuse("softcap", plain(), [](Arguments& a) { a.softcap = INFINITY; });
  refuse("softcap", plain(), [](Arguments& a) { a.softcap = -1; });
  refuse("threads", plain(), [](Arguments& a) { a.threads = 0; });
  refuse("threads", plain(), [](Arguments& a) { a.threads = std::numeric_limits<int32_t>::max(); });
}

void arrays() {
  refuse("q has elements", plain(), [](Arguments& a) { a.q.data = nullptr; });
  refuse("k's pointer", plain(), [](Arguments& a) { a.k.data = shifted(2); });
  refuse("lse's pointer", plain(), [](Arguments& a) {
    a.dtype = DType::bf16;
    a.lse.data = shifted(2);
  });
  refuse("v's strides", plain(), [](Arguments& a) { a.v.row = kLargest; });
  refuse("v's strides", plain(), [](Arguments& a) { a.v.head = kSmallest; });
  refuse("out's rows overlap", plain(), [](Arguments& a) { a.out.row = 15; });
  refuse("out's rows overlap", plain(), [](Arguments& a) { a.out.batch = 0; });
  refuse("lse's rows overlap", plain(), [](Arguments& a) { a.lse.row = 0; });
  refuse("lse has elements", plain(), [](Arguments& a) { a.lse.data = nullptr; }, Pass::backward);
  refuse("out has", plain(), [](Arguments& a) { a.delta.data = a.out.data = nullptr; }, Pass::backward);
  refuse(
      "batch stride of 0", packed(), [](Arguments& a) { a.delta.data = nullptr, a.out.batch = 1; },
      Pass::backward);
  refuse("dk's rows overlap", plain(), [](Arguments& a) { a.dk.head = 0; }, Pass::backward);
}

// Every array one byte shorter than what the call reaches, then none at all.
void memories() {
  using Where = std::function<Extent&(Arguments&)>;
  const auto shorter = [](const char* name, const Arguments& a, const Where& of, Pass pass = Pass::forward) {
    const char* const held = "which are all that its memory holds";
    accept(name, a, pass);
    refuse(name, a, [&of](Arguments& spoilt) { of(spoilt).bytes -= 1; }, pass);
    refuse(held, a, [&of](Arguments& spoilt) { of(spoilt) = {}; }, pass);
  };
  const auto of_array = [](Array Arguments::* array) {
    return [array](Arguments& a) -> Extent& { return (a.*array).extent; };
  };
  shorter("q", plain(), of_array(&Arguments::q));
  shorter("k", plain(), of_array(&Arguments::k));
  shorter("v", plain(), of_array(&Arguments::v));
  shorter("out", plain(), of_array(&Arguments::out));
  shorter("lse", plain(), of_array(&Arguments::lse));
  shorter("lse", plain(), of_array(&Arguments::lse), Pass::backward);
  shorter("dout", plain(), of_array(&Arguments::dout), Pass::backward);
  shorter("delta", plain(), of_array(&Arguments::delta), Pass::backward);
  Arguments made = plain();
  made.delta = {};
  shorter("out", made, of_array(&Arguments::out), Pass::backward);
  shorter("dq", plain(), of_array(&Arguments::dq), Pass::backward);
  shorter("dk", plain(), of_array(&Arguments::dk), Pass::backward);
  shorter("dv", plain(), of_array(&Arguments::dv), Pass::backward);
  const auto term = [](Arguments& a) -> Extent& { return a.term[0].extent; };
  shorter("lengths", with_terms({TermKind::kv_limit}), term);
  shorter("lengths", with_terms({TermKind::q_limit}), term);
  shorter("lengths", with_terms({TermKind::kv_start}), term);
  shorter("lengths", with_terms({TermKind::q_start, TermKind::complement}), term);
  shorter("query segments", with_terms({TermKind::segments}), term);
  shorter("key segments", with_terms({TermKind::segments}),
          [](Arguments& a) -> Extent& { return a.term[0].kv_extent; });
  shorter("block map", with_terms({TermKind::blocks}), term);
  shorter("dense mask", with_terms({TermKind::dense}), term);
  shorter("packed offsets", packed(), [](Arguments& a) -> Extent& { return a.cu_q_extent; });
  shorter("packed offsets", packed(), [](Arguments& a) -> Extent& { return a.cu_kv_extent; });
  shorter("page table", paged(), [](Arguments& a) -> Extent& { return a.pages.extent; });
  shorter("lengths of pages", of_lengths(), [](Arguments& a) -> Extent& { return a.pages.lengths_extent; });
  shorter("k", quantised(), of_array(&Arguments::k));
  shorter("v", quantised(), of_array(&Arguments::v));
  shorter("scales of keys", quantised(), [](Arguments& a) -> Extent& { return a.quantised.k.extent; });
  shorter("scales of values", quantised(), [](Arguments& a) -> Extent& { return a.quantised.v.extent; });
  shorter("bias", with_bias(), [](Arguments& a) -> Extent& { return a.bias.extent; });
  const auto dbias = [](Arguments& a) -> Extent& { return a.dbias_extent; };
  shorter("dbias", with_bias(), dbias, Pass::backward);
  Arguments a = plain();
  a.slopes = {numbers, 4, 1, {8 * 4}};
  shorter("slopes", a, [](Arguments& b) -> Extent& { return b.slopes.extent; });
  a = plain();
  a.sinks = numbers;
  a.sink_count = 2;
  a.sinks_extent = {8 * 4};
  shorter("sinks", a, [](Arguments& b) -> Extent& { return b.sinks_extent; });
  refuse("q: got sizes and strides that reach elements -32 to", plain(), [](Arguments& b) { b.q.row = -8; });
  refuse("reach elements 0 to 3, expected elements 0 to 0", a, [](Arguments& b) {
    b.sink_count = 1;  // one value, shared by four heads
    b.sinks_extent = {4};
  });
}

// What holds nothing needs no memory.
void nothing() {
  Arguments a = paged();
  a.batch = 0;
  a.pages.table = nullptr;
  for (Array* array : {&a.q, &a.out, &a.lse}) array->data = nullptr;
  a.pages.extent = {};
  accept("a page table of no sequences", a, Pass::forward);
  a = paged();
  a.kv_len = 0;
  a.pages.table = nullptr;
  a.pages.extent = {};
  int64_t none[] = {0, 0};
  a.term[0].lengths = none;
  accept("a page table without columns", a, Pass::forward);
  a = plain();
  a.q_len = 0;
  for (Array* array : {&a.q, &a.out, &a.lse}) *array = {};
  accept("no queries", a, Pass::forward);
}

void masks() {
  refuse("0 to 32 terms", plain(), [](Arguments& a) { a.terms = 33; });
  refuse("0 to 32 terms", plain(), [](Arguments& a) { a.terms = -1; });
  refuse("kind", with_terms({static_cast<TermKind>(kTermKinds)}), [](Arguments&) {});
  refuse("only one", with_terms({TermKind::both}), [](Arguments&) {});
  refuse("only one", with_terms({TermKind::complement}), [](Arguments&) {});
  refuse("only one", with_terms({TermKind::band, TermKind::complement, TermKind::both}), [](Arguments&) {});
  refuse("only one", with_terms({TermKind::band, TermKind::either}), [](Arguments&) {});
  refuse("unjoined", with_terms({TermKind::band, TermKind::band}), [](Arguments&) {});
  refuse("8 deep", plain(), [](Arguments& a) { a.terms = 9; });
  const Arguments band = with_terms({TermKind::band});
  refuse("band", band, [](Arguments& a) { a.term[0].low = kSmallest; });
  refuse("band", band, [](Arguments& a) { a.term[0].high = kLargest; });
  for (const TermKind kind : {TermKind::chunk, TermKind::step}) {
    for (const int64_t size : {int64_t{0}, int64_t{-1}, kSmallest, kLargest}) {
      refuse("size must be 1", with_terms({kind}), [size](Arguments& a) { a.term[0].size = size; });
    }
  }
  for (const int64_t size : {int64_t{-1}, kSmallest, kLargest}) {
    refuse("first keys", with_terms({TermKind::first_keys}), [size](Arguments& a) { a.term[0].size = size; });
  }
  const Arguments limit = with_terms({TermKind::q_limit});
  refuse("no lengths", limit, [](Arguments& a) { a.term[0].lengths = nullptr; });
  refuse("int64", limit,
         [](Arguments& a) { a.term[0].lengths = reinterpret_cast<const int64_t*>(shifted(4)); });
  const Arguments segments = with_terms({TermKind::segments});
  refuse("no ids", segments, [](Arguments& a) { a.term[0].kv_ids = nullptr; });
  refuse("2**61", segments, [](Arguments& a) { a.term[0].q_ids_batch = kLargest; });
  const Arguments blocks = with_terms({TermKind::blocks});
  refuse("block sizes", blocks, [](Arguments& a) { a.term[0].block_k = 0; });
  refuse("no data", blocks, [](Arguments& a) { a.term[0].bytes = nullptr; });
  const Arguments dense = with_terms({TermKind::dense});
  refuse("2**61", dense, [](Arguments& a) { a.term[0].column = kSmallest; });
}

void codes() {
  accept("codes", quantised());
  refuse("codes must be", quantised(), [](Arguments& a) { a.quantised.codes = Codes{3}; });
  for (const int64_t size : {int64_t{0}, int64_t{-1}, kSmallest, kLargest}) {
    refuse("block", quantised(), [size](Arguments& a) { a.quantised.block = size; });
  }
  refuse("no data pointer", quantised(), [](Arguments& a) { a.quantised.v.data = nullptr; });
  refuse("aligned", quantised(), [](Arguments& a) {
    a.quantised.k.data = reinterpret_cast<float*>(reinterpret_cast<char*>(numbers) + 1);
  });
  refuse("scales of keys", quantised(), [](Arguments& a) { a.quantised.k.head = kLargest; });
  refuse("no backward pass", quantised(), [](Arguments&) {}, Pass::backward);
  refuse("packed", packed(), [](Arguments& a) { a.quantised = quantised().quantised; });
  refuse("paged keys that are", paged(), [](Arguments& a) { a.quantised = quantised().quantised; });
}

void packs_and_pages() {
  refuse("both", packed(), [](Arguments& a) { a.cu_kv = nullptr; });
  refuse("batch stride", packed(), [](Arguments& a) { a.v.batch = 1; });
  refuse("batch stride", packed(), [](Arguments& a) { a.dk.batch = 1; }, Pass::backward);
  refuse("last packed", packed(), [](Arguments& a) { a.q_len = 6; });
  static const int64_t falling[] = {0, 8, 7}, late[] = {1, 2, 7};
  refuse("decrease", packed(), [](Arguments& a) { a.cu_kv = falling; });
  refuse("first packed", packed(), [](Arguments& a) { a.cu_kv = late; });
  refuse("paged keys", packed(), [](Arguments& a) { a.pages = paged().pages; });
  refuse("entry", paged(), [](Arguments& a) { a.terms = 0; });
  refuse("entry", paged(), [](Arguments& a) { a.pages.count = 3; });
  refuse("entry", paged(), [](Arguments& a) {  // "or" lifts the lengths
    a.term[1] = Term{};
    a.term[2].kind = TermKind::either;
    a.terms = 3;
  });
  refuse("entry", paged(), [](Arguments& a) {  // so does a complement, even of a complement
    a.term[1].kind = a.term[2].kind = TermKind::complement;
    a.terms = 3;
  });
  static const int64_t lengths_of_all[] = {20, 20};
  accept("pages whose lengths are told", of_lengths(), Pass::forward);
  refuse("entry", of_lengths(), [](Arguments& a) { a.pages.lengths = lengths_of_all; });
  static const int64_t negative[] = {-1, 5}, beyond[] = {5, 21};
  for (const int64_t* wrong : {negative, beyond}) {
    refuse("a length of pages", of_lengths(), [wrong](Arguments& a) { a.pages.lengths = wrong; });
  }
  refuse("aligned", of_lengths(), [](Arguments& a) {
    a.pages.lengths = reinterpret_cast<const int64_t*>(reinterpret_cast<const char*>(lengths) + 4);
  });
  refuse("have no pages", plain(), [](Arguments& a) { a.pages.lengths = lengths; });
  refuse("page_size", paged(), [](Arguments& a) { a.pages.page_size = 0; });
  refuse("no page table", paged(), [](Arguments& a) { a.pages.table = nullptr; });
  refuse("stride", paged(), [](Arguments& a) { a.pages.row = kLargest; });
  refuse("backward", paged(), [](Arguments&) {}, Pass::backward);
}

void additions() {
  refuse("bias dtype", with_bias(), [](Arguments& a) { a.bias.dtype = static_cast<DType>(7); });
  refuse("bias's pointer", with_bias(), [](Arguments& a) { a.bias.data = shifted(1); });
  refuse("bias's strides", with_bias(), [](Arguments& a) { a.bias.head = kSmallest; });
  refuse("slopes", plain(), [](Arguments& a) { a.slopes = {numbers, kLargest, 1, {}}; });
  refuse("sinks", plain(), [](Arguments& a) { a.sinks = numbers; });
  refuse("sinks", plain(), [](Arguments& a) {
    a.sinks = numbers;
    a.sink_count = kLargest;
  });
  refuse("no bias", with_bias(), [](Arguments& a) { a.bias.data = nullptr; }, Pass::backward);
  refuse("only where", with_bias(), [](Arguments& a) { a.dbias_head = 0; }, Pass::backward);
  refuse("contiguous", with_bias(), [](Arguments& a) { a.dbias_row = 8; }, Pass::backward);
}

void every() {
  accepted();
  sizes();
  arrays();
  masks();
  packs_and_pages();
  codes();
  memories();
  nothing();
  additions();
}

}  // namespace
}  // namespace polyattn::testing

int main() {
  polyattn::testing::every();
  std::printf("check: %d failures\n", polyattn::testing::failures);
  return polyattn::testing::failures == 0 ? 0 : 1;
}

// One attention call as plain data: raw pointers, strides in elements, no framework.
//
// Every front-end (torch, NumPy, JAX, the C++ tests, the fuzz target) fills this struct; check()
// refuses what the kernels could not run without leaving their arrays.
#pragma once

#include <cstdint>

namespace polyattn {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

constexpr int64_t kMaxHeadDim = 1024;
constexpr int kMaxTerms = 32;
constexpr int kMaxDepth = 8;
constexpr int64_t kUnbounded = int64_t{1} << 62;

// The memory around a pointer: how many bytes there are from it on, and before it. Who fills the
// struct asks whoever owns the memory, not the sizes of the call.
struct Extent {
  int64_t bytes = 0, before = 0;
};

// Element (b, n, t, h) lies at data + b * batch + n * head + t * row + h.
struct Array {
  void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
  Extent extent;
};

// Which keys a query may attend, as a program in postfix order over these terms.
// t and j count from 0 within the sequence; T and S are its lengths.
enum class TermKind : int32_t {
  everything = 0,
  band = 1,         // low <= j - (t + offset) <= high, offset = bottom_right ? S - T : 0
  kv_limit = 2,     // j < lengths[b]
  q_limit = 3,      // t < lengths[b]
  segments = 4,     // q_ids[b][t] == kv_ids[b][j]
  blocks = 5,       // bits[b][n][t / block_q][j / block_k]
  dense = 6,        // allowed[b][n][t][j]
  both = 7,         // the last two terms joined by "and"
  either = 8,       // the last two terms joined by "or"
  kv_start = 9,     // j >= lengths[b]
  q_start = 10,     // t >= lengths[b]
  chunk = 11,       // floor(j / size) == floor((t + offset) / size), the offset as a band's
  first_keys = 12,  // j < size
  step = 13,        // size divides j - (t + offset)
  complement = 14,  // what the last term does not allow
};
constexpr int kTermKinds = 15;

struct Term {
  TermKind kind = TermKind::everything;
  int32_t bottom_right = 0;
  int64_t low = -kUnbounded, high = kUnbounded;  // band
  int64_t size = 0;                              // chunk, step: of one; first_keys: how many
  const int64_t* lengths = nullptr;              // limits and starts: one for each batch entry
  const int64_t* q_ids = nullptr;                // segments; batch strides below, 0 = shared
  const int64_t* kv_ids = nullptr;
  int64_t q_ids_batch = 0, kv_ids_batch = 0;
  const uint8_t* bytes = nullptr;                    // blocks, dense: 0 or 1
  int64_t batch = 0, head = 0, row = 0, column = 0;  // strides of `bytes`; 0 = broadcast
  int64_t block_q = 0, block_k = 0;                  // blocks
  Extent extent, kv_extent;                          // of `lengths`, `bytes` or `q_ids`; of `kv_ids`
};

// An additive bias, strides in elements, 0 = broadcast.
struct Bias {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t batch = 0, head = 0, row = 0, column = 0;
  Extent extent;
};

// bias[b][n][t][j] = -slopes[b][n] * |t + S - T - j|
struct Slopes {
  const float* data = nullptr;
  int64_t batch = 0, head = 0;
  Extent extent;
};

// Keys and values in pages: key j of sequence b is row j % page_size of page table[b][j / page_size].
// The arrays' `batch` stride is then the stride between pages. A page_size of 0: no pages.
struct Pages {
  const int64_t* table = nullptr;  // may be nullptr where no sequence has a page
  int64_t row = 0;                 // stride of the table between sequences
  int64_t page_size = 0;
  int64_t count = 0;  // how many pages exist
  Extent extent;      // of the table
  // How many keys each sequence has, 0 to kv_len: its bands end there. nullptr: kv_len each.
  const int64_t* lengths = nullptr;
  Extent lengths_extent;
};

// Keys and values as codes of one byte with scales, one for each head and block of keys: element h of
// key j is code[h] * scale[j / block]. Not with packed sequences or pages, and without a backward pass.
enum class Codes : int32_t { none = 0, int8 = 1, f8 = 2 };  // f8: float8_e4m3fn

// The scale of block i is data[b * batch + n * head + i].
struct Scales {
  const float* data = nullptr;
  int64_t batch = 0, head = 0;
  Extent extent;
};

struct Quantised {
  Codes codes = Codes::none;
  int64_t block = 0;  // keys that share a scale
  Scales k, v;
  bool exact = false;  // the kernels' own: nothing else may be rounded than float32 is
};

struct Arguments {
  DType dtype = DType::f32;
  int64_t batch = 0, q_heads = 0, kv_heads = 0, q_len = 0, kv_len = 0, head_dim = 0, value_dim = 0;
  Array q, k, v, out;
  Array lse;  // float32; data == nullptr: not wanted. In the backward pass: read
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none
  int32_t terms = 0;     // 0: every key is visible
  Term term[kMaxTerms];
  // Packed sequences: batch is their number, sequence b is rows cu[b] to cu[b + 1] of arrays whose
  // batch stride is 0; q_len and kv_len are the totals. Segment ids are indexed by packed position.
  const int64_t* cu_q = nullptr;
  const int64_t* cu_kv = nullptr;
  Extent cu_q_extent, cu_kv_extent;
  Bias bias;
  Slopes slopes;
  const float* sinks = nullptr;  // (q_heads, sink_count), contiguous
  int64_t sink_count = 0;
  Extent sinks_extent;
  Pages pages;
  Quantised quantised;  // of k and v, whose strides are then in codes
  int32_t threads = 1;
  // Backward pass only. delta[b][n][t] = sum(dout * out) - dlse, float32; where it has no data, `out` is read
  // and there is no dlse.
  Array dout, dq, dk, dv, delta;
  float* dbias = nullptr;  // float32, the sizes of `bias`, contiguous; its strides as in Bias
  int64_t dbias_batch = 0, dbias_head = 0, dbias_row = 0, dbias_column = 0;
  Extent dbias_extent;
};

enum class Pass { forward, backward };

// Returns nullptr when the call may run, else what is wrong with it: a text that stays until the
// calling thread's next call of check().
const char* check(const Arguments& a, Pass pass);

enum class Element : int32_t;  // statistics/statistics.h
struct Summary;

// One instruction set. `name` is what POLYATTN_NATIVE_ISA takes.
struct Kernels {
  const char* name;
  // False if there was no memory; what was written then means nothing.
  bool (*forward)(const Arguments& a);
  bool (*backward)(const Arguments& a);
  // Runs independent multiply-adds from registers only; returns the operations done (bf16: with the
  // instruction set's dot products where it has them, else 0).
  double (*spin)(bool bf16, int64_t iterations);
  // Adds a run of elements, the first of them the first one of a block of 64, to a summary.
  void (*summarize)(Element element, const void* run, int64_t count, uint64_t block, Summary& s);
  // Where there is one, to be called before any other, in every process: returns nullptr, or why the
  // operating system does not let this process run the set.
  const char* (*prepare)() = nullptr;
};

// Those that this build has and this processor runs, best first, then those that are never the best of all;
// ends with nullptr.
const Kernels* const* available();
// By name, or nullptr.
const Kernels* find(const char* name);

}  // namespace polyattn

// The order in which few rows fetch keys and values: every row of a block once, of several pages in turn; and that
// it changes no bit of a result, whatever lies at the end of a sequence, nor is anything read that is not there. Nor
// does the order of products with values, the size of items or that keys lie in pages. And which heads walk together
// over small pages.
//
// Build from: memory_habits_test.cpp and the libraries polyattn_testing and polyattn_kernels of CMake.
#define POLYATTN_NAMESPACE testing_memory_habits
#define POLYATTN_REGISTER(x) "+m"(x)

#include "memory_habits.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "kernel/fetcher.h"
#include "kernel/key_rows.h"
#include "numbers.h"

namespace polyattn::testing {
namespace {

using namespace polyattn::testing_memory_habits;

int failures = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

void every_row_once() {
  for (const int64_t row : {-256, 0, 2, 32, 64, 128, 160, 256, 512, 1024, 4096, 1 << 20}) {
    const int pages = pages_of_block(row);
    expect(pages >= 0 && int64_t{1} << pages <= kMostPages, "pages of rows of " + std::to_string(row));
    std::set<int64_t> met;
    bool turns = true;
    for (int64_t j = 0; j < kAheadBlock; ++j) {
      met.insert(in_turn(j, pages));
      const int64_t apart = j == 0 ? 0 : std::abs(in_turn(j, pages) - in_turn(j - 1, pages)) * row;
      turns &= pages == 0 || j == 0 || apart > kPageBytes / 2;
    }
    expect(met.size() == kAheadBlock && *met.begin() == 0 && *met.rbegin() == kAheadBlock - 1,
           "rows of a block, once each, of " + std::to_string(row) + " bytes");
    expect(turns, "neighbours in the order lie in one page, of rows of " + std::to_string(row) + " bytes");
  }
}

// Two lines a step, of rows that lie together or apart, until nothing is left or nothing is to be fetched.
void what_a_queue_fetches() {
  struct Rows {
    int64_t stride, rows, bytes, steps;
  };
  const bool before = fetch_meanwhile;
  for (const bool habit : {false, true}) {
    fetch_meanwhile = habit;
    for (const Rows& x :
         {Rows{128, 64, 128, 64}, Rows{256, 3, 256, 6}, Rows{100, 5, 100, 4}, Rows{64, 1, 64, 1},
          Rows{4096, 7, 128, 7}, Rows{-4096, 7, 300, 21}, Rows{512, 0, 512, 0}}) {
      static const char memory[1 << 16] = {};
      FetchQueue queue;
      queue.clear();
      for (int twice = 0; twice < 2; ++twice) queue.add(memory + (1 << 15), x.stride, x.rows, x.bytes);
      int64_t steps = 0;
      for (; queue.any() && steps < 1000; ++steps) queue.step();
      expect(steps == (habit ? 2 * x.steps : 0), "steps of rows of " + std::to_string(x.bytes) + " bytes, " +
                                                     std::to_string(x.stride) +
                                                     " apart: " + std::to_string(steps));
    }
  }
  fetch_meanwhile = before;
}

// A call of `kv_len` keys, a decoding one unless `q_len` says otherwise; `page`: the rows of a page, or 0.
struct Call {
  static constexpr int64_t kQHeads = 8, kKvHeads = 2, kDim = 64;
  std::vector<uint8_t> q, k, v, out;
  std::vector<int64_t> table;
  std::vector<float> scales;
  Arguments a;

  Call(DType dtype, int64_t kv_len, int64_t page, bool coded, uint64_t seed, int64_t q_len = 1) {
    Random random(seed);
    const int64_t width = dtype == DType::f32 ? 4 : 2, stored = coded ? 1 : width;
    const int64_t keys = page ? (kv_len + page - 1) / page * page : kv_len;
    const auto fill = [&](std::vector<uint8_t>& x, int64_t count, int64_t size) {
      x.resize(static_cast<size_t>(count * size));
      for (int64_t i = 0; i < count; ++i) {
        const float value = static_cast<float>(random.between(-64, 64)) / 64;
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        if (size < 4) bits = size == 2 ? bits >> 16 : bits >> 13 & 0x7f;
        std::memcpy(x.data() + i * size, &bits, static_cast<size_t>(size));
      }
    };
    fill(q, kQHeads * q_len * kDim, width), fill(out, kQHeads * q_len * kDim, width);
    fill(k, kKvHeads * keys * kDim, stored), fill(v, kKvHeads * keys * kDim, stored);
    a.dtype = dtype;
    a.batch = 1, a.q_heads = kQHeads, a.kv_heads = kKvHeads;
    a.q_len = q_len, a.kv_len = kv_len, a.head_dim = a.value_dim = kDim;
    a.q = {q.data(), 0, q_len * kDim, kDim, {}}, a.out = {out.data(), 0, q_len * kDim, kDim, {}};
    a.k = {k.data(), 0, keys * kDim, kDim, {}}, a.v = {v.data(), 0, keys * kDim, kDim, {}};
    a.scale = 0.2f, a.threads = 2;
    if (page) {  // the pages in reverse, each with all heads
      table.resize(static_cast<size_t>(keys / page));
      std::iota(table.rbegin(), table.rend(), 0);
      a.k.batch = a.v.batch = kKvHeads * page * kDim;
      a.k.head = a.v.head = page * kDim;
      a.pages = {table.data(), keys / page, page, keys / page, {}, nullptr, {}};
    }
    if (coded) {
      scales.assign(static_cast<size_t>(kKvHeads * ((kv_len + 15) / 16)), 0.01f);
      const Scales own = {scales.data(), 0, (kv_len + 15) / 16, {}};
      a.quantised = {Codes::int8, 16, own, own};
    }
  }

  std::vector<uint8_t> run(const Kernels& kernels, bool habit) {
    pages_in_turn = tile_by_tile = fetch_meanwhile = fetch_between_blocks = large_items = habit;
    expect(kernels.forward(a), "a call had no memory");
    return out;
  }
};

// Many queries on 600 keys, of which each sees so many before its own; 0: all.
Call windowed(DType dtype, int64_t rows, int64_t width) {
  Call call(dtype, 600, 0, false, static_cast<uint64_t>(rows + width), rows);
  if (width == 0) return call;
  call.a.terms = 1;
  call.a.term[0].kind = TermKind::band;
  call.a.term[0].low = -width;
  call.a.term[0].high = 1;
  call.a.term[0].bottom_right = true;
  return call;
}

void no_bit_changes(const Kernels& kernels) {
  const std::string name = std::string(kernels.name) + ", ";
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t kv_len : {511, 512, 513, 640, 1000, 1024, 1537, 3000}) {
      for (const int64_t page : {0, 8, 16, 100}) {
        for (const bool coded : {false, true}) {
          if (coded && page) continue;  // there are none
          Call call(dtype, kv_len, page, coded, static_cast<uint64_t>(kv_len + page));
          const std::string what = name + std::to_string(kv_len) + " keys, pages of " + std::to_string(page) +
                                   (coded ? ", codes" : "");
          expect(call.run(kernels, false) == call.run(kernels, true), what);
        }
      }
    }
    for (const int64_t rows : {9, 64, 150, 700}) {
      for (const int64_t width : {0, 3, 90, 700}) {
        Call call = windowed(dtype, rows, width);
        const std::string what = name + std::to_string(rows) + " rows, window of " + std::to_string(width);
        expect(call.run(kernels, false) == call.run(kernels, true), what);
      }
    }
  }
}

// Items grow by the number of threads.
void threads_change_no_bit(const Kernels& kernels) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t width : {int64_t{0}, kUnbounded}) {
      Call call = windowed(dtype, 700, width);
      const std::vector<uint8_t> found = call.run(kernels, false);
      for (const int threads : {1, 7}) {
        call.a.threads = threads;
        expect(found == call.run(kernels, true), std::string(kernels.name) + ", window of " +
                                                     std::to_string(width) +
                                                     ", threads: " + std::to_string(threads));
      }
    }
  }
}

// The keys and values of a call in pages, as if they lay together.
Call without_pages(const Call& paged, DType dtype) {
  const Pages& pages = paged.a.pages;
  const int64_t kv_len = paged.a.kv_len, row = Call::kDim * (dtype == DType::f32 ? 4 : 2);
  Call call(dtype, kv_len, 0, false, 0);
  call.q = paged.q;
  call.a.q.data = call.q.data();
  for (int64_t head = 0; head < Call::kKvHeads; ++head) {
    for (int64_t j = 0; j < kv_len; ++j) {
      const int64_t page = pages.table[j / pages.page_size];
      const int64_t from = ((page * Call::kKvHeads + head) * pages.page_size + j % pages.page_size) * row;
      const int64_t to = (head * kv_len + j) * row;
      std::memcpy(call.k.data() + to, paged.k.data() + from, static_cast<size_t>(row));
      std::memcpy(call.v.data() + to, paged.v.data() + from, static_cast<size_t>(row));
    }
  }
  return call;
}

// Whole sixteens of a page are taken at once where tiles multiply.
void pages_change_no_bit(const Kernels& kernels) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t page : {8, 16, 48, 1024}) {
      for (const int64_t kv_len : {7, 33, 560, 1537}) {
        Call paged(dtype, kv_len, page, false, static_cast<uint64_t>(kv_len + page));
        Call together = without_pages(paged, dtype);
        const std::string what = std::string(kernels.name) + ", " + std::to_string(kv_len) +
                                 " keys that lie in pages of " + std::to_string(page) + " and together";
        const std::vector<uint8_t> found = together.run(kernels, false);
        for (const bool habit : {false, true}) expect(found == paged.run(kernels, habit), what);
      }
    }
  }
}

// What a call that was run differentiates to, with its outputs as the gradient that comes in.
std::vector<float> gradients_of(const Kernels& kernels, Call& call, std::vector<float>& lse, bool habit) {
  Arguments a = call.a;
  fetch_between_blocks = habit;
  const int64_t of_q = Call::kQHeads * a.q_len * Call::kDim, of_k = Call::kKvHeads * a.kv_len * Call::kDim;
  const int64_t width = a.dtype == DType::f32 ? 1 : 2;
  std::vector<float> found(static_cast<size_t>(of_q + 2 * of_k) / static_cast<size_t>(width));
  char* const at = reinterpret_cast<char*>(found.data());
  a.lse = {lse.data(), 0, a.q_len, 1, {}};
  a.dout = a.out;
  a.dq = a.q, a.dk = a.k, a.dv = a.v;
  a.dq.data = at, a.dk.data = at + of_q * (4 / width), a.dv.data = at + (of_q + of_k) * (4 / width);
  expect(kernels.backward(a), "a backward pass had no memory");
  return found;
}

void no_bit_of_a_gradient_changes(const Kernels& kernels) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t rows : {9, 64, 150, 700}) {
      Call call(dtype, 1100, 0, false, static_cast<uint64_t>(rows), rows);
      std::vector<float> lse(static_cast<size_t>(Call::kQHeads * rows));
      call.a.lse = {lse.data(), 0, rows, 1, {}};
      call.run(kernels, false);
      const std::vector<float> off = gradients_of(kernels, call, lse, false);
      const std::vector<float> on = gradients_of(kernels, call, lse, true);
      expect(std::memcmp(off.data(), on.data(), off.size() * sizeof(float)) == 0,
             std::string(kernels.name) + ", gradients of " + std::to_string(rows) + " rows");
    }
  }
}

template <int Lanes>
struct Width {
  static constexpr int kLanes = Lanes;
};

// Which calls have heads that walk together over small pages.
void who_walks_together() {
  constexpr int64_t kBytes = 3000 * Call::kKvHeads * 2 * Call::kDim * 4;
  struct Case {
    DType dtype;
    int64_t page, from, together;
  };
  for (const Case& x :
       {Case{DType::f32, 16, kBytes - 1, 2}, Case{DType::f32, 32, kBytes - 1, 2},
        Case{DType::f32, 16, kBytes, 1}, Case{DType::f32, 33, 0, 1}, Case{DType::f32, 0, 0, 1},
        Case{DType::bf16, 16, kBytes / 2 - 1, 2}, Case{DType::bf16, 16, kBytes / 2, 1}}) {
    Call call(x.dtype, 3000, x.page, false, 1);
    page_heads_together_from = x.from;
    const std::string what = "heads together, pages of " + std::to_string(x.page);
    expect(heads_together<Width<16>>(call.a, 4) == x.together, what);
    expect(heads_together<Width<8>>(call.a, 4) == 1, what + ", 8 lanes");
    expect(heads_together<Width<16>>(call.a, kFewRows + 1) == 1, what + ", many rows");
  }
}

float element(const std::vector<uint8_t>& x, size_t i, DType dtype) {
  uint32_t bits = 0;
  if (dtype == DType::f32) {
    std::memcpy(&bits, x.data() + 4 * i, 4);
  } else {
    std::memcpy(reinterpret_cast<uint8_t*>(&bits) + 2, x.data() + 2 * i, 2);
  }
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Together or each by itself, the result is the same within rounding.
void heads_of_small_pages(const Kernels& kernels) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const double allowed = dtype == DType::f32 ? 1e-5 : 2e-3;
    for (const int64_t kv_len : {2048, 2049, 3000}) {
      for (const int64_t page : {1, 8, 16, 24, 32}) {
        Call call(dtype, kv_len, page, false, static_cast<uint64_t>(kv_len + page));
        page_heads_together_from = INT64_MAX;
        const std::vector<uint8_t> alone = call.run(kernels, false);
        page_heads_together_from = 0;
        const std::vector<uint8_t> together = call.run(kernels, false);
        bool same = true;
        for (size_t i = 0; i < size_t{Call::kQHeads * Call::kDim}; ++i) {
          same &= std::abs(element(alone, i, dtype) - element(together, i, dtype)) <= allowed;
        }
        expect(same, std::string(kernels.name) + ", heads together, " + std::to_string(kv_len) +
                         " keys, pages of " + std::to_string(page));
      }
    }
  }
}

void heads_of_small_pages() {
  const int64_t before = page_heads_together_from;
  who_walks_together();
  for (const Kernels* const* set = available(); *set != nullptr; ++set) {
    if (!(*set)->prepare || (*set)->prepare() == nullptr) heads_of_small_pages(**set);
  }
  page_heads_together_from = before;
}

void no_bit_changes() {
  const bool before[] = {pages_in_turn, tile_by_tile, fetch_meanwhile, fetch_between_blocks, large_items};
  for (const Kernels* const* set = available(); *set != nullptr; ++set) {
    if ((*set)->prepare && (*set)->prepare() != nullptr) continue;
    no_bit_changes(**set);
    threads_change_no_bit(**set);
    pages_change_no_bit(**set);
    no_bit_of_a_gradient_changes(**set);
  }
  pages_in_turn = before[0], tile_by_tile = before[1], fetch_meanwhile = before[2];
  fetch_between_blocks = before[3], large_items = before[4];
}

}  // namespace
}  // namespace polyattn::testing

int main() {
  polyattn::testing::every_row_once();
  polyattn::testing::what_a_queue_fetches();
  polyattn::testing::no_bit_changes();
  polyattn::testing::heads_of_small_pages();
  std::printf("%d failures\n", polyattn::testing::failures);
  return polyattn::testing::failures == 0 ? 0 : 1;
}

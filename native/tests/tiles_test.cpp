// What the operating system says to AMX's tiles, and whether every thread that takes tiles gives them back:
// the first with system calls that refuse, the second with the tiles in plain C++.
//
// Build from: tiles_test.cpp and the libraries polyattn_testing and polyattn_kernels of CMake.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "dispatch.h"
#include "numbers.h"
#include "permitted.h"
#include "tile_permission.h"
#include "tile_products.h"
#include "twin_sessions.h"

namespace polyattn::testing {
namespace {

int failures = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

#if defined(__x86_64__) && defined(__linux__)

// A system that answers as it is told, and counts.
struct System {
  int error_of_request = 0;       // 0: it is granted
  bool grants_in_truth = true;    // whether what was granted is then permitted
  bool answers_questions = true;  // older kernels do not know the calls
  bool permitted = false;
  int requests = 0;
};
System linux_here;

int answer(int question, uint64_t argument) {
  constexpr int kPermitted = 0x1022, kRequest = 0x1023;
  constexpr uint64_t kTileData = 18;
  if (!linux_here.answers_questions) return EINVAL;
  if (question == kRequest) {
    ++linux_here.requests;
    expect(argument == kTileData, "another state than the tiles' was requested");
    if (linux_here.error_of_request != 0) return linux_here.error_of_request;
    linux_here.permitted = linux_here.grants_in_truth;
    return 0;
  }
  expect(question == kPermitted, "an unknown question");
  *reinterpret_cast<uint64_t*>(argument) = linux_here.permitted ? uint64_t{1} << kTileData : 0x7;
  return 0;
}

std::string asked(const System& system) {
  linux_here = system;
  const char* refusal = permission_for_tiles(answer);
  return refusal == nullptr ? "" : refusal;
}

void permission() {
  const std::string forbidden = "the operating system, or the container, does not let";
  expect(asked({}).empty() && linux_here.requests == 1, "tiles that are granted may be used");
  System has;
  has.permitted = true;
  expect(asked(has).empty() && linux_here.requests == 0, "what the process has is not requested again");
  for (const int error : {EPERM, EINVAL, EOPNOTSUPP, ENOSYS}) {
    System refuses;
    refuses.error_of_request = error;
    expect(asked(refuses).starts_with(forbidden), "refused with error " + std::to_string(error));
    expect(asked({}).empty(), "a refusal of one question is not the answer to the next");
  }
  System small;
  small.error_of_request = ENOSPC;
  expect(asked(small).starts_with("a thread's stack for signals"), "stacks of signals are named");
  System lies;
  lies.grants_in_truth = false;
  errno = ENOSPC;  // of whoever ran before
  expect(asked(lies).starts_with(forbidden), "what is granted but not permitted is not used");
  System old;
  old.answers_questions = false;
  expect(asked(old).starts_with(forbidden), "a system that knows no such call");
}

#else

void permission() { expect(permit_tiles() != nullptr, "AMX is used on Linux alone"); }

#endif

// What there is not is neither listed nor permitted; asking twice gives the same answer.
void here() {
  const char* refusal = permit_tiles();
  expect(refusal == permit_tiles(), "two answers in one process");
  if (has_tiles()) return;
  expect(find("amx") == nullptr, "amx is listed where there are no tiles");
  expect(refusal != nullptr, "tiles that are not there are permitted");
}

// A call of bfloat16 with all its arrays: grouped heads, several strips, a last one that is not whole.
struct Call {
  static constexpr int64_t kQHeads = 4, kKvHeads = 2, kRows = 150, kKeys = 190, kDim = 40;
  std::vector<uint16_t> q, k, v, out, dout, dq, dk, dv;
  std::vector<float> lse, delta, bias, dbias;
  Arguments a;

  explicit Call(int threads) {
    Random random(7);
    const auto fill = [&](std::vector<uint16_t>& x, int64_t heads, int64_t rows, Array& array) {
      x.resize(static_cast<size_t>(heads * rows * kDim));
      for (uint16_t& value : x) value = static_cast<uint16_t>(0x3f00 | (random.bits() & 0x80ff));
      array = {x.data(), heads * rows * kDim, rows * kDim, kDim, {}};
    };
    fill(q, kQHeads, kRows, a.q), fill(out, kQHeads, kRows, a.out);
    fill(dout, kQHeads, kRows, a.dout), fill(dq, kQHeads, kRows, a.dq);
    fill(k, kKvHeads, kKeys, a.k), fill(v, kKvHeads, kKeys, a.v);
    fill(dk, kKvHeads, kKeys, a.dk), fill(dv, kKvHeads, kKeys, a.dv);
    lse.assign(kQHeads * kRows, 0), delta.assign(kQHeads * kRows, 0);
    a.lse = {lse.data(), kQHeads * kRows, kRows, 1, {}};
    a.delta = {delta.data(), kQHeads * kRows, kRows, 1, {}};
    bias.assign(kRows * kKeys, 0.25f), dbias.assign(kRows * kKeys, 0);
    a.bias.data = bias.data(), a.bias.row = kKeys, a.bias.column = 1;
    a.dbias = dbias.data(), a.dbias_row = kKeys, a.dbias_column = 1;
    a.dtype = DType::bf16;
    a.batch = 1, a.q_heads = kQHeads, a.kv_heads = kKvHeads;
    a.q_len = kRows, a.kv_len = kKeys, a.head_dim = a.value_dim = kDim;
    a.scale = 0.1f;
    a.threads = threads;
  }

  bool run() { return kAmxTwin.forward(a) && kAmxTwin.backward(a); }
  std::vector<uint16_t> results() const {
    std::vector<uint16_t> all = out;
    for (const auto* x : {&dq, &dk, &dv}) all.insert(all.end(), x->begin(), x->end());
    return all;
  }
};

#if defined(__x86_64__) && defined(__linux__)

// The states that this thread has in use: a system saves them at each switch of threads.
uint64_t states_in_use() {
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
  return uint64_t{high} << 32 | low;
}

// The processor's tiles, where there are some: the twin's sums bit for bit, and they are given back.
void tiles_of_the_processor() {
  const Kernels* const amx = find("amx");
  if (amx == nullptr || amx->prepare() != nullptr) return;
  expect(different_sums(3000) == 0, "AMX and its twin sum products to other bits");
  Call call(1);
  expect(amx->forward(call.a) && amx->backward(call.a), "a call failed");
  expect((states_in_use() >> 17 & 3) == 0, "tiles are in use after a call");
}

#else

void tiles_of_the_processor() {}

#endif

// The twin's tiles end the process where a thread uses them outside of a session, or begins a second one.
void sessions() {
  for (const int threads : {1, 2, 5}) {
    const int64_t before = twin_sessions.begun;
    Call call(threads);
    expect(call.run(), "a call failed");
    expect(twin_sessions.begun > before, "no thread took tiles");
    expect(twin_sessions.begun == twin_sessions.ended, "a thread kept its tiles");
  }
  Call few(1);
  few.a.q_len = 1;
  expect(kAmxTwin.forward(few.a), "a call of few rows failed");
  Call none(1);
  none.a.q_len = 0;
  expect(kAmxTwin.forward(none.a), "a call without rows failed");
  kAmxTwin.spin(true, 10);
  expect(twin_sessions.begun == twin_sessions.ended, "tiles were kept");
}

// Threads of the program's own, side by side: each has tiles of its own.
void threads_of_others() {
  Call one(1), other(1), alone(1);
  std::thread first([&] { one.run(); }), second([&] { other.run(); });
  first.join(), second.join();
  alone.run();
  expect(one.results() == alone.results() && other.results() == alone.results(), "calls side by side differ");
  expect(twin_sessions.begun == twin_sessions.ended, "tiles were kept");
}

void forks() {
#if defined(__unix__) || defined(__APPLE__)
  Call parent(2);
  parent.run();
  const pid_t child = fork();
  if (child == 0) {
    Call again(2);
    const bool same =
        again.run() && again.results() == parent.results() && twin_sessions.begun == twin_sessions.ended;
    _exit(same ? 0 : 1);
  }
  int status = 0;
  expect(child > 0 && waitpid(child, &status, 0) == child, "no child");
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 0,
         "a child computes something else, or keeps its tiles");
#endif
}

// Heads of a group, whose strips share an item and, in tiles, overlap, against each head in a call of its own,
// whose strips are alone: the same bits. Keys end within a tile.
void strips_of_an_item(const Kernels& kernels, DType dtype, bool natural, bool with_lse) {
  constexpr int64_t kGroup = 4, kKvHeads = 32, kHeads = kGroup * kKvHeads, kRows = 80, kKeys = 600, kDim = 16;
  const int64_t width = size_of(dtype);
  Random random(11);
  const auto numbers = [&](int64_t heads, int64_t rows) {
    std::vector<uint8_t> bytes(static_cast<size_t>(heads * rows * kDim * width));
    for (int64_t i = 0; i < heads * rows * kDim; ++i) put(dtype, bytes.data(), i, random.uniform(-2, 2));
    return bytes;
  };
  std::vector<uint8_t> q = numbers(kHeads, kRows), k = numbers(kKvHeads, kKeys), v = numbers(kKvHeads, kKeys);
  std::vector<uint8_t> together(q.size()), alone(q.size());
  std::vector<float> lse(static_cast<size_t>(kHeads * kRows));
  const auto array = [&](std::vector<uint8_t>& x, int64_t head, int64_t rows) {
    return Array{x.data() + head * rows * kDim * width, 0, rows * kDim, kDim, {}};
  };
  Arguments a;
  a.dtype = dtype, a.batch = 1, a.q_len = kRows, a.kv_len = kKeys, a.head_dim = a.value_dim = kDim;
  a.scale = 0.5f, a.softcap = natural ? 3.0f : 0.0f, a.threads = 1;
  if (with_lse) a.lse = {lse.data(), 0, kRows, 1, {}};
  a.q_heads = kHeads, a.kv_heads = kKvHeads;
  a.q = array(q, 0, kRows), a.k = array(k, 0, kKeys), a.v = array(v, 0, kKeys);
  a.out = array(together, 0, kRows);
  bool fine = kernels.forward(a);
  a.q_heads = a.kv_heads = 1;
  for (int64_t n = 0; n < kHeads; ++n) {
    a.q = array(q, n, kRows), a.out = array(alone, n, kRows);
    a.k = array(k, n / kGroup, kKeys), a.v = array(v, n / kGroup, kKeys);
    fine &= kernels.forward(a);
  }
  expect(fine && together == alone,
         std::string(kernels.name) + ": strips of an item are not what each is alone");
}

void strips() {
  for (const Kernels* set : permitted()) {
    for (const bool natural : {false, true}) {
      for (const bool with_lse : {false, true}) strips_of_an_item(*set, DType::bf16, natural, with_lse);
    }
    strips_of_an_item(*set, DType::f32, false, true);
  }
}

}  // namespace
}  // namespace polyattn::testing

int main() {
  using namespace polyattn::testing;
  permission();
  here();
  sessions();
  tiles_of_the_processor();
  strips();
  threads_of_others();
  forks();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

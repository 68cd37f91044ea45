// Random inputs for fuzz_arguments.cpp where the compiler has no libFuzzer.
//
// Run: fuzz_arguments [--seed N] [--cases N] [--seconds N] [--pass forward|backward] [--trace 1]
//      [FILE...]
// When the address sanitizer ends the process, the command that repeats the input is printed; other
// sanitizers give no chance to, so --trace prints each one's before it runs.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz_memory.h"
#include "memory_habits.h"
#include "numbers.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
// NOLINTNEXTLINE(bugprone-reserved-identifier): the sanitizers chose the name
extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace {

uint64_t current_seed = 0;
bool trace = false;

void print_seed() {
  std::fprintf(stderr, "repeat: fuzz_arguments --seed %llu --cases 1\n",
               static_cast<unsigned long long>(current_seed));
}

void replay(const std::string& name) {
  std::ifstream file(name, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
}

}  // namespace

int main(int count, char** words) {
  using namespace polyattn::testing;
  uint64_t seed = 1;
  int64_t cases = 20000, done = 0;
  double seconds = 1e9;
  for (int i = 1; i < count; ++i) {
    const std::string name = words[i];
    if (!name.starts_with("--")) {
      replay(name);
      cases = 0;
    } else if (i + 1 < count) {
      const std::string value = words[++i];
      if (name == "--seed") seed = std::strtoull(value.c_str(), nullptr, 10);
      if (name == "--cases") cases = std::strtoll(value.c_str(), nullptr, 10);
      if (name == "--seconds") seconds = std::strtod(value.c_str(), nullptr);
      if (name == "--trace") trace = true;
      if (name == "--pass") {
        fuzzed_passes[0] = value == "forward";
        fuzzed_passes[1] = value == "backward";
      }
    }
  }
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(print_seed);
  const auto start = std::chrono::steady_clock::now();
  for (; done < cases; ++done) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    if (spent.count() > seconds) break;
    current_seed = seed + static_cast<uint64_t>(done);
    if (trace) print_seed();
    Random random(current_seed);
    std::vector<uint8_t> bytes(static_cast<size_t>(random.between(16, 4000)));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.bits());
    polyattn::pages_in_turn = random.bits() & 1;
    polyattn::page_heads_together_from = random.bits() & 1 ? 0 : INT64_MAX;
    polyattn::tile_by_tile = random.bits() & 1;
    polyattn::fetch_meanwhile = random.bits() & 1;
    polyattn::fetch_between_blocks = random.bits() & 1;
    polyattn::large_items = random.bits() & 1;
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%lld inputs, %lld calls accepted and run\n", static_cast<long long>(done),
              static_cast<long long>(accepted_calls));
  return 0;
}

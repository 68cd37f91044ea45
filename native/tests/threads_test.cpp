// parallel() and scratch(): every number once, from several threads, nested, and after fork.
//
// Build from: threads_test.cpp ../src/threads.cpp, without any compiler option for OpenMP; and a
// second executable from the same files with -fopenmp, which puts a libgomp into the process. The
// thread sanitizer can check the first (libgomp's barriers look like races to it).
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "threads.h"

namespace {

int failures = 0;

void expect(bool good, const char* what) {
  if (good) return;
  ++failures;
  std::printf("FAILED: %s\n", what);
}

struct Count {
  explicit Count(int threads) : calls(static_cast<size_t>(threads)) {}
  std::vector<std::atomic<int>> calls;
  bool each_once() const {
    for (const auto& count : calls) {
      if (count.load() != 1) return false;
    }
    return true;
  }
};

void count_call(void* context, int thread) {
  static_cast<Count*>(context)->calls[static_cast<size_t>(thread)].fetch_add(1);
}

bool every_number_once(int threads) {
  Count count(threads);
  polyattn::parallel(threads, count_call, &count);
  return count.each_once();
}

void regions() {
  for (int repeat = 0; repeat < 300; ++repeat) {
    for (const int threads : {1, 2, 3, 8}) {
      if (every_number_once(threads)) continue;
      return expect(false, "a number of a region was not run exactly once");
    }
  }
  expect(every_number_once(60), "60 numbers");
  expect(every_number_once(2), "fewer threads than before");
}

struct Nested {
  std::atomic<int> inner_once{0}, on_caller{0};
};

void run_nested(void* context, int) {
  Nested& nested = *static_cast<Nested*>(context);
  nested.inner_once += every_number_once(3);
  const std::thread::id caller = std::this_thread::get_id();
  struct Where {
    std::thread::id caller;
    std::atomic<int> same{0};
  } where{caller};
  polyattn::parallel(
      3,
      [](void* data, int) {
        Where& place = *static_cast<Where*>(data);
        place.same += std::this_thread::get_id() == place.caller;
      },
      &where);
  nested.on_caller += where.same == 3;
}

void nested_regions() {
  Nested nested;
  polyattn::parallel(2, run_nested, &nested);
  expect(nested.inner_once == 2, "regions inside a region ran every number once");
  expect(nested.on_caller == 2, "regions inside a region ran on their caller");
#if defined(_OPENMP)
  Nested inside;
#pragma omp parallel num_threads(2)
  run_nested(&inside, 0);
  expect(inside.inner_once == 2 && inside.on_caller == 2,
         "regions inside an OpenMP region ran on their caller");
#endif
}

void several_callers() {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  callers.reserve(4);
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&wrong] {
      for (int repeat = 0; repeat < 200; ++repeat) wrong += !every_number_once(3);
    });
  }
  for (std::thread& caller : callers) caller.join();
  expect(wrong == 0, "regions from several threads at once");
}

void scratch_memory() {
  std::byte* first = polyattn::scratch(1000);
  expect(first != nullptr && reinterpret_cast<uintptr_t>(first) % 64 == 0, "alignment");
  std::memset(first, 1, 1000);
  expect(polyattn::scratch(10) == first, "a smaller request keeps the memory");
  std::byte* large = polyattn::scratch(size_t{5} << 20);
  expect(large != nullptr && reinterpret_cast<uintptr_t>(large) % 64 == 0, "large alignment");
  std::memset(large, 2, size_t{5} << 20);
  expect(polyattn::scratch(0) == large, "nothing is still a pointer");
  expect(polyattn::scratch(SIZE_MAX - 100) == nullptr, "too much gives nullptr");
  expect(polyattn::scratch(64) != nullptr, "and works again after that");
  std::byte* elsewhere = nullptr;
  std::thread([&elsewhere] { elsewhere = polyattn::scratch(64); }).join();
  expect(elsewhere != polyattn::scratch(64), "each thread has its own");
}

#if defined(__unix__) || defined(__APPLE__)
// The parent has used its pool; the child has none of its workers. alarm() ends a child that hangs.
void forked_child() {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    bool good = std::string(polyattn::pool_name()) == "own";
    for (int repeat = 0; repeat < 50; ++repeat) good = every_number_once(3) && good;
    _exit(good ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "regions in a forked child");
  expect(every_number_once(3), "regions in the parent after a fork");
}
#endif

}  // namespace

int main() {
#if defined(_OPENMP)
  expect(omp_get_max_threads() > 0, "OpenMP is in the process");
  expect(std::string(polyattn::pool_name()) == "libgomp of the process", "libgomp is found");
#else
  expect(std::string(polyattn::pool_name()) == "own", "without OpenMP, the own pool");
#endif
  regions();
  nested_regions();
  several_callers();
  scratch_memory();
#if defined(__unix__) || defined(__APPLE__)
#if !defined(__SANITIZE_THREAD__)  // which does not follow threads into a forked child
  forked_child();
#endif
#endif
  std::printf("threads (%s): %d failures\n", polyattn::pool_name(), failures);
  return failures == 0 ? 0 : 1;
}

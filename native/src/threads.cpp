// Which workers run a parallel region.
//
// torch's pool is libgomp. Its idle workers spin for milliseconds after each region, so a second
// pool beside it would share its cores with busy waiting. When the process has a libgomp among its
// global symbols (torch loads its own that way), regions run on it, as torch's do; a process
// without one (NumPy, the C++ tests, macOS) gets the small pool below. We do not link to libgomp:
// that would bring a second one.
#include "threads.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#include "fences.h"

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#endif
#if defined(__linux__)
#include <link.h>
#include <sys/mman.h>
#endif

namespace polyattn {
namespace {

using Body = void (*)(void* context, int thread);

thread_local bool inside_region = false;

void run_in_order(int threads, Body body, void* context) {
  for (int i = 0; i < threads; ++i) body(context, i);
}

class InsideRegion {
 public:
  InsideRegion() : outer_(inside_region) { inside_region = true; }
  ~InsideRegion() { inside_region = outer_; }
  InsideRegion(const InsideRegion&) = delete;
  InsideRegion& operator=(const InsideRegion&) = delete;

 private:
  bool outer_;
};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins for about as long as waking a sleeping thread takes; true when `ready` became true.
template <class Ready>
bool spin_until(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(20);
  do {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

// Workers that take the numbers 0 .. threads - 1 of a region one by one. The caller takes numbers
// too, so a worker that wakes up late delays nobody. Never destroyed: its threads are detached.
class Pool {
 public:
  // False when another thread uses the pool: the caller then runs its region by itself.
  bool run(int threads, Body body, void* context) {
    const std::unique_lock<std::mutex> owner(busy_, std::try_to_lock);
    if (!owner) return false;
    grow(threads - 1);
    body_ = body;
    context_ = context;
    threads_ = threads;
    unfinished_.store(threads, std::memory_order_relaxed);
    region_ += 1;
    ticket_.store(region_ << 32 | static_cast<uint32_t>(threads), std::memory_order_release);
    // A worker checks the ticket under the lock before it sleeps, so none can miss it.
    { const std::lock_guard<std::mutex> lock(mutex_); }
    if (threads - 1 >= workers_) {
      work_.notify_all();
    } else {
      for (int i = 1; i < threads; ++i) work_.notify_one();
    }
    take_numbers();
    const auto finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
    if (!spin_until(finished)) {
      std::unique_lock<std::mutex> lock(mutex_);
      done_.wait(lock, finished);
    }
    return true;
  }

 private:
  static constexpr int kMaxWorkers = 512;

  void grow(int workers) {
    if (workers > kMaxWorkers) workers = kMaxWorkers;
    while (workers_ < workers) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::exception&) {  // no thread, or no memory for one
        return;                          // the threads there are, or the caller alone, do all the work
      }
      ++workers_;
    }
  }

  [[noreturn]] void serve() {
    inside_region = true;
    const auto work = [this] { return numbers_left(ticket_.load(std::memory_order_acquire)) != 0; };
    for (;;) {
      if (!spin_until(work)) {
        std::unique_lock<std::mutex> lock(mutex_);
        work_.wait(lock, work);
      }
      take_numbers();
    }
  }

  static uint32_t numbers_left(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

  // The region's number in the upper half of the ticket keeps a late worker from taking a number of
  // one region and running the body of another: a region lasts until all its numbers are finished.
  void take_numbers() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (numbers_left(ticket) != 0) {
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel,
                                         std::memory_order_acquire)) {
        continue;
      }
      body_(context_, threads_ - static_cast<int>(numbers_left(ticket)));
      if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        const std::lock_guard<std::mutex> lock(mutex_);
        done_.notify_one();
      }
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  std::mutex busy_;
  int workers_ = 0;
  uint64_t region_ = 0;
  Body body_ = nullptr;
  void* context_ = nullptr;
  int threads_ = 0;
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int> unfinished_{0};
  std::mutex mutex_;
  std::condition_variable work_, done_;
};

std::atomic<Pool*> own_pool{nullptr};

Pool* find_own_pool() {
  Pool* pool = own_pool.load(std::memory_order_acquire);
  if (pool != nullptr) return pool;
  Pool* made = new (std::nothrow) Pool;
  if (made == nullptr) return nullptr;
  if (own_pool.compare_exchange_strong(pool, made, std::memory_order_acq_rel)) return made;
  delete made;  // another thread was faster; this one never started a worker
  return pool;
}

// The entry points of libgomp (LLVM's and Intel's runtimes have them too).
struct OpenMp {
  std::atomic<void (*)(void (*)(void*), void*, unsigned, unsigned)> parallel{nullptr};
  std::atomic<int (*)()> in_parallel{nullptr}, thread_number{nullptr}, team_size{nullptr};
};

OpenMp openmp;
std::atomic<bool> openmp_found{false};

// Whether this process was forked, and not started anew since (a flag of the kernel's, PF_FORKNOEXEC):
// a fork before this file was loaded is seen by nothing else.
bool started_by_fork() noexcept {
#if defined(__linux__)
  constexpr unsigned long kForkedWithoutExec = 0x40;
  char text[512];
  std::FILE* const file = std::fopen("/proc/self/stat", "re");
  if (file == nullptr) return false;
  const size_t size = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[size] = 0;
  // The flags come seven fields behind the name, which may hold anything, brackets too.
  const char* const name_end = std::strrchr(text, ')');
  unsigned long flags = 0;
  constexpr const char* kForm = ") %*c %*d %*d %*d %*d %*d %lu";
  if (name_end == nullptr || std::sscanf(name_end, kForm, &flags) != 1) return false;
  return (flags & kForkedWithoutExec) != 0;
#else
  return false;
#endif
}

// libgomp hangs in a child process whose parent has used it: its workers do not exist there, and
// nothing tells whether the parent has.
std::atomic<bool> forked{started_by_fork()};

#if defined(__linux__)
std::atomic<uint64_t> objects_seen{0};

// How many shared objects the process has loaded so far: a failed search need not be repeated
// before this changes.
uint64_t objects_loaded() {
  uint64_t count = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* result) {
        *static_cast<uint64_t*>(result) = info->dlpi_adds;
        return 1;
      },
      &count);
  return count;
}

template <class Function>
bool resolve(const char* name, std::atomic<Function>& function) {
  void* address = dlsym(RTLD_DEFAULT, name);
  function.store(reinterpret_cast<Function>(address), std::memory_order_relaxed);
  return address != nullptr;
}

bool find_openmp() {
  if (forked.load(std::memory_order_relaxed)) return false;
  if (openmp_found.load(std::memory_order_acquire)) return true;
  const uint64_t objects = objects_loaded();
  if (objects == objects_seen.load(std::memory_order_relaxed)) return false;
  const bool found =
      resolve("GOMP_parallel", openmp.parallel) && resolve("omp_in_parallel", openmp.in_parallel) &&
      resolve("omp_get_thread_num", openmp.thread_number) && resolve("omp_get_num_threads", openmp.team_size);
  if (found) {
    openmp_found.store(true, std::memory_order_release);
  } else {
    objects_seen.store(objects, std::memory_order_relaxed);
  }
  return found;
}
#else
bool find_openmp() { return false; }
#endif

struct Region {
  int threads;
  Body body;
  void* context;
};

// A number stays with its thread from call to call, which keeps caches warm; a team that is smaller
// than asked for (a limit, a nested region) shares the rest.
void run_share(void* data) {
  const Region& region = *static_cast<const Region*>(data);
  const InsideRegion inside;
  const int step = openmp.team_size.load(std::memory_order_relaxed)();
  for (int i = openmp.thread_number.load(std::memory_order_relaxed)(); i < region.threads; i += step) {
    region.body(region.context, i);
  }
}

#if defined(__unix__) || defined(__APPLE__)
// The child has none of the parent's workers. The old pool is left as it is: another thread may
// have held its locks.
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] {
  forked.store(true, std::memory_order_relaxed);
  own_pool.store(nullptr, std::memory_order_relaxed);
});
#endif

class Arena {
 public:
  Arena() = default;
  ~Arena() { give_up(); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* reserve(size_t bytes) {
    if ((bytes > size_ || data_ == nullptr) && !enlarge(bytes)) return nullptr;
    open_up(data_, bytes);
    close_off(data_ + bytes, size_ - bytes);
    return data_;
  }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20, kSmallUnit = 4096;

  void give_up() {
    if (data_ != nullptr) open_up(data_, size_);
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
  }

  bool enlarge(size_t bytes) {
    give_up();
    // Whole huge pages where the buffer is large: fewer page faults and TLB misses, and lines that share no sets of
    // a second cache.
    const size_t unit = bytes >= kHugePage / 4 ? kHugePage : kSmallUnit;
    if (bytes > SIZE_MAX - unit) return false;
    const size_t size = bytes == 0 ? unit : (bytes + unit - 1) / unit * unit;
    void* memory = nullptr;
    if (posix_memalign(&memory, unit, size) != 0) return false;
#if defined(__linux__)
    if (unit == kHugePage) madvise(memory, size, MADV_HUGEPAGE);
#endif
    data_ = static_cast<std::byte*>(memory);
    size_ = size;
    return true;
  }

  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace

void parallel(int threads, Body body, void* context) {
  if (threads <= 1 || inside_region) return run_in_order(threads, body, context);
  if (find_openmp()) {
    if (openmp.in_parallel.load(std::memory_order_relaxed)()) {
      return run_in_order(threads, body, context);
    }
    Region region{threads, body, context};
    openmp.parallel.load(std::memory_order_relaxed)(run_share, &region, static_cast<unsigned>(threads), 0);
    return;
  }
  const InsideRegion inside;
  Pool* pool = find_own_pool();
  if (pool == nullptr || !pool->run(threads, body, context)) run_in_order(threads, body, context);
}

const char* pool_name() { return find_openmp() ? "libgomp of the process" : "own"; }

std::byte* scratch(size_t bytes) {
  static thread_local Arena arena;
  return arena.reserve(bytes);
}

}  // namespace polyattn

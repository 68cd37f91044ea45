// Divides a tensor into parts, has each summarised, and joins the summaries.
//
// Parts depend on the size of the tensor alone and are joined in order, so the result does not
// depend on the number of threads.
#include "statistics/statistics.h"

#include <atomic>
#include <cmath>
#include <cstddef>
#include <thread>

#include "polyattn/arguments.h"
#include "statistics/gather.h"
#include "statistics/summary.h"
#include "threads.h"

namespace polyattn {
namespace {

constexpr int64_t kChunk = 8192;  // the kernels'
constexpr int64_t kLeastPart = 2 * kChunk;
// Elements brought together at a time: enough that a transposed tensor's cache lines are used up.
constexpr int64_t kGathered = 8 * kChunk;
constexpr int64_t kMostParts = 256;
// Parts below which one thread reads them all: bringing others in costs what they would save.
constexpr int64_t kWorthThreads = 3;

// Bytes that summarize() needs beside the tensor.
size_t room_for(const Tensor& t, int64_t count) {
  if (lies_together(t)) return 0;
  return static_cast<size_t>((count < kGathered ? count : kGathered) * bytes_of(t.element));
}

template <class T>
void gathered(const Kernels& kernels, const Tensor& t, int64_t first, int64_t count, std::byte* room,
              Summary& s) {
  T* const values = reinterpret_cast<T*>(room);
  Gather<T> gather(t, first);
  for (int64_t i = 0; i < count; i += kGathered) {
    const int64_t run = count - i < kGathered ? count - i : kGathered;
    gather.copy(values, run);
    kernels.summarize(t.element, values, run, static_cast<uint64_t>((first + i) / 64), s);
  }
}

// Elements first .. first + count - 1; `first` is a multiple of 64.
void summarize(const Kernels& kernels, const Tensor& t, int64_t first, int64_t count, std::byte* room,
               Summary& s) {
  const int64_t bytes = bytes_of(t.element);
  if (lies_together(t)) {
    const char* data = static_cast<const char*>(t.data) + first * bytes;
    return kernels.summarize(t.element, data, count, static_cast<uint64_t>(first / 64), s);
  }
  switch (bytes) {
    case 1:
      return gathered<uint8_t>(kernels, t, first, count, room, s);
    case 2:
      return gathered<uint16_t>(kernels, t, first, count, room, s);
    case 4:
      return gathered<uint32_t>(kernels, t, first, count, room, s);
    default:
      return gathered<uint64_t>(kernels, t, first, count, room, s);
  }
}

struct Work {
  const Kernels* kernels;
  const Tensor* tensor;
  int64_t count, part;
  int64_t parts;
  Summary* summaries;  // in the scratch memory of `caller`, before its room
  std::byte* room;
  std::thread::id caller;
  int threads;
  std::atomic<bool> taken[kMostParts + 1] = {};
  std::atomic<bool> failed{false};
};

// First the thread's own share, which is the one it wrote where the program divides its work alike
// and which its caches then hold; after that whatever others have not begun.
void take_parts(void* context, int thread) {
  Work& work = *static_cast<Work*>(context);
  const size_t bytes = room_for(*work.tensor, work.part);
  std::byte* room = work.room;
  if (bytes != 0 && std::this_thread::get_id() != work.caller) {
    room = scratch(bytes);
    if (room == nullptr) return work.failed.store(true, std::memory_order_relaxed);
  }
  const int64_t begin = thread * work.parts / work.threads;
  for (int64_t k = 0; k < work.parts; ++k) {
    const int64_t i = begin + k < work.parts ? begin + k : begin + k - work.parts;
    if (work.taken[i].exchange(true, std::memory_order_relaxed)) continue;
    const int64_t first = i * work.part, left = work.count - first;
    work.summaries[i] = empty_summary();
    summarize(*work.kernels, *work.tensor, first, left < work.part ? left : work.part, room,
              work.summaries[i]);
  }
}

bool summarize_parts(const Kernels& kernels, int threads, const Tensor& t, int64_t count, Summary& s) {
  const int64_t fair = (count / kMostParts + kChunk) / kChunk * kChunk;
  const int64_t part = fair > kLeastPart ? fair : kLeastPart, parts = (count + part - 1) / part;
  const size_t bytes = static_cast<size_t>(parts) * sizeof(Summary);
  std::byte* const memory = scratch(bytes + room_for(t, part));
  if (memory == nullptr) return false;
  Work work{&kernels,
            &t,
            count,
            part,
            parts,
            reinterpret_cast<Summary*>(memory),
            memory + bytes,
            std::this_thread::get_id(),
            parts < kWorthThreads ? 1 : threads};
  // All threads or none: libgomp ends the workers that a smaller region does not need, and makes them
  // anew for the program's next one.
  parallel(work.threads, take_parts, &work);
  if (work.failed.load(std::memory_order_relaxed)) return false;
  for (int64_t i = 0; i < parts; ++i) join(s, work.summaries[i]);
  return true;
}

// Squares of numbers from 2^-400 to 2^400, and sums of them, stay within float64.
constexpr int kSafeExponent = 400;

// The power of two by which the elements are to be multiplied before they are squared, mostly 0.
int scale_of(const Tensor& t, const Summary& s) {
  if (t.element != Element::f64 || s.finite == 0) return 0;
  const double largest = s.max > -s.min ? s.max : -s.min;
  if (largest == 0) return 0;
  const int exponent = std::ilogb(largest);
  return exponent > kSafeExponent || exponent < -kSafeExponent ? -exponent : 0;
}

// The same summary of elements multiplied by 2^scale. Counts and extremes stay what they are.
void summarize_scaled(const Kernels& kernels, const Tensor& t, int64_t count, int scale, Summary& s) {
  Summary scaled = empty_summary();
  alignas(64) double values[kChunk];
  Gather<double> gather(t, 0);
  for (int64_t i = 0; i < count; i += kChunk) {
    const int64_t run = count - i < kChunk ? count - i : kChunk;
    gather.copy(values, run);
    for (int64_t j = 0; j < run; ++j) values[j] = std::scalbn(values[j], scale);
    kernels.summarize(Element::f64, values, run, static_cast<uint64_t>(i / 64), scaled);
  }
  scaled.zero = s.zero;
  scaled.min = s.min;
  scaled.max = s.max;
  s = scaled;
}

// `scale`: what the summary's elements were multiplied by.
void write(const Summary& s, const Tensor& t, int64_t count, int scale, double* out) {
  const double none = __builtin_nan(""), finite = static_cast<double>(s.finite);
  const bool any = s.finite != 0;
  const auto number = [any, none, scale](double x) {
    if (!any) return none;
    if (scale != 0) x = std::scalbn(x, -scale);
    return x > __DBL_MAX__ ? __DBL_MAX__ : x < -__DBL_MAX__ ? -__DBL_MAX__ : x;
  };
  out[kCount] = static_cast<double>(count);
  out[kNan] = static_cast<double>(s.nan);
  out[kPlusInf] = static_cast<double>(s.plus_inf);
  out[kMinusInf] = static_cast<double>(s.minus_inf);
  out[kZero] = static_cast<double>(s.zero);
  out[kMin] = any ? s.min : none;
  out[kMax] = any ? s.max : none;
  out[kSum] = number(s.sum);
  out[kMean] = number(s.mean);
  out[kStd] = number(std::sqrt(s.m2 / finite));
  out[kAbsMean] = number(s.abs_sum / finite);
  out[kL1] = number(s.abs_sum);
  out[kL2] = number(std::sqrt(s.m2 + s.mean * s.mean * finite));
  for (int i = 0; i < kSamples; ++i) {
    // i * (count - 1) / 7 without a product that could overflow
    const int64_t last = count - 1, steps = kSamples - 1;
    out[kSample + i] = count == 0 ? none : element_at(t, last / steps * i + last % steps * i / steps);
  }
  for (int i = 0; i < kBuckets; ++i) out[kSketch + i] = any ? number(s.sketch[i]) : 0;
}

}  // namespace

const char* check(const Tensor& t) {
  if (static_cast<int32_t>(t.element) < 0 || static_cast<int32_t>(t.element) >= kElements) {
    return "element: expected a code of 0 to 8";
  }
  if (t.dims < 0 || t.dims > kMaxDims) return "sizes: expected 0 to 64 of them";
  int64_t count = 1;
  bool empty = false;
  for (int i = 0; i < t.dims; ++i) {
    if (t.sizes[i] < 0) return "sizes: expected none below 0";
    if (t.sizes[i] == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(count, t.sizes[i], &count)) {
      return "sizes: the tensor is too large";
    }
  }
  int64_t bytes, reach = 0;
  if (__builtin_mul_overflow(count, bytes_of(t.element), &bytes)) return "sizes: the tensor is too large";
  for (int i = 0; i < t.dims && !empty; ++i) {
    int64_t far;
    if (__builtin_mul_overflow(t.sizes[i] - 1, t.strides[i] < 0 ? -(t.strides[i] + 1) : t.strides[i], &far) ||
        __builtin_add_overflow(reach, far, &reach) || reach > INT64_MAX / 16) {
      return "strides: the tensor reaches farther than memory";
    }
  }
  if (t.data == nullptr && !empty) return "data: got a null pointer";
  return nullptr;
}

bool statistics(const Kernels& kernels, int threads, const Tensor& tensor, double* out) {
  const int64_t count = count_of(tensor);
  if (count == 0) {
    write(empty_summary(), tensor, 0, 0, out);
    return true;
  }
  const Tensor t = joined(tensor);
  Summary whole = empty_summary();
  if (count <= kLeastPart) {
    std::byte* const room = scratch(room_for(t, count));
    if (room == nullptr) return false;
    summarize(kernels, t, 0, count, room, whole);
  } else if (!summarize_parts(kernels, threads, t, count, whole)) {
    return false;
  }
  const int scale = scale_of(t, whole);
  if (scale != 0) summarize_scaled(kernels, t, count, scale, whole);
  write(whole, t, count, scale, out);
  return true;
}

}  // namespace polyattn

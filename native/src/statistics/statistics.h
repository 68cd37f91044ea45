// What a trace keeps of a tensor: counts, extremes, moments, samples and a sketch, in one pass.
//
// Bucket i % 64 of the sketch ("polyattn.sketch/1") sums the elements with flat index i, in C order
// of the logical tensor, with a sign: bit i % 64 of splitmix64(i / 64), where 1 is negative. All
// but the counts and samples are over finite elements.
#pragma once

#include <cstdint>

namespace polyattn {

struct Kernels;

enum class Element : int32_t {
  f32 = 0,
  bf16 = 1,
  f16 = 2,
  f64 = 3,
  i8 = 4,
  u8 = 5,
  i16 = 6,
  i32 = 7,
  i64 = 8
};
constexpr int kElements = 9;

constexpr int kMaxDims = 64;
constexpr int kSamples = 8;
constexpr int kBuckets = 64;

// Element (i, j, ...) lies at data + i * strides[0] + j * strides[1] + ..., in elements.
struct Tensor {
  const void* data = nullptr;
  Element element = Element::f32;
  int32_t dims = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};
};

// The places in the output: float64, NaN where there is no value. What passes the range of float64
// is its largest number.
enum Field : int {
  kCount = 0,  // all elements
  kNan = 1,
  kPlusInf = 2,
  kMinusInf = 3,
  kZero = 4,
  kMin = 5,
  kMax = 6,
  kSum = 7,
  kMean = 8,
  kStd = 9,  // of the population
  kAbsMean = 10,
  kL1 = 11,
  kL2 = 12,
  kSample = 13,  // elements at flat indices i * (count - 1) / 7; infinite and NaN as they are
  kSketch = kSample + kSamples,
  kFields = kSketch + kBuckets,
};

// The finite elements of a run, before it is joined with others.
struct Summary {
  int64_t finite, nan, plus_inf, minus_inf, zero;
  double min, max, sum, abs_sum, mean, m2;
  double sketch[kBuckets];
};

// Returns nullptr when the tensor may be read, else what is wrong with its description.
const char* check(const Tensor& tensor);

// Fills out[0 .. kFields - 1]; the same numbers for any number of threads. False: no memory.
bool statistics(const Kernels& kernels, int threads, const Tensor& tensor, double* out);

}  // namespace polyattn

// What a trace keeps of a tensor: counts, extremes, moments, samples and a sketch, in one pass.
//
// Bucket i % 64 of the sketch ("polyattn.sketch/1") sums the elements with flat index i, in C order
// of the logical tensor, with a sign: bit i % 64 of splitmix64(i / 64), where 1 is negative. All
// but the counts and samples are over finite elements.
#pragma once

#include <cstdint>

#include "statistics/fields.h"

namespace polyattn {

struct Kernels;

constexpr int kMaxDims = 64;

// Element (i, j, ...) lies at data + i * strides[0] + j * strides[1] + ..., in elements.
struct Tensor {
  const void* data = nullptr;
  Element element = Element::f32;
  int32_t dims = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};
};

// The finite elements of a run, before it is joined with others.
struct Summary {
  int64_t finite, nan, plus_inf, minus_inf, zero;
  double min, max, sum, abs_sum, mean, m2;
  double sketch[kBuckets];
};

// Returns nullptr when the tensor may be read, else what is wrong with its description.
const char* check(const Tensor& tensor);

// Fills out[0 .. kFields - 1]; the same numbers for any number of threads. What passes the range of
// float64 is its largest number, samples are as they are. False: no memory.
bool statistics(const Kernels& kernels, int threads, const Tensor& tensor, double* out);

}  // namespace polyattn

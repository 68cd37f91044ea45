// Made by scripts/statistics_schema.py --write from src/polyattn/trace/statistics/schema.py.
#pragma once

#include <cstdint>

namespace polyattn {

constexpr int kSamples = 8;
constexpr int kBuckets = 64;

// The places in a row: float64, from kCounts on NaN where there is no value.
enum Field : int {
  // elements
  kCount = 0,
  // NaN
  kNan = 1,
  // +infinity
  kPlusInf = 2,
  // -infinity
  kMinusInf = 3,
  // zeros
  kZero = 4,
  // the smallest
  kMin = 5,
  // the largest
  kMax = 6,
  // the sum
  kSum = 7,
  // the mean
  kMean = 8,
  // the standard deviation, of the population
  kStd = 9,
  // the mean of the magnitudes
  kAbsMean = 10,
  // the sum of the magnitudes
  kL1 = 11,
  // the root of the sum of the squares
  kL2 = 12,
  // the values at the flat indices `i * (n - 1) // 7`, i from 0 to 7; null for NaN and infinity
  kSample = 13,
  // below, as text
  kSketch = 21,
  // all of them
  kFields = 85,
};

// The first so many are counts.
constexpr int kCounts = 5;

// What a kernel reads.
enum class Element : int32_t {
  f32 = 0,
  bf16 = 1,
  f16 = 2,
  f64 = 3,
  i8 = 4,
  u8 = 5,
  i16 = 6,
  i32 = 7,
  i64 = 8,
};
constexpr int kElements = 9;

// A sketch whose largest bucket is from the one to below the other has no scale.
constexpr double kLeastPlain = 0x1p-64;
constexpr double kMostPlain = 0x1p127;

// Latest tensors among which an identical one is looked for.
constexpr int kRemembered = 4096;

// Places and codes as text, which Python compares with its own.
constexpr char kLayout[] =
    "n:1 nan:1 pinf:1 ninf:1 zero:1 min:1 max:1 sum:1 mean:1 std:1 abs_mean:1 l1:1 l2:1 "
    "samples:8 sketch:64 of float32 bfloat16 float16 float64 int8 uint8 int16 int32 int64, 4096 "
    "remembered";

}  // namespace polyattn

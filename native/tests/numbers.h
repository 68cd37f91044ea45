// Random numbers that are the same everywhere, and the three element types by their definitions
// (not by the processor's conversions, which the kernels use).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "polyattn/arguments.h"

namespace polyattn::testing {

// splitmix64
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // low <= result <= high
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(double p) { return static_cast<double>(bits() >> 11) * 0x1p-53 < p; }
  double uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(bits() >> 11) * 0x1p-53;
  }
  template <class T, size_t count>
  T pick(const T (&choices)[count]) {
    return choices[bits() % count];
  }

 private:
  uint64_t state_;
};

// Types of keys and values alone, as tensors of the tests name them.
constexpr DType kInt8{8}, kF8{9};
inline bool is_code(DType dtype) { return dtype == kInt8 || dtype == kF8; }

inline int64_t size_of(DType dtype) { return is_code(dtype) ? 1 : dtype == DType::f32 ? 4 : 2; }

// The spacing of numbers next to 1, halved: the error of rounding to nearest.
inline double rounding(DType dtype) {
  return dtype == DType::f32 ? 0x1p-24 : dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
}

// Half of the smallest positive number. What float32 and bfloat16 flush to 0 below 2**-126 may be a
// probability, which values of up to 8 in size would have multiplied.
inline double underflow(DType dtype) { return dtype == DType::f16 ? 0x1p-25 : 0x1p-123; }

inline double from_f16(uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  double value = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25);
  if (exponent == 31) value = fraction != 0 ? NAN : INFINITY;
  return h >> 15 ? -value : value;
}

inline uint16_t to_f16(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  const int exponent = size < 0x1p-14 ? -14 : std::ilogb(size);
  // Half to even; a fraction that rounds up to 2048 carries into the exponent by itself.
  const int units = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return static_cast<uint16_t>(sign | (units < 1024 ? units : (exponent + 14) * 1024 + units));
}

inline double from_f8(uint8_t code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  double value = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(fraction + 8, exponent - 10);
  if ((code & 127) == 127) value = NAN;
  return code >> 7 ? -value : value;
}

inline double get(DType dtype, const void* base, int64_t index) {
  if (dtype == kInt8) return static_cast<const int8_t*>(base)[index];
  if (dtype == kF8) return from_f8(static_cast<const uint8_t*>(base)[index]);
  if (dtype == DType::f32) return static_cast<const float*>(base)[index];
  const uint16_t half = static_cast<const uint16_t*>(base)[index];
  if (dtype == DType::f16) return from_f16(half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Of codes only NaN and what they can be are put; the code of int8 for NaN is one that would be seen.
inline void put(DType dtype, void* base, int64_t index, double value) {
  if (dtype == kInt8) {
    static_cast<int8_t*>(base)[index] = static_cast<int8_t>(std::isnan(value) ? 127 : value);
    return;
  }
  if (dtype == kF8) {
    uint8_t code = 127;
    while (code > 0 && !(from_f8(code) == std::fabs(value)) && !std::isnan(value)) --code;
    static_cast<uint8_t*>(base)[index] = static_cast<uint8_t>(code | (std::signbit(value) ? 128 : 0));
    return;
  }
  const float single = static_cast<float>(value);
  if (dtype == DType::f32) {
    static_cast<float*>(base)[index] = single;
  } else if (dtype == DType::f16) {
    static_cast<uint16_t*>(base)[index] = to_f16(value);
  } else {
    uint32_t bits = 0;
    std::memcpy(&bits, &single, 4);
    const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    static_cast<uint16_t*>(base)[index] = static_cast<uint16_t>(std::isnan(single) ? 0x7fc0 : rounded >> 16);
  }
}

}  // namespace polyattn::testing

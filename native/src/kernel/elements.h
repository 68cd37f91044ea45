// Element types as stored, and small numeric helpers that no instruction set changes.
#pragma once

#include <cstdint>
#include <cstring>

#include "polyattn/arguments.h"

namespace polyattn::POLYATTN_NAMESPACE {

#define POLYATTN_INLINE inline __attribute__((always_inline))

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct F8 {  // float8_e4m3fn: no infinities, and NaN where all bits but the sign are set
  uint8_t bits;
};

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

template <class T>
POLYATTN_INLINE T smaller(T a, T b) {
  return a < b ? a : b;
}
template <class T>
POLYATTN_INLINE T larger(T a, T b) {
  return a > b ? a : b;
}
POLYATTN_INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
POLYATTN_INLINE int64_t blocks_of(int64_t x, int64_t size) { return (x + size - 1) / size; }

POLYATTN_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
POLYATTN_INLINE float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

POLYATTN_INLINE float to_float(float x) { return x; }
POLYATTN_INLINE float to_float(BF16 x) { return float_of(uint32_t{x.bits} << 16); }
POLYATTN_INLINE float to_float(F16 x) {
  uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // a product moves the exponent and makes subnormal halves normal
  float magnitude = float_of(rest << 13) * float_of(uint32_t(127 + 112) << 23);
  return float_of(sign | bits_of(magnitude));
}

POLYATTN_INLINE float to_float(int8_t x) { return float(x); }
POLYATTN_INLINE float to_float(uint8_t x) { return float(x); }
POLYATTN_INLINE float to_float(int16_t x) { return float(x); }
POLYATTN_INLINE float to_float(F8 x) {
  const uint32_t sign = uint32_t(x.bits & 0x80) << 24, rest = x.bits & 0x7f;
  if (rest == 0x7f) return float_of(sign | 0x7fc00000);
  // as above: 2^120 between the exponents of the two
  return float_of(sign | bits_of(float_of(rest << 20) * float_of(uint32_t(127 + 120) << 23)));
}

// The bits of a bfloat16 for each float8_e4m3fn that is not negative: all of them are one, NaN too.
struct EighthsAsBF16 {
  uint16_t bits[128];
  constexpr EighthsAsBF16() : bits() {
    for (int code = 0; code < 127; ++code) {
      int exponent = code >> 3, fraction = (code & 7) << 4;
      if (exponent == 0 && fraction != 0) {  // subnormal: shifted until it has a leading 1
        exponent = 1;
        while (fraction < 128) fraction <<= 1, --exponent;
        fraction -= 128;
        bits[code] = uint16_t((exponent + 120) << 7 | fraction);
      } else if (exponent != 0) {
        bits[code] = uint16_t((exponent + 120) << 7 | fraction);
      }
    }
    bits[127] = 0x7fc0;
  }
};
constexpr EighthsAsBF16 kEighths;

// The same as two bytes.
struct EighthsAsBytes {
  uint8_t high[128], low[128];
  constexpr EighthsAsBytes() : high(), low() {
    for (int code = 0; code < 128; ++code) {
      high[code] = uint8_t(kEighths.bits[code] >> 8);
      low[code] = uint8_t(kEighths.bits[code]);
    }
  }
};
alignas(64) constexpr EighthsAsBytes kEighthsBytes;

POLYATTN_INLINE void from_float(float x, float* out) { *out = x; }
POLYATTN_INLINE void from_float(float x, BF16* out) {
  uint32_t u = bits_of(x);
  if ((u & 0x7fffffff) > 0x7f800000) {
    out->bits = uint16_t(u >> 16 | 0x40);
    return;
  }
  out->bits = uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
POLYATTN_INLINE void from_float(float x, F16* out) {
  uint32_t u = bits_of(x), sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) {
    out->bits = uint16_t(sign | 0x7e00);
  } else if (u >= 0x477ff000) {  // rounds to more than the largest half
    out->bits = uint16_t(sign | 0x7c00);
  } else if (u < 0x38800000) {  // subnormal: adding 0.5 lets the hardware round at the right bit
    out->bits = uint16_t(sign | (bits_of(float_of(u) + 0.5f) - 0x3f000000));
  } else {
    u += 0xfff + (u >> 13 & 1);
    out->bits = uint16_t(sign | (u - 0x38000000) >> 13);
  }
}

}  // namespace polyattn::POLYATTN_NAMESPACE

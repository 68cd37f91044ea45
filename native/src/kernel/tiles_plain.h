// The twin of AMX's tiles in plain C++: the same registers, the same sums in the same order, on any
// processor. What is tested with it is all but the instructions themselves.
#pragma once

#include "kernel/units.h"
#include "twin_sessions.h"

namespace polyattn::POLYATTN_NAMESPACE {

class PlainTiles {
  static constexpr int kSide = kTileUnits;

 public:
  // AMX's tiles end the process where nobody configured them, and so do these.
  struct Session {
    Session() {
      if (configured_) __builtin_trap();
      configured_ = true;
      __atomic_add_fetch(&twin_sessions.begun, 1, __ATOMIC_RELAXED);
    }
    ~Session() {
      configured_ = false;
      __atomic_add_fetch(&twin_sessions.ended, 1, __ATOMIC_RELAXED);
    }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  template <int kTile>
  void load(const float* p, int64_t row) {
    load_rows<kTile>(p, row * int64_t{sizeof(float)});
  }
  template <int kTile>
  void load_rows(const void* p, int64_t bytes) {
    fill(tile_[kTile], p, bytes);
  }
  template <int kTile>
  void store(float* p, int64_t row) const {
    spill(tile_[kTile], p, row);
  }
  template <int kTile>
  void zero() {
    if (!configured_) __builtin_trap();
    std::memset(tile_[kTile], 0, sizeof tile_[kTile]);
  }
  template <int kTile, int kA, int kB>
  void dot() {
    multiply(tile_[kA], tile_[kB], tile_[kTile]);
  }
  template <int kTile, int kA, int kB>
  void dot_bytes() {
    multiply_bytes(tile_[kA], tile_[kB], tile_[kTile]);
  }

 private:
  // Calls, each of an instruction: as parts of what calls them they would take most of this file's time to compile.
  __attribute__((noinline)) static void fill(float* tile, const void* p, int64_t bytes) {
    if (!configured_) __builtin_trap();
    const char* const from = static_cast<const char*>(p);
    for (int r = 0; r < kSide; ++r) std::memcpy(tile + r * kSide, from + r * bytes, sizeof(float) * kSide);
  }
  __attribute__((noinline)) static void spill(const float* tile, float* p, int64_t row) {
    for (int r = 0; r < kSide; ++r) std::memcpy(p + r * row, tile + r * kSide, sizeof(float) * kSide);
  }
  // TDPBF16PS: even and odd elements are summed apart, their sums joined, then added to what was there;
  // subnormal numbers are 0 everywhere. A product of two bfloat16 is exact, so nothing need be fused.
  __attribute__((noinline)) static void multiply(const float* a, const float* b, float* tile) {
    for (int r = 0; r < kSide; ++r) {
      float even[kSide] = {}, odd[kSide] = {};
      for (int k = 0; k < kSide; ++k) {
        const uint32_t pair = bits_of(a[r * kSide + k]);
        const float low = flushed(float_of(pair << 16)), high = flushed(float_of(pair & 0xffff0000u));
        for (int c = 0; c < kSide; ++c) {
          const uint32_t other = bits_of(b[k * kSide + c]);
          even[c] = flushed(low * flushed(float_of(other << 16)) + even[c]);
          odd[c] = flushed(high * flushed(float_of(other & 0xffff0000u)) + odd[c]);
        }
      }
      float* sums = tile + r * kSide;
      for (int c = 0; c < kSide; ++c) sums[c] = flushed(flushed(sums[c]) + flushed(even[c] + odd[c]));
    }
  }
  // TDPBSSD.
  __attribute__((noinline)) static void multiply_bytes(const float* a, const float* b, float* tile) {
    for (int r = 0; r < kSide; ++r) {
      for (int c = 0; c < kSide; ++c) {
        uint32_t sum = bits_of(tile[r * kSide + c]);
        for (int k = 0; k < kSide; ++k) {
          const uint32_t x = bits_of(a[r * kSide + k]), y = bits_of(b[k * kSide + c]);
          for (int n = 0; n < 32; n += 8) sum += uint32_t(int8_t(x >> n) * int8_t(y >> n));
        }
        tile[r * kSide + c] = float_of(sum);
      }
    }
  }

  static POLYATTN_INLINE float flushed(float x) {
    const uint32_t bits = bits_of(x);
    return (bits & 0x7f800000u) == 0 ? float_of(bits & 0x80000000u) : x;
  }

  static inline thread_local bool configured_ = false;
  alignas(64) float tile_[8][kSide * kSide];
};

}  // namespace polyattn::POLYATTN_NAMESPACE

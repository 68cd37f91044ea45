// The tiles of AMX: eight registers of 16 rows of 64 bytes, which a thread has from the configuration to
// the release (Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3).
#pragma once

#include <immintrin.h>

#include "kernel/elements.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Instructions name their registers, which the intrinsics want as literals; and GCC's for loads do not say that they
// read memory.
struct AmxTiles {
  // Every tile whole. The calling convention has neither configuration nor tiles survive a call, so nothing of
  // another user is saved; what is not released is state that signals and switches of threads must save.
  struct Session {
    Session() {
      alignas(64) uint8_t config[64] = {1};  // the palette
      for (int tile = 0; tile < 8; ++tile) {
        config[16 + 2 * tile] = 64;  // bytes of a row
        config[48 + tile] = 16;      // rows
      }
      asm volatile("" ::: "memory");
      _tile_loadconfig(config);
    }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  // `row`: floats from a row to the next.
  template <int kTile>
  static POLYATTN_INLINE void load(const float* p, int64_t row) {
    load_rows<kTile>(p, row * int64_t{sizeof(float)});
  }
  // `bytes`: from a row to the next.
  template <int kTile>
  static POLYATTN_INLINE void load_rows(const void* p, int64_t bytes) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(p), "r"(bytes) : "memory");
  }
  template <int kTile>
  static POLYATTN_INLINE void store(float* p, int64_t row) {
    const int64_t bytes = row * int64_t{sizeof(float)};
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(p), "r"(bytes) : "memory");
  }
  template <int kTile>
  static POLYATTN_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  // sums += a b
  template <int kTile, int kA, int kB>
  static POLYATTN_INLINE void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kTile), "i"(kA), "i"(kB));
  }
  // The same of signed bytes, four to a unit, summed as integers.
  template <int kTile, int kA, int kB>
  static POLYATTN_INLINE void dot_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kTile), "i"(kA), "i"(kB));
  }
};

}  // namespace polyattn::POLYATTN_NAMESPACE

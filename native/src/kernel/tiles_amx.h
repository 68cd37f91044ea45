// The tiles of AMX: eight registers of 16 rows of 64 bytes, which a thread has from the configuration to
// the release (Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3).
#pragma once

#include <immintrin.h>

#include "kernel/elements.h"

namespace polyattn::POLYATTN_NAMESPACE {

// The instructions name their registers by literals.
#define POLYATTN_TILE(n, instruction) \
  if constexpr (kTile == (n)) instruction

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

  // `row`: floats from a row to the next. GCC's intrinsics for loads do not say that they read memory.
  template <int kTile>
  static POLYATTN_INLINE void load(const float* p, int64_t row) {
    const int64_t bytes = row * 4;
    asm volatile("" ::: "memory");
    POLYATTN_TILE(0, _tile_loadd(0, p, bytes));
    POLYATTN_TILE(1, _tile_loadd(1, p, bytes));
    POLYATTN_TILE(2, _tile_loadd(2, p, bytes));
    POLYATTN_TILE(3, _tile_loadd(3, p, bytes));
    POLYATTN_TILE(4, _tile_loadd(4, p, bytes));
    POLYATTN_TILE(5, _tile_loadd(5, p, bytes));
    POLYATTN_TILE(6, _tile_loadd(6, p, bytes));
    POLYATTN_TILE(7, _tile_loadd(7, p, bytes));
  }
  template <int kTile>
  static POLYATTN_INLINE void store(float* p, int64_t row) {
    const int64_t bytes = row * 4;
    POLYATTN_TILE(0, _tile_stored(0, p, bytes));
    POLYATTN_TILE(1, _tile_stored(1, p, bytes));
    POLYATTN_TILE(2, _tile_stored(2, p, bytes));
    POLYATTN_TILE(3, _tile_stored(3, p, bytes));
    asm volatile("" ::: "memory");
  }
  template <int kTile>
  static POLYATTN_INLINE void zero() {
    POLYATTN_TILE(0, _tile_zero(0));
    POLYATTN_TILE(1, _tile_zero(1));
    POLYATTN_TILE(2, _tile_zero(2));
    POLYATTN_TILE(3, _tile_zero(3));
  }
  // sums += a b
  template <int kTile, int kA, int kB>
  static POLYATTN_INLINE void dot() {
    static_assert(kA == 4 + kTile / 2 && kB == 6 + kTile % 2);
    POLYATTN_TILE(0, _tile_dpbf16ps(0, 4, 6));
    POLYATTN_TILE(1, _tile_dpbf16ps(1, 4, 7));
    POLYATTN_TILE(2, _tile_dpbf16ps(2, 5, 6));
    POLYATTN_TILE(3, _tile_dpbf16ps(3, 5, 7));
  }
};

#undef POLYATTN_TILE

}  // namespace polyattn::POLYATTN_NAMESPACE

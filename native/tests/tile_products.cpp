#include "tile_products.h"

#if defined(POLYATTN_HAVE_AMX)

// Compiled for AMX, like the kernels: nothing of the standard library, in a namespace of its own.
#define POLYATTN_NAMESPACE tile_products

#include "kernel/tiles_amx.h"
#include "kernel/tiles_plain.h"

namespace polyattn::testing {
namespace {

constexpr int kSums = 256;

struct Bits {
  uint32_t state = 1;
  uint32_t next() { return (state = state * 1664525u + 1013904223u) >> 8; }
};

// 512 numbers of bfloat16 of either sign. `exponents`: by how many powers of two they differ; one in sixteen is 0
// or subnormal, which counts as 0.
void fill(Bits& bits, uint32_t exponents, float* tile) {
  uint16_t* const p = reinterpret_cast<uint16_t*>(tile);
  for (int i = 0; i < 2 * kSums; ++i) {
    const uint32_t exponent = bits.next() % 16 == 0 ? 0 : 127 - exponents / 2 + bits.next() % (exponents + 1);
    p[i] = static_cast<uint16_t>((bits.next() & 0x807f) | exponent << 7);
  }
}

// Any bytes: codes, or sums of such products.
void fill_bytes(Bits& bits, float* tile) {
  uint8_t* const p = reinterpret_cast<uint8_t*>(tile);
  for (int i = 0; i < 4 * kSums; ++i) p[i] = static_cast<uint8_t>(bits.next());
}

template <class Tiles>
void multiply(bool bytes, const float* a, const float* b, float* sums) {
  static Tiles tiles;
  tiles.template load<4>(a, 16);
  tiles.template load_rows<6>(b, 64);
  tiles.template load<0>(sums, 16);
  bytes ? tiles.template dot_bytes<0, 4, 6>() : tiles.template dot<0, 4, 6>();
  tiles.template store<0>(sums, 16);
}

}  // namespace

int64_t different_sums(int products) {
  const tile_products::AmxTiles::Session real;
  const tile_products::PlainTiles::Session plain;
  alignas(64) static float a[kSums], b[kSums], sums[kSums], twins[kSums];
  Bits bits;
  int64_t different = 0;
  for (int n = 0; n < products; ++n) {
    const uint32_t exponents = n % 3 == 0 ? 0 : n % 3 == 1 ? 8 : 48;
    const bool bytes = n % 5 == 4;
    if (bytes) {
      fill_bytes(bits, a);
      fill_bytes(bits, b);
      fill_bytes(bits, sums);
    } else {
      fill(bits, exponents, a);
      fill(bits, exponents, b);
    }
    for (int i = 0; i < kSums; ++i) {
      if (n % 5 == 0) sums[i] = static_cast<float>(static_cast<int32_t>(bits.next() & 0xffff) - 0x8000) / 64;
    }
    __builtin_memcpy(twins, sums, sizeof sums);
    multiply<tile_products::AmxTiles>(bytes, a, b, sums);
    multiply<tile_products::PlainTiles>(bytes, a, b, twins);
    for (int i = 0; i < kSums; ++i) different += __builtin_memcmp(sums + i, twins + i, sizeof(float)) != 0;
  }
  return different;
}

}  // namespace polyattn::testing

#else

namespace polyattn::testing {

int64_t different_sums(int) { return 0; }

}  // namespace polyattn::testing

#endif

// AVX-512 with bfloat16, whose products of bfloat16 are AMX's (Sapphire Rapids and later).
#define POLYATTN_NAMESPACE amx
#define POLYATTN_REGISTER(x) "+v"(x)

#include "kernel/simd_amx.h"

#include "dispatch.h"
#include "kernel/passes.h"
#include "kernel/tiles_amx.h"
#include "tile_permission.h"

namespace polyattn {
namespace {

using Simd = amx::TileSimd;
using Unit = amx::TileUnit<amx::AmxTiles>;

// Tiles multiply for queries of bfloat16 alone. Functions, because other files' constants may be made later than
// this one's.
bool forward(const Arguments& a) { return amx::forward_or<Simd, Unit>(a, kAvx512Bf16); }
bool backward(const Arguments& a) { return amx::backward_or<Simd, Unit>(a, kAvx512Bf16); }
void summarize(Element element, const void* run, int64_t count, uint64_t block, Summary& s) {
  kAvx512Bf16.summarize(element, run, count, block, s);
}

}  // namespace

const Kernels kAmx = {"amx", forward, backward, amx::spin_both<Simd, Unit>, summarize, permit_tiles};

}  // namespace polyattn

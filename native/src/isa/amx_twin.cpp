// What AMX runs, by plain C++ on any processor. For tests: it is slow.
#define POLYATTN_NAMESPACE amx_twin
#define POLYATTN_REGISTER(x) "+m"(x)

#include "kernel/simd_sixteen.h"

#include "dispatch.h"
#include "kernel/passes.h"
#include "kernel/tiles_plain.h"

namespace polyattn {

TwinSessions twin_sessions;

namespace {

using Simd = amx_twin::Simd;
using Unit = amx_twin::TileUnit<amx_twin::PlainTiles>;

// As in amx.cpp.
bool forward(const Arguments& a) { return amx_twin::forward_or<Simd, Unit>(a, kGeneric); }
bool backward(const Arguments& a) { return amx_twin::backward_or<Simd, Unit>(a, kGeneric); }
void summarize(Element element, const void* run, int64_t count, uint64_t block, Summary& s) {
  kGeneric.summarize(element, run, count, block, s);
}

}  // namespace

const Kernels kAmxTwin = {"amx_twin", forward, backward, amx_twin::spin_both<Simd, Unit>, summarize};

}  // namespace polyattn

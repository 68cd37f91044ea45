// The instruction sets of this build, whether or not this processor runs them.
#pragma once

#include "polyattn/arguments.h"

namespace polyattn {

// One translation unit under isa/ defines each; the build sets POLYATTN_HAVE_* for those it has.
extern const Kernels kGeneric, kAvx2, kAvx512, kAvx512Bf16, kAmx, kAmxTwin, kNeon;

// Best first, then those that are never the best of all: AMX's, for bfloat16 alone, and the twin; ends with nullptr.
const Kernels* const* compiled();

}  // namespace polyattn

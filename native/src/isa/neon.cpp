// NEON, which every aarch64 processor has.
#define POLYATTN_NAMESPACE neon
#define POLYATTN_REGISTER(x) "+w"(x)

#include "kernel/simd_four.h"

#include "kernel/passes.h"
#include "statistics/run.h"

namespace polyattn {

extern const Kernels kNeon;
const Kernels kNeon = {
    "neon",
    neon::forward<neon::Simd, neon::FloatUnit>,
    neon::backward<neon::Simd, neon::FloatUnit>,
    neon::spin_both<neon::Simd, neon::FloatUnit>,
    neon::summarize<neon::Simd>,
};

}  // namespace polyattn

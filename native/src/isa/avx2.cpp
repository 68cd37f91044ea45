// AVX2 with FMA and F16C (Haswell, Zen, and later).
#define POLYATTN_NAMESPACE avx2
#define POLYATTN_REGISTER(x) "+x"(x)

#include "kernel/simd_avx2.h"

#include "kernel/passes.h"
#include "statistics/run.h"

namespace polyattn {

extern const Kernels kAvx2;
const Kernels kAvx2 = {
    "avx2",
    avx2::forward<avx2::Simd, avx2::FloatUnit>,
    avx2::backward<avx2::Simd, avx2::FloatUnit>,
    avx2::spin_both<avx2::Simd, avx2::FloatUnit>,
    avx2::summarize<avx2::Simd>,
};

}  // namespace polyattn

// AVX-512 without bfloat16 dot products (Skylake-X, Ice Lake).
#define POLYATTN_NAMESPACE avx512
#define POLYATTN_REGISTER(x) "+v"(x)

#include "kernel/simd_avx512.h"

#include "kernel/passes.h"
#include "statistics/run.h"

namespace polyattn {

extern const Kernels kAvx512;
const Kernels kAvx512 = {
    "avx512",
    avx512::forward<avx512::Simd, avx512::FloatUnit>,
    avx512::backward<avx512::Simd, avx512::FloatUnit>,
    avx512::spin_both<avx512::Simd, avx512::FloatUnit>,
    avx512::summarize<avx512::Simd>,
};

}  // namespace polyattn

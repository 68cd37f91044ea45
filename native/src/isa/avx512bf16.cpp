// AVX-512 with dot products of bfloat16 and of bytes, and VBMI (Zen 4, Sapphire Rapids and later).
#define POLYATTN_NAMESPACE avx512bf16
#define POLYATTN_REGISTER(x) "+v"(x)

#include "kernel/simd_avx512bf16.h"

#include "kernel/passes.h"
#include "statistics/run.h"

namespace polyattn {

extern const Kernels kAvx512Bf16;
const Kernels kAvx512Bf16 = {
    "avx512bf16",
    avx512bf16::forward<avx512bf16::PairSimd, avx512bf16::PairUnit>,
    avx512bf16::backward<avx512bf16::PairSimd, avx512bf16::PairUnit>,
    avx512bf16::spin_both<avx512bf16::PairSimd, avx512bf16::PairUnit>,
    avx512bf16::summarize<avx512bf16::PairSimd>,
};

}  // namespace polyattn

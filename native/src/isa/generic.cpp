// Any processor: the compiler's four-lane vectors.
#define POLYATTN_NAMESPACE generic
#define POLYATTN_REGISTER(x) "+x"(x)

#include "kernel/simd_four.h"

#include "kernel/passes.h"
#include "statistics/run.h"

namespace polyattn {

extern const Kernels kGeneric;
const Kernels kGeneric = {
    "generic",
    generic::forward<generic::Simd, generic::FloatUnit>,
    generic::backward<generic::Simd, generic::FloatUnit>,
    generic::spin_both<generic::Simd, generic::FloatUnit>,
    generic::summarize<generic::Simd>,
};

}  // namespace polyattn

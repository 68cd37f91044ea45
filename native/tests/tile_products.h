// The processor's tiles against the twin's, product by product.
#pragma once

#include <cstdint>

namespace polyattn::testing {

// How many sums of `products` random products have other bits in AMX's tiles than in the twin's. For processes
// that may use AMX.
int64_t different_sums(int products);

}  // namespace polyattn::testing

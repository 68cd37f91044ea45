// Random codes of keys and values, and their scales.
#pragma once

#include <algorithm>

#include "numbers.h"
#include "polyattn/arguments.h"

namespace polyattn::testing {

// Any code but NaN.
inline double random_code(Random& random, DType dtype) {
  if (dtype == kInt8) return static_cast<double>(random.between(-128, 127));
  return from_f8(static_cast<uint8_t>(random.between(0, 126) + 128 * random.between(0, 1)));
}

// Scales that bring the largest code to `most`, or to less. `allocate(elements, width)` gives memory.
template <class Allocate>
Scales random_scales(Random& random, const Arguments& a, double most, const Allocate& allocate) {
  const int64_t count = (a.kv_len + a.quantised.block - 1) / a.quantised.block;
  Scales made;
  made.head = count + random.between(0, 2);
  made.batch = random.chance(0.1) ? 0 : made.head * a.kv_heads;
  const int64_t all = made.batch * std::max<int64_t>(a.batch - 1, 0) + made.head * a.kv_heads;
  float* values = static_cast<float*>(allocate(all, 4));
  for (int64_t i = 0; i < all; ++i) {
    values[i] = random.chance(0.05) ? 0 : static_cast<float>(random.uniform(-0.2, 1) * most);
  }
  made.data = values;
  return made;
}

// Keys of up to `size` and values of up to 2, as codes of a dtype.
template <class Allocate>
void quantise(Random& random, Arguments& a, DType coded, double size, const Allocate& allocate) {
  static constexpr int64_t blocks[] = {1, 5, 16, 32, 64, 64, 100, 4096};
  a.quantised.codes = coded == kInt8 ? Codes::int8 : Codes::f8;
  a.quantised.block = random.pick(blocks);
  const double largest = coded == kInt8 ? 127 : 448;
  a.quantised.k = random_scales(random, a, size / largest, allocate);
  a.quantised.v = random_scales(random, a, 2 / largest, allocate);
}

}  // namespace polyattn::testing

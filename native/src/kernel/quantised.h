// Keys and values that are stored as codes of one byte with a scale for each block of keys.
#pragma once

#include "kernel/division.h"
#include "kernel/units.h"

namespace polyattn::POLYATTN_NAMESPACE {

// Whether an element as stored is a code.
template <class C>
constexpr bool kCoded = sizeof(C) == 1;

// Whether an instruction set has codes as units of bfloat16.
template <class S, class C>
concept HasUnitsOf = requires(const C* p) { S::unit_codes(p, 0); };

// Keys that share a call of the products of bytes, and so the scale of what is rounded there.
constexpr int kCodedTurn = 64;

// to[j - begin] = the scale of key j, for keys `begin` to `end` - 1; then 0 up to a whole tile.
inline void spread_scales(const Arguments& a, const Scales& scales, const Item& item, int64_t begin,
                          int64_t end, float* to) {
  const float* const from = scales.data + item.q.b * scales.batch + item.kv_head * scales.head;
  const int64_t size = a.quantised.block;
  int64_t j = begin;
  for (int64_t block = begin / size; j < end; ++block) {
    const float scale = from[block];
    for (const int64_t stop = smaller(end, (block + 1) * size); j < stop; ++j) to[j - begin] = scale;
  }
  for (const int64_t stop = round_up(end - begin, kTile); j - begin < stop; ++j) to[j - begin] = 0;
}

// x[i] *= scales[i] for i < n, and for the rest of the last vector.
template <class S>
POLYATTN_INLINE void scale_columns(float* x, const float* scales, int64_t n) {
  for (int64_t i = 0; i < n; i += S::kLanes) S::store(x + i, S::mul(S::load(x + i), S::load(scales + i)));
}

// One key or value as the numbers that it stands for, rounded to T.
template <class S, class T, class C>
POLYATTN_INLINE void decode_row(const C* codes, int64_t dim, float scale, T* out) {
  const typename S::Vec s = S::fill(scale);
  int64_t i = 0;
  for (; i + S::kLanes <= dim; i += S::kLanes) S::store(out + i, S::mul(S::load(codes + i), s));
  if (i < dim) S::store_some(out + i, S::mul(S::load_some(codes + i, int(dim - i)), s), int(dim - i));
}

}  // namespace polyattn::POLYATTN_NAMESPACE

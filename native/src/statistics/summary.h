// Joining summaries. Internal linkage: each instruction set has its own.
#pragma once

#include "statistics/statistics.h"

namespace polyattn {

static inline Summary empty_summary() {
  Summary s{};
  s.min = __builtin_huge_val();
  s.max = -__builtin_huge_val();
  return s;
}

// Adds `count` finite elements with this mean and m2 (Chan's formula).
static inline void add_moments(Summary& s, int64_t count, double mean, double m2) {
  if (count == 0) return;
  const double before = double(s.finite), added = double(count), total = before + added;
  const double distance = mean - s.mean;
  s.m2 += m2 + distance * distance * (before / total) * added;
  s.mean = s.finite == 0 ? mean : s.mean + distance * (added / total);
  s.finite += count;
}

static inline void join(Summary& s, const Summary& next) {
  add_moments(s, next.finite, next.mean, next.m2);
  s.nan += next.nan;
  s.plus_inf += next.plus_inf;
  s.minus_inf += next.minus_inf;
  s.zero += next.zero;
  s.min = next.min < s.min ? next.min : s.min;
  s.max = next.max > s.max ? next.max : s.max;
  s.sum += next.sum;
  s.abs_sum += next.abs_sum;
  for (int i = 0; i < kBuckets; ++i) s.sketch[i] += next.sketch[i];
}

}  // namespace polyattn

// The instruction sets that a test may run: those that are here and that the operating system lets it use.
#pragma once

#include <vector>

#include "polyattn/arguments.h"

namespace polyattn::testing {

inline const std::vector<const Kernels*>& permitted() {
  static const std::vector<const Kernels*> sets = [] {
    std::vector<const Kernels*> found;
    for (const Kernels* const* set = available(); *set != nullptr; ++set) {
      if ((*set)->prepare == nullptr || (*set)->prepare() == nullptr) found.push_back(*set);
    }
    return found;
  }();
  return sets;
}

}  // namespace polyattn::testing

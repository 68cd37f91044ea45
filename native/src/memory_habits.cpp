#include "memory_habits.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace polyattn {
namespace {

bool is_intel() noexcept {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(0, &eax, &ebx, &ecx, &edx) != 0 && ebx == signature_INTEL_ebx;
#else
  return false;
#endif
}

#if defined(__x86_64__)
constexpr bool kX86 = true;
#else
constexpr bool kX86 = false;
#endif

}  // namespace

bool pages_in_turn = is_intel();
const bool codes_together = is_intel();
bool tile_by_tile = is_intel();
bool fetch_meanwhile = kX86;

}  // namespace polyattn

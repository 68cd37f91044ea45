#include "memory_habits.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace polyattn {
namespace {

#if defined(__x86_64__)
constexpr bool kX86 = true;

// Whether the vendor's name begins so.
bool is_made_by(unsigned signature) noexcept {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(0, &eax, &ebx, &ecx, &edx) != 0 && ebx == signature;
}
bool is_intel() noexcept { return is_made_by(signature_INTEL_ebx); }
bool is_amd() noexcept { return is_made_by(signature_AMD_ebx); }

// Family 25 is Zen 3 too, which has no AVX-512.
bool is_zen_4() noexcept {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!is_amd() || __get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return false;
  return (eax >> 8 & 0xf) + (eax >> 20 & 0xff) == 25;
}

// Bytes of a core's second cache, by the leaf in which Intel's processors describe their caches; 0: not said.
int64_t second_cache() noexcept {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  for (unsigned i = 0; __get_cpuid_count(4, i, &eax, &ebx, &ecx, &edx) != 0 && (eax & 0x1f) != 0; ++i) {
    if ((eax >> 5 & 7) != 2) continue;
    const int64_t ways = (ebx >> 22) + 1, parts = (ebx >> 12 & 0x3ff) + 1, line = (ebx & 0xfff) + 1;
    return ways * parts * line * (int64_t{ecx} + 1);
  }
  return 0;
}
#else
constexpr bool kX86 = false;
constexpr bool is_intel() noexcept { return false; }
constexpr bool is_amd() noexcept { return false; }
constexpr bool is_zen_4() noexcept { return false; }
constexpr int64_t second_cache() noexcept { return 0; }
#endif

}  // namespace

bool pages_in_turn = is_intel();
const bool codes_together = is_intel();
int64_t page_heads_together_from = is_zen_4() ? int64_t{1} << 26 : INT64_MAX;
bool tile_by_tile = is_intel();
bool fetch_meanwhile = kX86;
bool fetch_between_blocks = is_amd() || is_intel();
bool large_items = is_intel() && second_cache() >= int64_t{2} << 20;

}  // namespace polyattn

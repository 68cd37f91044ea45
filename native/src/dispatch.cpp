#include "dispatch.h"

#include <cstring>

#include "tile_permission.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace polyattn {
namespace {

#if defined(__x86_64__)
// Conversions of float16. Not among the names that every compiler's __builtin_cpu_supports knows.
[[maybe_unused]] bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

// __builtin_cpu_supports asks the operating system too: a processor whose wide registers the system
// does not save counts as one without them.
bool runs_here([[maybe_unused]] const Kernels* kernels) {
#if defined(POLYATTN_HAVE_AVX2)
  if (kernels == &kAvx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  }
#endif
#if defined(POLYATTN_HAVE_AVX512) || defined(POLYATTN_HAVE_AVX512BF16) || defined(POLYATTN_HAVE_AMX)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi2") && has_f16c();
  [[maybe_unused]] const bool products = avx512 && __builtin_cpu_supports("avx512bf16") &&
                                         __builtin_cpu_supports("avx512vnni") &&
                                         __builtin_cpu_supports("avx512vbmi");
#endif
#if defined(POLYATTN_HAVE_AVX512)
  if (kernels == &kAvx512) return avx512;
#endif
#if defined(POLYATTN_HAVE_AVX512BF16)
  if (kernels == &kAvx512Bf16) return products;
#endif
#if defined(POLYATTN_HAVE_AMX)
  if (kernels == &kAmx) return products && has_tiles();
#endif
  return true;  // generic, the twin; NEON is part of every aarch64
}

constexpr int kMaxSets = 6;

struct List {
  const Kernels* sets[kMaxSets + 1] = {};

  List() {
    int count = 0;
    for (const Kernels* const* set = compiled(); *set != nullptr; ++set) {
      if (runs_here(*set)) sets[count++] = *set;
    }
  }
};

}  // namespace

const Kernels* const* compiled() {
  static const Kernels* const sets[] = {
#if defined(POLYATTN_HAVE_AVX512BF16)
      &kAvx512Bf16,
#endif
#if defined(POLYATTN_HAVE_AVX512)
      &kAvx512,
#endif
#if defined(POLYATTN_HAVE_AVX2)
      &kAvx2,
#endif
#if defined(POLYATTN_HAVE_NEON)
      &kNeon,
#endif
      &kGeneric,  // anywhere
#if defined(POLYATTN_HAVE_AMX)
      &kAmx,  // for bfloat16, in processes that may use it
#endif
      &kAmxTwin,  // for tests
      nullptr,
  };
  static_assert(sizeof(sets) / sizeof(sets[0]) <= kMaxSets + 1);
  return sets;
}

const Kernels* const* available() {
  static const List list;
  return list.sets;
}

const Kernels* find(const char* name) {
  for (const Kernels* const* set = available(); *set != nullptr; ++set) {
    if (std::strcmp((*set)->name, name) == 0) return *set;
  }
  return nullptr;
}

}  // namespace polyattn

#include "tile_permission.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cerrno>
#endif

namespace polyattn {

#if defined(__x86_64__) && defined(__linux__)

namespace {

// From Linux's asm/prctl.h, which older headers lack (Documentation/arch/x86/xstate.rst).
constexpr int kSupported = 0x1021, kPermitted = 0x1022, kRequest = 0x1023;
constexpr int kTileData = 18;                        // the number of the state
constexpr uint64_t kTileStates = uint64_t{3} << 17;  // the configuration's, the data's
constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kOsXsave = 1u << 27;

// Registers whose state the operating system saves.
uint64_t saved_states() {
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

int ask_linux(int question, uint64_t argument) {
  return syscall(SYS_arch_prctl, question, argument) == 0 ? 0 : errno;
}

bool holds_tile_data(ArchPrctl ask, int question) {
  uint64_t states = 0;
  return ask(question, reinterpret_cast<uintptr_t>(&states)) == 0 && (states >> kTileData & 1) != 0;
}

}  // namespace

const char* permission_for_tiles(ArchPrctl ask) {
  if (holds_tile_data(ask, kPermitted)) return nullptr;
  const int error = ask(kRequest, kTileData);
  // The signal stacks of this process's threads are then too small for the tiles.
  if (error == ENOSPC) return "a thread's stack for signals has no room for AMX's tiles";
  if (error == 0 && holds_tile_data(ask, kPermitted)) return nullptr;
  return "the operating system, or the container, does not let this process use AMX's tiles";
}

bool has_tiles() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kOsXsave) == 0) return false;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned kWanted = kBf16 | kTile | kInt8;
  if ((edx & kWanted) != kWanted) return false;
  return (saved_states() & kTileStates) == kTileStates && holds_tile_data(ask_linux, kSupported);
}

const char* permit_tiles() {
  static const char* const refusal =
      has_tiles() ? permission_for_tiles(ask_linux) : "this processor, or its operating system, has no AMX";
  return refusal;
}

#else

bool has_tiles() { return false; }

const char* permit_tiles() { return permission_for_tiles(nullptr); }
const char* permission_for_tiles(ArchPrctl) { return "AMX is used on Linux alone"; }

#endif

}  // namespace polyattn

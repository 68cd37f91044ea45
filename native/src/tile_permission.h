// Leave of the operating system to use AMX's tiles, which a process has to ask for.
#pragma once

#include <cstdint>

namespace polyattn {

// Whether the processor has tiles for bfloat16 and the operating system knows them; asks for nothing.
bool has_tiles();

// Asks once in a process, whose forks inherit leave and refusal. Returns nullptr, or why tiles may not be used.
const char* permit_tiles();

// Linux's arch_prctl: 0, or the number of the error. `argument` is a state's number where it is requested, else
// where a word of states goes.
using ArchPrctl = int (*)(int question, uint64_t argument);

// What permit_tiles() asks, of this system call, each time; tests bring one that refuses.
const char* permission_for_tiles(ArchPrctl ask);

}  // namespace polyattn

// Leave of the operating system to use AMX's tiles, which a process has to ask for.
#pragma once

namespace polyattn {

// Whether the processor has tiles for bfloat16 and the operating system knows them; asks for nothing.
bool has_tiles();

// Asks once in a process. Returns nullptr, or why tiles may not be used.
const char* permit_tiles();

}  // namespace polyattn

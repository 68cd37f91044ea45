// How often threads took the twin's tiles and gave them back (kernel/tiles_plain.h): for tests, which hold it to
// what AMX demands.
#pragma once

#include <cstdint>

namespace polyattn {

struct TwinSessions {
  int64_t begun, ended;
};

extern TwinSessions twin_sessions;

}  // namespace polyattn

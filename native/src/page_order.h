// Whether rows are fetched from several pages of memory in turn (kernel/few_rows.h): where that was measured to be
// faster. It changes no result.
#pragma once

namespace polyattn {

// Intel's processors. Tests set it.
extern bool pages_in_turn;

}  // namespace polyattn

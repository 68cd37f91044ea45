// How few rows best read memory, where processors differ in it (kernel/few_rows.h, kernel/division.h).
#pragma once

namespace polyattn {

// Rows are fetched from several pages of memory in turn. Changes no bit. Intel's processors; tests set it.
extern bool pages_in_turn;

// Heads whose codes lie side by side walk over their keys together, as other heads do. Keys are then divided into
// other parts. Intel's processors.
extern const bool codes_together;

}  // namespace polyattn

// How memory is best read, where processors differ in it (kernel/few_rows.h, kernel/division.h,
// kernel/fetcher.h, kernel/forward_strip.h).
#pragma once

#include <cstdint>

namespace polyattn {

// Rows are fetched from several pages of memory in turn. Changes no bit. Intel's processors; tests set it.
extern bool pages_in_turn;

// Heads whose codes lie side by side walk over their keys together, as other heads do. Keys are then divided into
// other parts. Intel's processors.
extern const bool codes_together;

// From how many bytes of keys and values on heads walk over their keys together also where these lie in small pages,
// heads before keys. Keys are then divided into other parts. Zen 4; tests set it.
extern int64_t page_heads_together_from;

// Products with values go tile by tile, so that these stay in the first cache, and not over all tiles of a chunk, where
// sums stay in registers. Changes no bit. Intel's processors; tests set it.
extern bool tile_by_tile;

// What many rows need next is fetched while they multiply (kernel/fetcher.h). Changes no bit. On x86: measured on
// a Xeon and a Zen 4. Tests set it.
extern bool fetch_meanwhile;

// That, between register blocks of vectors too, where strips that see few keys else get a part of it alone; and what the
// backward pass of vectors needs next (kernel/backward.h). Changes no bit. AMD's processors and Intel's: measured on a
// Zen 4 and a Xeon with AMX. Tests set it.
extern bool fetch_between_blocks;

// Items of dense calls have as many rows as half of a second cache of 2 MiB holds, in vectors as in tiles. Changes no bit.
// Intel's processors with such a cache; tests set it.
extern bool large_items;

}  // namespace polyattn

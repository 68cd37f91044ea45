// What the ways into a kernel share, whether arrays come as integers or as tensors.
#pragma once

#include <nanobind/nanobind.h>

#include "polyattn/arguments.h"

namespace polyattn {

// Reads the terms of a mask, a tuple of tuples of integers.
void read_terms(nanobind::handle value, Arguments& a);

// Whether a forward pass has nothing to write.
inline bool without_queries(const Arguments& a) { return a.batch == 0 || a.q_heads == 0 || a.q_len == 0; }

// Runs a pass without the interpreter's lock; MemoryError where there is none.
void run_pass(bool (*pass)(const Arguments&), const Arguments& a);

}  // namespace polyattn

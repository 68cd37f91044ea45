// What the activation trace adds to the Python module: classes of polyattn._native.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "statistics/statistics.h"

namespace polyattn {

// Adds TraceLines, which the writing thread uses.
void add_trace_lines(nanobind::module_& m);

// Adds TraceRecord, which the program's threads use.
void add_trace_record(nanobind::module_& m);

// statistics() of a checked tensor, without the interpreter's lock if it takes long. False: no
// memory. Throws what Python shows as ValueError for an `isa` or `threads` that is none.
bool summarize_unlocked(int isa, int threads, const Tensor& tensor, double* row);

}  // namespace polyattn

// The parts of the Python module polyattn._native, one source file each, and what they share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "polyattn/arguments.h"
#include "statistics/statistics.h"

namespace polyattn {

// Adds forward and backward.
void add_attention(nanobind::module_& m);

// Adds forward_tensors, and what is asked of tensors.
void add_tensors(nanobind::module_& m);

// Adds BareCall.
void add_bare_call(nanobind::module_& m);

// Adds TrainedCall.
void add_trained_call(nanobind::module_& m);

// Adds TraceLines, which the writing thread uses.
void add_trace_lines(nanobind::module_& m);

// Adds TraceRecord, which the program's threads use.
void add_trace_record(nanobind::module_& m);

// Adds TraceTaps, which traces of JAX programs use.
void add_trace_taps(nanobind::module_& m);

// The instruction set at this place of available(); ValueError where there is none.
const Kernels& chosen(int isa);

// statistics() of a checked tensor, without the interpreter's lock if it takes long. False: no
// memory. Throws what Python shows as ValueError for an `isa` or `threads` that is none.
bool summarize_unlocked(int isa, int threads, const Tensor& tensor, double* row);

}  // namespace polyattn

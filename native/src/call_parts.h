// What the ways into a kernel share, whether arrays come as integers or as tensors.
#pragma once

#include <nanobind/nanobind.h>

#include "exchange.h"
#include "polyattn/arguments.h"

namespace polyattn {

// Reads the terms of a mask, a tuple of tuples of integers.
void read_terms(nanobind::handle value, Arguments& a);

// Whether a forward pass has nothing to write.
inline bool without_queries(const Arguments& a) { return a.batch == 0 || a.q_heads == 0 || a.q_len == 0; }

// Runs a pass without the interpreter's lock; MemoryError where there is none.
void run_pass(bool (*pass)(const Arguments&), const Arguments& a);

// What forward_tensors() takes that a problem fixes, and what of each call.
struct OfProblem {
  int isa, threads, dtype;
  bool rows_first;
  double scale, softcap;
};
struct OfCall {
  nanobind::handle q, k, v, out, terms, mask, bias, quantised, pages, lse;
};

// The output of one attention call on tensors that say themselves where they lie. `quantised`: (key_scales,
// value_scales, block), keys and values being codes. `pages`: (block_table, lengths), keys and values being
// (pages, rows of a page, K, H), or heads first. `lse`: where it is wanted. None where there is none.
void attend_tensors(const Exchange& tensors, const OfProblem& problem, const OfCall& given);

}  // namespace polyattn

// A random attention call with all its arrays.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "memory.h"
#include "numbers.h"
#include "polyattn/arguments.h"

namespace polyattn::testing {

struct Problem {
  Arguments a;
  Tensor q, k, v, out, lse;
  Tensor dout, delta, dq, dk, dv, dbias;  // dbias: its sizes are those of the bias
  std::string text;                       // for the reader of a failure

  // The arrays that a pass writes.
  std::vector<Tensor*> written(Pass pass);
  void reset(Pass pass);

  std::vector<std::unique_ptr<Buffer>> buffers;
};

std::string describe(const Arguments& a);

// Says for every pointer what its memory holds, by the problem's buffers.
void give_extents(Problem& p);

// With `backward`, the gradients' arrays are there too and no page table is.
std::unique_ptr<Problem> random_problem(uint64_t seed, bool backward);

}  // namespace polyattn::testing

// What the memory behind each pointer of a problem holds: the size of the buffer that it was given.
#include <algorithm>

#include "problem.h"

namespace polyattn::testing {
namespace {

Extent extent_of(const Problem& p, const void* data) {
  const auto holds = [data](const auto& buffer) { return buffer->data() == data; };
  const auto found = std::find_if(p.buffers.begin(), p.buffers.end(), holds);
  return {found == p.buffers.end() ? 0 : static_cast<int64_t>((*found)->size()), 0};
}

}  // namespace

void give_extents(Problem& p) {
  Arguments& a = p.a;
  const auto of = [&p](const void* data) { return extent_of(p, data); };
  for (Array* array : {&a.q, &a.k, &a.v, &a.out, &a.lse, &a.dout, &a.delta, &a.dq, &a.dk, &a.dv}) {
    array->extent = of(array->data);
  }
  for (int i = 0; i < a.terms; ++i) {
    Term& term = a.term[i];
    if (term.lengths != nullptr) term.extent = of(term.lengths);
    if (term.q_ids != nullptr) term.extent = of(term.q_ids);
    if (term.bytes != nullptr) term.extent = of(term.bytes);
    term.kv_extent = of(term.kv_ids);
  }
  a.cu_q_extent = of(a.cu_q);
  a.cu_kv_extent = of(a.cu_kv);
  a.bias.extent = of(a.bias.data);
  a.slopes.extent = of(a.slopes.data);
  a.sinks_extent = of(a.sinks);
  a.pages.extent = of(a.pages.table);
  a.pages.lengths_extent = of(a.pages.lengths);
  a.quantised.k.extent = of(a.quantised.k.data);
  a.quantised.v.extent = of(a.quantised.v.data);
  a.dbias_extent = of(a.dbias);
}

}  // namespace polyattn::testing

// One line about a call, for the reader of a failure.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "problem.h"

namespace polyattn::testing {

std::string describe(const Arguments& a) {
  static const char* const kinds[] = {"everything", "band",  "kv_limit",   "q_limit", "segments",
                                      "blocks",     "dense", "both",       "either",  "kv_start",
                                      "q_start",    "chunk", "first_keys", "step",    "complement"};
  static_assert(sizeof(kinds) / sizeof(kinds[0]) == kTermKinds);
  const auto number = [](auto value) { return std::to_string(value); };
  const char* const dtypes[] = {"f32", "bf16", "f16"};
  std::string text = std::string(dtypes[static_cast<int>(a.dtype)]) + " B=" + number(a.batch) +
                     " N=" + number(a.q_heads) + " K=" + number(a.kv_heads) + " T=" + number(a.q_len) +
                     " S=" + number(a.kv_len) + " H=" + number(a.head_dim) + " Hv=" + number(a.value_dim) +
                     " scale=" + number(a.scale) + " softcap=" + number(a.softcap) +
                     " strides q=" + number(a.q.row) + " k=" + number(a.k.row) + " v=" + number(a.v.row) +
                     " out=" + number(a.out.row) + " threads=" + number(a.threads);
  if (a.cu_q != nullptr) text += " packed";
  if (a.pages.table != nullptr) text += " pages of " + number(a.pages.page_size);
  if (a.pages.lengths != nullptr) text += " and their lengths";
  if (a.quantised.codes != Codes::none) {
    text += (a.quantised.codes == Codes::int8 ? " int8" : " f8") + std::string(" in blocks of ") +
            number(a.quantised.block);
  }
  if (a.bias.data != nullptr) {
    text += std::string(" bias ") + dtypes[static_cast<int>(a.bias.dtype)] + " " + number(a.bias.batch) +
            "/" + number(a.bias.head) + "/" + number(a.bias.row) + "/" + number(a.bias.column);
  }
  if (a.slopes.data != nullptr) text += " slopes";
  if (a.sinks != nullptr) text += " sinks " + number(a.sink_count);
  text += " mask:";
  for (int i = 0; i < a.terms; ++i) {
    const Term& term = a.term[i];
    text += std::string(" ") + kinds[static_cast<int>(term.kind)];
    if (term.kind == TermKind::band) {
      const auto limit = [&](int64_t x) { return std::abs(x) == kUnbounded ? "any" : number(x); };
      text += "(" + limit(term.low) + "," + limit(term.high) + (term.bottom_right ? ",br)" : ")");
    } else if (term.kind == TermKind::blocks) {
      text += "(" + number(term.block_q) + "x" + number(term.block_k) + ")";
    } else if (term.size != 0) {
      text += "(" + number(term.size) + (term.bottom_right ? ",br)" : ")");
    }
  }
  return text;
}

}  // namespace polyattn::testing

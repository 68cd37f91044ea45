// Random masks: terms in postfix order, with the arrays that they point at.
#pragma once

#include <algorithm>

#include "numbers.h"
#include "polyattn/arguments.h"

namespace polyattn::testing {

// A length, or a start, for each batch entry; some beyond the total and below 0.
template <class Allocate>
int64_t* random_lengths(Random& random, const Arguments& a, int64_t total, const Allocate& allocate) {
  int64_t* values = static_cast<int64_t*>(allocate(a.batch, 8));
  for (int64_t b = 0; b < a.batch; ++b) {
    values[b] = random.chance(0.1) ? -3 : random.chance(0.1) ? total + 7 : random.between(0, total);
  }
  return values;
}

// `allocate(elements, width)` gives memory.
template <class Allocate>
class MaskMaker {
 public:
  MaskMaker(Random& random, Arguments& a, const Allocate& allocate)
      : random_(random), a_(a), allocate_(allocate) {}

  // Terms in random postfix order: joins as soon as two masks are there, or all at the end.
  // `paged_lengths`: of what a page table has, or nullptr.
  void mask(const int64_t* paged_lengths) {
    if (paged_lengths != nullptr) {
      Term limit;
      limit.kind = TermKind::kv_limit;
      limit.lengths = paged_lengths;
      a_.term[a_.terms++] = limit;
    } else if (random_.chance(0.25)) {
      return;
    }
    int depth = a_.terms;
    int64_t leaves = random_.chance(0.1) ? kMaxDepth : random_.between(depth == 0, 3);
    const double eager = random_.chance(0.2) ? 0 : 0.6;
    while (leaves > 0 || depth > 1) {
      // The lengths of a page table must stay in force for all keys.
      const bool lengths = paged_lengths != nullptr && depth == 2;
      const bool join = leaves == 0 || depth == kMaxDepth || (!lengths && random_.chance(eager));
      if (depth > 1 && join) {
        const bool either = !lengths && random_.chance(0.4);
        a_.term[a_.terms++].kind = either ? TermKind::either : TermKind::both;
        --depth;
      } else {
        a_.term[a_.terms++] = leaf();
        --leaves;
        ++depth;
      }
      const bool room = a_.terms < kMaxTerms - 2 * kMaxDepth;  // for what is still to come
      if (room && (paged_lengths == nullptr || depth > 1) && random_.chance(0.15)) {
        a_.term[a_.terms++].kind = TermKind::complement;
      }
    }
  }

 private:
  const int64_t* lengths(int64_t total) { return random_lengths(random_, a_, total, allocate_); }

  const int64_t* identifiers(int64_t rows, int64_t& stride) {
    const bool shared = a_.cu_q != nullptr || random_.chance(0.2);
    stride = shared ? 0 : rows;
    const int64_t count = shared ? rows : rows * a_.batch;
    int64_t* values = static_cast<int64_t*>(allocate_(count, 8));
    const bool sorted = random_.chance(0.6);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t t = rows > 0 ? i % rows : 0;
      values[i] = sorted ? t * 3 / std::max<int64_t>(rows, 1) - 1 : random_.between(-1, 2);
    }
    return values;
  }

  // Contiguous over the dimensions that are not shared, or transposed in the last two.
  void bytes(Term& term, int64_t rows, int64_t columns, double share) {
    const bool whole = random_.chance(0.3);  // one value for whole rows or columns
    const int64_t sizes[] = {whole && random_.chance(0.5) ? 1 : columns,
                             whole && random_.chance(0.5) ? 1 : rows, random_.chance(0.5) ? 1 : a_.q_heads,
                             random_.chance(0.5) ? 1 : a_.batch};
    int64_t* const strides[] = {&term.column, &term.row, &term.head, &term.batch};
    const int64_t count = contiguous(sizes, strides);
    if (random_.chance(0.2) && sizes[0] > 1 && sizes[1] > 1) {
      term.row = 1;
      term.column = sizes[1];
    }
    uint8_t* values = static_cast<uint8_t*>(allocate_(count, 1));
    for (int64_t i = 0; i < count; ++i) values[i] = random_.chance(share);
    term.bytes = values;
  }

  Term leaf() {
    static constexpr int64_t blocks[] = {1, 7, 16, 32, 64, 64, 80, 128};
    static constexpr int64_t sizes[] = {1, 2, 3, 5, 16, 63, 64, 100, 128, 300, kUnbounded};
    const int64_t reach = a_.q_len + a_.kv_len + 2;
    Term term;
    term.kind = static_cast<TermKind>(random_.between(0, 11));
    if (term.kind >= TermKind::both) term.kind = static_cast<TermKind>(static_cast<int>(term.kind) + 2);
    switch (term.kind) {
      case TermKind::band:
        term.bottom_right = random_.chance(0.5);
        if (random_.chance(0.6)) {
          term.high = random_.chance(0.6) ? 0 : random_.between(-reach, reach);
        }
        if (random_.chance(0.5)) term.low = -random_.between(0, reach / 2);
        break;
      case TermKind::kv_limit:
      case TermKind::kv_start:
        term.lengths = lengths(a_.kv_len);
        break;
      case TermKind::q_limit:
      case TermKind::q_start:
        term.lengths = lengths(a_.q_len);
        break;
      case TermKind::chunk:
      case TermKind::step:
        term.bottom_right = random_.chance(0.5);
        term.size = random_.pick(sizes);
        break;
      case TermKind::first_keys:
        term.size = random_.chance(0.2) ? random_.between(0, a_.kv_len + 3) : random_.pick(sizes);
        break;
      case TermKind::segments:
        term.q_ids = identifiers(a_.q_len, term.q_ids_batch);
        term.kv_ids = identifiers(a_.kv_len, term.kv_ids_batch);
        break;
      case TermKind::blocks:
        term.block_q = random_.pick(blocks);
        term.block_k = random_.pick(blocks);
        bytes(term, (a_.q_len + term.block_q - 1) / term.block_q,
              (a_.kv_len + term.block_k - 1) / term.block_k, random_.uniform(0.1, 0.9));
        break;
      case TermKind::dense:
        bytes(term, a_.q_len, a_.kv_len, random_.chance(0.3) ? 0.05 : random_.uniform(0, 1));
        break;
      default:
        break;
    }
    return term;
  }

  Random& random_;
  Arguments& a_;
  const Allocate& allocate_;
};

}  // namespace polyattn::testing

// Ordinary calls of each kind, each of whose arrays has just the memory that it needs.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "polyattn/arguments.h"

namespace polyattn::testing {

alignas(64) inline float numbers[64];
inline int64_t offsets_q[] = {0, 2, 5}, offsets_k[] = {0, 0, 7};
inline int64_t lengths[] = {5, 17}, ids[32], table[] = {0, 2, -1, 3, 1, 9};
inline uint8_t bytes[64];
// check() reads no element of the arrays themselves.
inline void* const anywhere = numbers;

// B=2, N=4, K=2, T=5, S=7, H=8, Hv=16.
inline Arguments plain() {
  Arguments a;
  a.batch = 2;
  a.q_heads = 4;
  a.kv_heads = 2;
  a.q_len = 5;
  a.kv_len = 7;
  a.head_dim = 8;
  a.value_dim = 16;
  a.q = a.dq = {anywhere, 4 * 5 * 8, 5 * 8, 8, {2 * 4 * 5 * 8 * 4}};
  a.k = a.dk = {anywhere, 2 * 7 * 8, 8, 2 * 8, {2 * 2 * 7 * 8 * 4}};
  a.v = a.dv = {anywhere, 2 * 7 * 16, 16, 2 * 16, {2 * 2 * 7 * 16 * 4}};
  a.out = a.dout = {anywhere, 4 * 5 * 16, 16, 4 * 16, {2 * 4 * 5 * 16 * 4}};
  a.lse = a.delta = {anywhere, 4 * 5, 5, 1, {2 * 4 * 5 * 4}};
  return a;
}

inline Arguments packed() {
  Arguments a = plain();
  a.cu_q = offsets_q;
  a.cu_kv = offsets_k;
  a.cu_q_extent = a.cu_kv_extent = {3 * 8};
  for (Array* array : {&a.q, &a.k, &a.v, &a.out, &a.lse, &a.dq, &a.dk, &a.dv, &a.dout, &a.delta}) {
    array->batch = 0;
  }
  return a;
}

// Keys in pages of 8: up to 20 of them, 5 and 17 in use.
inline Arguments paged() {
  Arguments a = plain();
  a.kv_len = 20;
  a.pages = {table, 3, 8, 10, {6 * 8}, nullptr, {}};
  a.k.extent = {(9 * 2 * 7 * 8 + 8 * 2 * 8) * 4};  // the last row of the last page
  a.v.extent = {(9 * 2 * 7 * 16 + 8 * 2 * 16) * 4};
  a.term[0].kind = TermKind::kv_limit;
  a.term[0].lengths = lengths;
  a.term[0].extent = {2 * 8};
  a.terms = 1;
  return a;
}

// The same, but that the pages say how many keys are in use.
inline Arguments of_lengths() {
  Arguments a = paged();
  a.terms = 0;
  a.pages.lengths = lengths;
  a.pages.lengths_extent = {2 * 8};
  return a;
}

// Keys and values as codes, four of which share a scale.
inline Arguments quantised() {
  Arguments a = plain();
  const Scales scales = {numbers, 4, 2, {2 * 4 * 4}};
  a.quantised = {Codes::int8, 4, scales, scales};
  a.k.extent = {2 * 2 * 7 * 8};
  a.v.extent = {2 * 2 * 7 * 16};
  return a;
}

inline Arguments with_terms(std::initializer_list<TermKind> kinds) {
  Arguments a = plain();
  for (const TermKind kind : kinds) {
    Term& term = a.term[a.terms++];
    term.kind = kind;
    term.lengths = lengths;
    term.q_ids = term.kv_ids = ids;
    term.bytes = bytes;
    term.block_q = term.block_k = 3;
    term.size = 3;
    const bool limit = kind == TermKind::q_limit || kind == TermKind::kv_limit || kind == TermKind::q_start ||
                       kind == TermKind::kv_start;
    term.extent = {kind == TermKind::segments ? 5 * 8 : limit ? 2 * 8 : 1};
    term.kv_extent = {7 * 8};
  }
  return a;
}

inline Arguments with_bias() {
  Arguments a = plain();
  a.bias = {anywhere, DType::bf16, 0, 35, 7, 1, {4 * 35 * 2}};
  a.dbias = numbers;
  a.dbias_head = 35;
  a.dbias_row = 7;
  a.dbias_column = 1;
  a.dbias_extent = {4 * 35 * 4};
  return a;
}

}  // namespace polyattn::testing

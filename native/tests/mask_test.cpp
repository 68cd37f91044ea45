// What kernels ask of a mask: keys that rows may attend are those of the oracle, no bound is claimed
// wrongly, and tiles that a mask empties are not visited.
//
// Build from: mask_test.cpp and the libraries polyattn_testing and polyattn_kernels of CMake.
#define POLYATTN_NAMESPACE mask_test
#define POLYATTN_REGISTER(x) "+x"(x)

#include "kernel/simd_four.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "kernel/visit.h"
#include "oracle.h"
#include "problem.h"

namespace polyattn::testing {
namespace {

using mask_test::Cover;
using mask_test::kChunkKeys;
using mask_test::kRows;
using mask_test::kTile;
using mask_test::Span;
using mask_test::Strip;

int failures = 0;

void expect(bool right, const std::string& what) {
  if (right) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

Strip rows_of_head(int64_t head, int64_t begin, int64_t end) {
  Strip s;
  s.count = static_cast<int>(end - begin);
  s.one_head = true;
  s.t_low = begin;
  s.t_high = end - 1;
  for (int r = 0; r < s.count; ++r) s.t[r] = begin + r, s.head[r] = head;
  return s;
}

// The tiles that a strip visits, as the passes look for them.
std::vector<int64_t> visited(const Arguments& a, const mask_test::Sequence& q, const Strip& strip) {
  const Span keys = mask_test::span(a, q, strip.t_low, strip.t_high);
  std::vector<int64_t> found;
  std::vector<uint64_t> words(mask_test::kChunk * kRows);
  for (int64_t j = keys.low / kTile * kTile; j < keys.high; j += kChunkKeys) {
    mask_test::Visit visit;
    mask_test::plan<mask_test::Simd, mask_test::FloatUnit>(
        a, q, strip, j, std::min(j + kChunkKeys, keys.high), words.data(), &visit);
    for (int i = 0; i < visit.tiles; ++i) found.push_back(visit.tile[i].j0 / kTile);
  }
  return found;
}

// One strip against all tiles.
void compare(const Problem& p, const mask_test::Sequence& q, const Sequence& s, const Strip& strip) {
  const Arguments& a = p.a;
  const Span within = mask_test::span(a, q, strip.t_low, strip.t_high);
  std::vector<int64_t> wanted;
  for (int64_t j0 = 0; j0 < q.kv_len; j0 += kTile) {
    const int n = static_cast<int>(std::min<int64_t>(kTile, q.kv_len - j0));
    const Cover claimed = mask_test::cover(a, q, strip, j0, j0 + n);
    uint64_t found[kRows];
    const Cover known = mask_test::words<mask_test::Simd>(a, q, strip, j0, n, found);
    bool any = false, all = true, right = true, bounded = true;
    for (int r = 0; r < strip.count; ++r) {
      for (int i = 0; i < n; ++i) {
        const bool seen = visible(a, s, strip.head[r], strip.t[r], j0 + i);
        right &= seen == ((found[r] >> i & 1) != 0);
        bounded &= !seen || (j0 + i >= within.low && j0 + i < within.high);
        any |= seen;
        all &= seen;
      }
      right &= n == kTile || found[r] >> n == 0;
    }
    const std::string where =
        " at row " + std::to_string(strip.t_low) + ", key " + std::to_string(j0) + ": " + p.text;
    expect(right, "a word differs from the oracle" + where);
    expect(known == (any ? all ? Cover::full : Cover::mixed : Cover::empty), "a cover of words" + where);
    expect(claimed == Cover::mixed || claimed == known, "a cover is claimed wrongly" + where);
    expect(bounded, "a key is seen outside of the span" + where);
    if (any) wanted.push_back(j0 / kTile);
  }
  expect(visited(a, q, strip) == wanted, "other tiles are visited than are seen: " + p.text);
}

void random_masks(int64_t cases) {
  for (int64_t seed = 1; seed <= cases; ++seed) {
    const auto problem = random_problem(static_cast<uint64_t>(seed), false);
    const Arguments& a = problem->a;
    if (a.terms == 0) continue;
    const std::vector<Sequence> all = sequences(a);
    for (size_t b = 0; b < all.size(); ++b) {
      const mask_test::Sequence q = mask_test::sequence_of(a, static_cast<int64_t>(b));
      for (int64_t t = 0; t < q.q_len; t += kRows) {
        Strip strip = rows_of_head(t / kRows % a.q_heads, t, std::min(t + kRows, q.q_len));
        compare(*problem, q, all[b], strip);
        strip.one_head = false;  // as where a group's heads are rows
        for (int r = 0; r < strip.count; ++r) strip.head[r] = (strip.head[r] + r) % a.q_heads;
        compare(*problem, q, all[b], strip);
      }
    }
  }
}

// A mask of one head without a batch.
struct Masked {
  Arguments a;

  explicit Masked(int64_t q_len, int64_t kv_len) {
    a.batch = a.q_heads = a.kv_heads = 1;
    a.q_len = q_len, a.kv_len = kv_len;
  }

  Term& add(TermKind kind) {
    Term& term = a.term[a.terms++];
    term.kind = kind;
    term.bottom_right = 1;
    return term;
  }

  Masked& band(int64_t low, int64_t high) {
    Term& term = add(TermKind::band);
    term.low = low, term.high = high;
    return *this;
  }

  Masked& sized(TermKind kind, int64_t size) {
    add(kind).size = size;
    return *this;
  }

  Masked& of_lengths(TermKind kind, const int64_t* lengths) {
    add(kind).lengths = lengths;
    return *this;
  }

  Masked& join(TermKind kind) {
    add(kind);
    return *this;
  }

  std::vector<int64_t> tiles(int64_t begin) const {
    const mask_test::Sequence q = mask_test::sequence_of(a, 0);
    return visited(a, q, rows_of_head(0, begin, std::min(begin + kRows, a.q_len)));
  }
};

std::vector<int64_t> range(int64_t begin, int64_t end) {
  std::vector<int64_t> numbers;
  for (int64_t i = begin; i < end; ++i) numbers.push_back(i);
  return numbers;
}

constexpr int64_t kAny = kUnbounded, kLong = 4096;

void chunks_visit_themselves_alone() {
  const Masked mask = Masked(kLong, kLong).band(-kAny, 0).sized(TermKind::chunk, 512).join(TermKind::both);
  for (int64_t strip = 0; strip < kLong / kRows; ++strip) {
    const int64_t chunk = strip / 8 * 8;
    expect(mask.tiles(strip * kRows) == range(chunk, strip + 1), "chunks, strip " + std::to_string(strip));
  }
  const Masked last = Masked(1, kLong + 3).sized(TermKind::chunk, 512);
  expect(last.tiles(0) == range(64, 65), "the one row of a chunk that has begun");
  const Masked early = Masked(kLong, 64).sized(TermKind::chunk, 512);
  expect(early.tiles(0).empty() && !early.tiles(kLong - kRows).empty(), "rows before all keys see none");
}

void padding_is_not_visited() {
  const int64_t start = 1000, end = 3000;
  Masked mask = Masked(kLong, kLong).of_lengths(TermKind::kv_start, &start);
  expect(mask.tiles(0) == range(15, 64), "keys before the start");
  mask.of_lengths(TermKind::kv_limit, &end).join(TermKind::both).join(TermKind::complement);
  std::vector<int64_t> outside = range(0, 16);
  for (const int64_t tile : range(46, 64)) outside.push_back(tile);
  expect(mask.tiles(0) == outside, "a complement leaves out what its mask shows whole");
  const Masked queries = Masked(kLong, kLong).of_lengths(TermKind::q_start, &start);
  expect(queries.tiles(0).empty() && queries.tiles(960) == range(0, 64), "queries before the start");
}

void what_lies_between_first_keys_and_window_is_not_visited() {
  const Masked mask = Masked(kLong, kLong)
                          .band(-kAny, 0)
                          .band(-255, kAny)
                          .sized(TermKind::first_keys, 4)
                          .join(TermKind::either)
                          .join(TermKind::both);
  for (const int64_t strip : range(5, 64)) {
    std::vector<int64_t> wanted{0};
    for (const int64_t tile : range(strip - 4, strip + 1)) wanted.push_back(tile);
    expect(mask.tiles(strip * kRows) == wanted, "first keys and a window, strip " + std::to_string(strip));
  }
}

void wide_steps_leave_tiles_out() {
  const Masked mask = Masked(1, kLong).sized(TermKind::step, 1024);  // keys 1023, 2047, 3071, 4095
  expect(mask.tiles(0) == std::vector<int64_t>{15, 31, 47, 63}, "one row, steps of 1,024");
  expect(Masked(1, kLong).sized(TermKind::step, 1).tiles(0) == range(0, 64), "steps of one key");
}

void every(int64_t cases) {
  random_masks(cases);
  chunks_visit_themselves_alone();
  padding_is_not_visited();
  what_lies_between_first_keys_and_window_is_not_visited();
  wide_steps_leave_tiles_out();
}

}  // namespace
}  // namespace polyattn::testing

int main() {
  polyattn::testing::every(300);
  std::printf("mask: %d failures\n", polyattn::testing::failures);
  return polyattn::testing::failures == 0 ? 0 : 1;
}

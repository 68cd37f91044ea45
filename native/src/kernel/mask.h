// Which of a tile's keys which rows may attend: classes of whole tiles first, 64-bit words second.
#pragma once

#include "kernel/elements.h"

namespace polyattn::POLYATTN_NAMESPACE {

constexpr int kRows = 64;  // query rows of a strip
constexpr int kTile = 64;  // keys of a tile: one word of mask bits for each row

// One batch entry, or one packed sequence.
struct Sequence {
  int64_t b, q_len, kv_len;
  int64_t q_base, kv_base;  // first row in packed arrays
};

inline Sequence sequence_of(const Arguments& a, int64_t b) {
  const int64_t* const lengths = a.pages.lengths;
  if (!a.cu_q) return {b, a.q_len, lengths ? smaller(lengths[b], a.kv_len) : a.kv_len, 0, 0};
  return {b, a.cu_q[b + 1] - a.cu_q[b], a.cu_kv[b + 1] - a.cu_kv[b], a.cu_q[b], a.cu_kv[b]};
}

// Up to kRows query rows that share keys and values; of one head unless heads are packed as rows.
struct Strip {
  int count;
  int64_t t_low, t_high;  // inclusive
  bool one_head;
  int64_t t[kRows], head[kRows];
};

enum class Cover : uint8_t { empty, mixed, full };

struct Span {
  int64_t low, high;  // [low, high)
  bool empty() const { return low >= high; }
};

POLYATTN_INLINE int64_t clamped(int64_t x, int64_t high) { return x < 0 ? 0 : x > high ? high : x; }
POLYATTN_INLINE uint64_t low_bits(int64_t n) {
  return n <= 0 ? 0 : n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
}

POLYATTN_INLINE int64_t floor_of(int64_t x, int64_t size) { return x / size - (x % size < 0); }

POLYATTN_INLINE int64_t band_shift(const Term& term, const Sequence& q) {
  return term.bottom_right ? q.kv_len - q.q_len : 0;
}

inline Cover cover_of_band(const Term& term, const Sequence& q, const Strip& s, int64_t j0, int64_t j1) {
  const int64_t shift = band_shift(term, q);
  const int64_t least = j0 - (s.t_high + shift), most = j1 - 1 - (s.t_low + shift);
  if (most < term.low || least > term.high) return Cover::empty;
  return least >= term.low && most <= term.high ? Cover::full : Cover::mixed;
}

inline Cover cover_of_chunks(const Term& term, const Sequence& q, const Strip& s, int64_t j0, int64_t j1) {
  const int64_t shift = band_shift(term, q);
  const int64_t first = floor_of(s.t_low + shift, term.size), last = floor_of(s.t_high + shift, term.size);
  const int64_t first_key = j0 / term.size, last_key = (j1 - 1) / term.size;
  if (last_key < first || last < first_key) return Cover::empty;
  return first == last && first_key == last_key ? Cover::full : Cover::mixed;
}

inline Cover cover_of_steps(const Term& term, const Sequence& q, const Strip& s, int64_t j0, int64_t j1) {
  if (term.size == 1) return Cover::full;
  const int64_t shift = band_shift(term, q);
  const int64_t least = j0 - (s.t_high + shift), most = j1 - 1 - (s.t_low + shift);
  return floor_of(least - 1, term.size) == floor_of(most, term.size) ? Cover::empty : Cover::mixed;
}

inline Cover cover_of_segments(const Term& term, const Sequence& q, const Strip& s, int64_t j0, int64_t j1) {
  const int64_t* qs = term.q_ids + q.b * term.q_ids_batch + q.q_base;
  const int64_t* ks = term.kv_ids + q.b * term.kv_ids_batch + q.kv_base;
  int64_t q_low = qs[s.t_low], q_high = q_low, k_low = ks[j0], k_high = k_low;
  for (int64_t t = s.t_low; t <= s.t_high; ++t) {
    q_low = smaller(q_low, qs[t]);
    q_high = larger(q_high, qs[t]);
  }
  for (int64_t j = j0; j < j1; ++j) {
    k_low = smaller(k_low, ks[j]);
    k_high = larger(k_high, ks[j]);
  }
  if (q_low > k_high || k_low > q_high) return Cover::empty;
  return q_low == q_high && k_low == k_high ? Cover::full : Cover::mixed;
}

inline Cover cover_of_blocks(const Term& term, const Sequence& q, const Strip& s, int64_t j0, int64_t j1) {
  if (!s.one_head && term.head != 0) return Cover::mixed;
  const uint8_t* bits = term.bytes + q.b * term.batch + s.head[0] * term.head;
  const int64_t c0 = j0 / term.block_k, c1 = (j1 - 1) / term.block_k;
  bool any = false, all = true;
  for (int64_t r = s.t_low / term.block_q; r <= s.t_high / term.block_q; ++r) {
    for (int64_t c = c0; c <= c1; ++c) {
      const bool set = bits[r * term.row + c * term.column] != 0;
      any |= set;
      all &= set;
    }
  }
  return all ? Cover::full : any ? Cover::mixed : Cover::empty;
}

inline Cover cover_of_term(const Term& term, const Sequence& q, const Strip& s, int64_t j0, int64_t j1) {
  switch (term.kind) {
    case TermKind::everything:
      return Cover::full;
    case TermKind::band:
      return cover_of_band(term, q, s, j0, j1);
    case TermKind::kv_limit: {
      const int64_t limit = term.lengths[q.b];
      return j0 >= limit ? Cover::empty : j1 <= limit ? Cover::full : Cover::mixed;
    }
    case TermKind::q_limit: {
      const int64_t limit = term.lengths[q.b];
      return s.t_low >= limit ? Cover::empty : s.t_high < limit ? Cover::full : Cover::mixed;
    }
    case TermKind::kv_start: {
      const int64_t start = term.lengths[q.b];
      return j1 <= start ? Cover::empty : j0 >= start ? Cover::full : Cover::mixed;
    }
    case TermKind::q_start: {
      const int64_t start = term.lengths[q.b];
      return s.t_high < start ? Cover::empty : s.t_low >= start ? Cover::full : Cover::mixed;
    }
    case TermKind::chunk:
      return cover_of_chunks(term, q, s, j0, j1);
    case TermKind::first_keys:
      return j0 >= term.size ? Cover::empty : j1 <= term.size ? Cover::full : Cover::mixed;
    case TermKind::step:
      return cover_of_steps(term, q, s, j0, j1);
    case TermKind::segments:
      return cover_of_segments(term, q, s, j0, j1);
    case TermKind::blocks:
      return cover_of_blocks(term, q, s, j0, j1);
    default:
      return Cover::mixed;
  }
}

// Keys j0 to j1 - 1. "mixed" may still turn out to be either of the others.
inline Cover cover(const Arguments& a, const Sequence& q, const Strip& s, int64_t j0, int64_t j1) {
  if (a.terms == 0) return Cover::full;
  Cover stack[kMaxDepth];
  int depth = 0;
  for (int i = 0; i < a.terms; ++i) {
    const Term& term = a.term[i];
    if (term.kind == TermKind::both || term.kind == TermKind::either) {
      const Cover y = stack[--depth], x = stack[depth - 1];
      const bool both = term.kind == TermKind::both;
      const Cover wins = both ? Cover::empty : Cover::full, yields = both ? Cover::full : Cover::empty;
      stack[depth - 1] = x == wins || y == wins ? wins : x == yields ? y : y == yields ? x : Cover::mixed;
    } else if (term.kind == TermKind::complement) {
      Cover& x = stack[depth - 1];
      x = x == Cover::empty ? Cover::full : x == Cover::full ? Cover::empty : Cover::mixed;
    } else {
      stack[depth++] = cover_of_term(term, q, s, j0, j1);
    }
  }
  return stack[0];
}

// All keys that any of the rows can see lie within.
inline Span span(const Arguments& a, const Sequence& q, int64_t t_low, int64_t t_high) {
  const Span whole{0, q.kv_len};
  if (a.terms == 0) return whole;
  Span stack[kMaxDepth];
  int depth = 0;
  for (int i = 0; i < a.terms; ++i) {
    const Term& term = a.term[i];
    switch (term.kind) {
      case TermKind::both: {
        const Span y = stack[--depth], x = stack[depth - 1];
        stack[depth - 1] = {larger(x.low, y.low), smaller(x.high, y.high)};
        break;
      }
      case TermKind::either: {
        const Span y = stack[--depth], x = stack[depth - 1];
        stack[depth - 1] = x.empty()   ? y
                           : y.empty() ? x
                                       : Span{smaller(x.low, y.low), larger(x.high, y.high)};
        break;
      }
      case TermKind::band: {
        const int64_t shift = band_shift(term, q);
        stack[depth++] = {clamped(t_low + shift + term.low, q.kv_len),
                          clamped(t_high + shift + term.high + 1, q.kv_len)};
        break;
      }
      case TermKind::kv_limit:
        stack[depth++] = {0, clamped(term.lengths[q.b], q.kv_len)};
        break;
      case TermKind::q_limit:
        stack[depth++] = t_low >= term.lengths[q.b] ? Span{0, 0} : whole;
        break;
      case TermKind::kv_start:
        stack[depth++] = {clamped(term.lengths[q.b], q.kv_len), q.kv_len};
        break;
      case TermKind::q_start:
        stack[depth++] = t_high < term.lengths[q.b] ? Span{0, 0} : whole;
        break;
      case TermKind::chunk: {
        const int64_t shift = band_shift(term, q);
        stack[depth++] = {clamped(floor_of(t_low + shift, term.size) * term.size, q.kv_len),
                          clamped((floor_of(t_high + shift, term.size) + 1) * term.size, q.kv_len)};
        break;
      }
      case TermKind::first_keys:
        stack[depth++] = {0, clamped(term.size, q.kv_len)};
        break;
      case TermKind::complement:
        stack[depth - 1] = whole;
        break;
      default:
        stack[depth++] = whole;
    }
  }
  return stack[0];
}

template <class S>
inline void words_of_term(const Term& term, const Sequence& q, const Strip& s, int64_t j0, int n,
                          uint64_t* out) {
  const uint64_t all = low_bits(n);
  switch (term.kind) {
    case TermKind::band: {
      const int64_t shift = band_shift(term, q) - j0;
      for (int r = 0; r < s.count; ++r) {
        const int64_t first = s.t[r] + shift + term.low, last = s.t[r] + shift + term.high;
        out[r] = low_bits(last + 1) & ~low_bits(first) & all;
      }
      return;
    }
    case TermKind::kv_limit: {
      const uint64_t word = low_bits(clamped(term.lengths[q.b], q.kv_len) - j0) & all;
      for (int r = 0; r < s.count; ++r) out[r] = word;
      return;
    }
    case TermKind::q_limit:
      for (int r = 0; r < s.count; ++r) out[r] = s.t[r] < term.lengths[q.b] ? all : 0;
      return;
    case TermKind::kv_start: {
      const uint64_t word = ~low_bits(clamped(term.lengths[q.b], q.kv_len) - j0) & all;
      for (int r = 0; r < s.count; ++r) out[r] = word;
      return;
    }
    case TermKind::q_start:
      for (int r = 0; r < s.count; ++r) out[r] = s.t[r] >= term.lengths[q.b] ? all : 0;
      return;
    case TermKind::chunk: {
      const int64_t shift = band_shift(term, q);
      int64_t begin = 0;
      for (int r = 0; r < s.count; ++r) {
        const int64_t own = s.t[r] + shift;
        if (r > 0 && own >= begin && own < begin + term.size) {
          out[r] = out[r - 1];
          continue;
        }
        begin = floor_of(own, term.size) * term.size;
        out[r] = low_bits(begin + term.size - j0) & ~low_bits(begin - j0) & all;
      }
      return;
    }
    case TermKind::first_keys: {
      const uint64_t word = low_bits(term.size - j0) & all;
      for (int r = 0; r < s.count; ++r) out[r] = word;
      return;
    }
    case TermKind::step: {
      const int64_t shift = band_shift(term, q) - j0;
      uint64_t comb = 0;
      for (int64_t i = 0; i < kTile; i += term.size) comb |= uint64_t{1} << i;
      for (int r = 0; r < s.count; ++r) {
        const int64_t own = s.t[r] + shift, first = own - floor_of(own, term.size) * term.size;
        out[r] = first < kTile ? comb << first & all : 0;
      }
      return;
    }
    case TermKind::segments: {
      const int64_t* qs = term.q_ids + q.b * term.q_ids_batch + q.q_base;
      const int64_t* ks = term.kv_ids + q.b * term.kv_ids_batch + q.kv_base + j0;
      for (int r = 0; r < s.count; ++r) {
        out[r] = r > 0 && qs[s.t[r]] == qs[s.t[r - 1]] ? out[r - 1] : S::equal(ks, qs[s.t[r]], n);
      }
      return;
    }
    case TermKind::blocks:
      for (int r = 0; r < s.count; ++r) {
        const int64_t line = s.t[r] / term.block_q;
        if (r > 0 && s.head[r] == s.head[r - 1] && line == s.t[r - 1] / term.block_q) {
          out[r] = out[r - 1];
          continue;
        }
        const uint8_t* bits = term.bytes + q.b * term.batch + s.head[r] * term.head + line * term.row;
        uint64_t word = 0;
        for (int64_t c = j0 / term.block_k; c * term.block_k < j0 + n; ++c) {
          const int64_t from = c * term.block_k - j0;
          if (bits[c * term.column]) word |= low_bits(from + term.block_k) & ~low_bits(from);
        }
        out[r] = word & all;
      }
      return;
    case TermKind::dense:
      for (int r = 0; r < s.count; ++r) {
        const uint8_t* row = term.bytes + q.b * term.batch + s.head[r] * term.head + s.t[r] * term.row;
        if (term.column == 1) {
          out[r] = S::nonzero(row + j0, n);
        } else if (term.column == 0) {
          out[r] = row[0] ? all : 0;
        } else {
          uint64_t word = 0;
          for (int i = 0; i < n; ++i) word |= uint64_t(row[(j0 + i) * term.column] != 0) << i;
          out[r] = word;
        }
      }
      return;
    default:
      for (int r = 0; r < s.count; ++r) out[r] = all;
  }
}

// Bit i of out[r]: row r may attend key j0 + i, for i < n <= 64. Returns the cover, now certain.
template <class S>
inline Cover words(const Arguments& a, const Sequence& q, const Strip& s, int64_t j0, int n, uint64_t* out) {
  uint64_t stack[kMaxDepth][kRows];
  int depth = 0;
  for (int i = 0; i < a.terms; ++i) {
    const Term& term = a.term[i];
    if (term.kind == TermKind::both || term.kind == TermKind::either) {
      --depth;
      for (int r = 0; r < s.count; ++r) {
        const uint64_t x = stack[depth - 1][r], y = stack[depth][r];
        stack[depth - 1][r] = term.kind == TermKind::both ? x & y : x | y;
      }
    } else if (term.kind == TermKind::complement) {
      for (int r = 0; r < s.count; ++r) stack[depth - 1][r] = ~stack[depth - 1][r] & low_bits(n);
    } else {
      words_of_term<S>(term, q, s, j0, n, stack[depth++]);
    }
  }
  uint64_t any = 0, all = low_bits(n);
  for (int r = 0; r < s.count; ++r) {
    out[r] = stack[0][r];
    any |= out[r];
    all &= out[r];
  }
  return any == 0 ? Cover::empty : all == low_bits(n) ? Cover::full : Cover::mixed;
}

}  // namespace polyattn::POLYATTN_NAMESPACE

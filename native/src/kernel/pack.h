// Operands in the order in which the register block reads them.
#pragma once

#include "kernel/elements.h"
#include "kernel/units.h"

namespace polyattn::POLYATTN_NAMESPACE {

template <int kHint = 3, class T>
POLYATTN_INLINE void prefetch_row(const T* p, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 64 / int64_t{sizeof(T)}) __builtin_prefetch(p + i, 0, kHint);
}

// One vector of units from a row of elements; 0 from `valid` elements on.
template <class S, class U, class T>
POLYATTN_INLINE typename S::Vec load_units(const T* p, int64_t valid) {
  constexpr int64_t kWanted = int64_t{S::kLanes} * U::kValues;
  if constexpr (U::kValues == 1) {
    if (valid >= kWanted) return S::load(p);
    return S::load_some(p, int(larger<int64_t>(valid, 0)));
  } else if constexpr (sizeof(T) == 1) {
    return S::unit_codes(p, int(smaller(larger<int64_t>(valid, 0), kWanted)));
  } else {
    if (valid >= kWanted) return S::load(reinterpret_cast<const float*>(p));
    return S::some_units(p, int(larger<int64_t>(valid, 0)));
  }
}

// W rows, all there, as W columns from `out` on: unit u of them goes to out[u * out_row ..].
template <class S, class U, class T>
POLYATTN_INLINE void transpose_rows(const T* const (&source)[S::kLanes], int64_t dim, float* out,
                                    int64_t out_row) {
  constexpr int W = S::kLanes;
  const int64_t units = units_of<U>(dim);
  int64_t u = 0;
  typename S::Vec r[W];
  for (; (u + W) * U::kValues <= dim; u += W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) r[i] = load_units<S, U>(source[i] + u * U::kValues, int64_t{W} * U::kValues);
    S::transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) S::store(out + (u + i) * out_row, r[i]);
  }
  if (u == units) return;
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) r[i] = load_units<S, U>(source[i] + u * U::kValues, dim - u * U::kValues);
  S::transpose(r);
  for (int i = 0; i < W && u + i < units; ++i) S::store(out + (u + i) * out_row, r[i]);
}

// out[unit][column] = row `column` of x: for operands that are summed along their rows.
// `rows` of x exist, `columns` (a multiple of the lanes) are written; those beyond repeat the last.
// `ahead`: elements from a row to the one that is worth fetching now, 0 for none.
template <class S, class U, class T, class Row>
inline void pack_transposed(Row row_of, int64_t rows, int64_t columns, int64_t dim, float* out,
                            int64_t out_row, int64_t ahead) {
  constexpr int W = S::kLanes;
  for (int64_t j = 0; j < columns; j += W) {
    const T* source[W];
    for (int i = 0; i < W; ++i) {
      source[i] = row_of(smaller(j + i, rows - 1));
      if (ahead) prefetch_row<2>(source[i] + ahead, dim);
    }
    transpose_rows<S, U>(source, dim, out + j, out_row);
  }
}

// out[unit of rows][column]: for operands that are summed down their columns. `columns` is a
// multiple of the lanes and at least dim; 0 beyond. Rows beyond `rows` are 0 up to `padded`.
template <class S, class U, class T, class Row>
inline void pack_rows(Row row_of, int64_t rows, int64_t padded, int64_t dim, float* out, int64_t columns,
                      int64_t ahead) {
  constexpr int W = S::kLanes;
  for (int64_t j = 0; j < padded; j += U::kValues) {
    const T* first = j < rows ? row_of(j) : nullptr;
    const T* second = U::kValues > 1 && j + 1 < rows ? row_of(j + 1) : nullptr;
    float* to = out + j / U::kValues * columns;
    if (ahead && first) prefetch_row(first + ahead, dim);
    if (ahead && second) prefetch_row(second + ahead, dim);
    int64_t h = 0;
    if constexpr (U::kValues > 1) {
      for (; first && second && h + 2 * W <= dim; h += 2 * W) {
        typename S::Vec low, high;
        S::interleave_two(first + h, second + h, low, high);
        S::store(to + h, low);
        S::store(to + h + W, high);
      }
    }
    for (; h < columns; h += W) {
      const int64_t valid = dim - h;
      if constexpr (U::kValues == 1) {
        typename S::Vec x = S::zero();
        if (first)
          x = valid >= W ? S::load(first + h) : S::load_some(first + h, int(larger<int64_t>(valid, 0)));
        S::store(to + h, x);
      } else {
        S::store(to + h, S::interleave(first ? first + h : nullptr, second ? second + h : nullptr,
                                       int(larger<int64_t>(smaller<int64_t>(valid, W), 0))));
      }
    }
  }
}

// out[row][unit]: rows as they are, as units.
template <class S, class U, class T>
inline void pack_plain(const T* x, int64_t stride, int64_t rows, int64_t dim, float factor, float* out,
                       int64_t out_row) {
  constexpr int W = S::kLanes;
  const int64_t units = blocks_of(dim, U::kValues);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t u = 0; u < units; u += W) {
      typename S::Vec v = load_units<S, U>(x + i * stride + u * U::kValues, dim - u * U::kValues);
      if constexpr (U::kValues == 1) v = S::mul(v, S::fill(factor));
      S::store(out + i * out_row + u, v);
    }
  }
}

}  // namespace polyattn::POLYATTN_NAMESPACE

// Lines of a trace from rows of statistics, without Python: numbers as text, sketches as base64.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "statistics/statistics.h"

namespace polyattn {

// Appends what Python's "%.9g" writes; the number must be finite.
void append_number(std::string& out, double x);

// Appends an integer.
void append_integer(std::string& out, int64_t x);

// Appends a sketch of polyattn.trace.statistics.sketch_text in its plain form: base64 of little-endian float32.
void append_sketch(std::string& out, const double* buckets);

// Whether a row is written in the plain way: elements, all numbers finite, a sketch float32 holds.
bool is_plain(const double* row);

// Which statistics a line has, in this order: fields by name and place, then samples and sketch.
struct Chosen {
  std::vector<std::pair<std::string, int>> fields;
  bool samples = false, sketch = false;

  bool any() const { return samples || sketch || !fields.empty(); }
};

// Appends the statistics of a plain row, `"n":4,...`; the first kCounts fields are integers.
void append_statistics(std::string& out, const Chosen& chosen, const double* row);

}  // namespace polyattn

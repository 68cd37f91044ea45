// Lines of a trace from rows of statistics, without Python: numbers as text, sketches as base64, and
// which rows are those of an earlier line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "statistics/statistics.h"

namespace polyattn {

// Appends what Python's "%.9g" writes; the number must be finite.
void append_number(std::string& out, double x);

// Appends an integer.
void append_integer(std::string& out, int64_t x);

// Appends a sketch of polyattn.trace.encoding in its plain form: base64 of little-endian float32.
void append_sketch(std::string& out, const double* buckets);

// Whether a row is written in the plain way: elements, all numbers finite, a sketch float32 holds.
bool is_plain(const double* row);

// Which statistics a line has, in this order: fields by name and place, then samples and sketch.
struct Chosen {
  std::vector<std::pair<std::string, int>> fields;
  bool samples = false, sketch = false;

  bool any() const { return samples || sketch || !fields.empty(); }
};

// Appends the statistics of a plain row, `"n":4,...`; the first five fields are counts.
void append_statistics(std::string& out, const Chosen& chosen, const double* row);

// The rows of the latest lines, and which line was the first to have each.
class Earlier {
 public:
  // The seq of an earlier line with the same shape, dtype and numbers, or -1; then `seq` is the
  // first to have them.
  int64_t find(int64_t seq, std::string_view shape, std::string_view dtype, const double* row);

  // The line that has the numbers that line `seq` refers to.
  int64_t first(int64_t seq) const;

 private:
  static constexpr size_t kRemembered = 4096;

  using Entry = std::pair<std::string, int64_t>;
  std::list<Entry> lately_;  // oldest first
  std::unordered_map<std::string_view, std::list<Entry>::iterator> rows_;
  std::list<int64_t> referring_;
  std::unordered_map<int64_t, int64_t> first_;
  std::string key_;
};

}  // namespace polyattn

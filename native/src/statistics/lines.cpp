#include "statistics/lines.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace polyattn {

void append_number(std::string& out, double x) {
  char text[32];
#if defined(__cpp_lib_to_chars) && __cpp_lib_to_chars >= 201611L
  const auto end = std::to_chars(text, text + sizeof text, x, std::chars_format::general, 9);
  out.append(text, static_cast<size_t>(end.ptr - text));
#else
  const int length = std::snprintf(text, sizeof text, "%.9g", x);
  for (int i = 0; i < length; ++i) {  // the point of another locale
    const bool known =
        (text[i] >= '0' && text[i] <= '9') || text[i] == 'e' || text[i] == '-' || text[i] == '+';
    out.push_back(known ? text[i] : '.');
  }
#endif
}

void append_integer(std::string& out, int64_t x) {
  char text[24];
  const auto end = std::to_chars(text, text + sizeof text, x);
  out.append(text, static_cast<size_t>(end.ptr - text));
}

void append_sketch(std::string& out, const double* buckets) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  uint8_t bytes[4 * kBuckets + 2] = {};
  for (int i = 0; i < kBuckets; ++i) {
    const float x = static_cast<float>(buckets[i]);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    for (int b = 0; b < 4; ++b) bytes[4 * i + b] = static_cast<uint8_t>(bits >> (8 * b));
  }
  constexpr int kGroups = (4 * kBuckets + 2) / 3;
  char text[4 * kGroups];
  for (int i = 0; i < kGroups; ++i) {
    const uint32_t group = uint32_t{bytes[3 * i]} << 16 | uint32_t{bytes[3 * i + 1]} << 8 | bytes[3 * i + 2];
    for (int d = 0; d < 4; ++d) text[4 * i + d] = kDigits[group >> (18 - 6 * d) & 63];
  }
  static_assert(4 * kBuckets % 3 == 1);
  text[4 * kGroups - 1] = text[4 * kGroups - 2] = '=';
  out.append(text, sizeof text);
}

bool is_plain(const double* row) {
  double largest = 0;
  for (int i = 0; i < kFields; ++i) {
    if (!std::isfinite(row[i])) return false;
  }
  for (int i = kSketch; i < kFields; ++i) largest = std::fmax(largest, std::fabs(row[i]));
  return row[kCount] > 0 && (largest == 0 || (largest >= kLeastPlain && largest < kMostPlain));
}

void append_statistics(std::string& out, const Chosen& chosen, const double* row) {
  const char* between = "";
  for (const auto& [name, place] : chosen.fields) {
    ((out += between) += '"') += name;
    out += "\":";
    if (place < kCounts) {
      append_integer(out, static_cast<int64_t>(row[place]));
    } else {
      append_number(out, row[place]);
    }
    between = ",";
  }
  if (chosen.samples) {
    out += between;
    out += "\"samples\":[";
    for (int i = 0; i < kSamples; ++i) {
      if (i != 0) out += ',';
      append_number(out, row[kSample + i]);
    }
    out += ']';
    between = ",";
  }
  if (chosen.sketch) {
    out += between;
    out += "\"sketch\":\"";
    append_sketch(out, row + kSketch);
    out += '"';
  }
}

}  // namespace polyattn

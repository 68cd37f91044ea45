// The statistics of tensors against plain loops in long double: every instruction set and type,
// lengths around each boundary, strides, NaN and infinities, and any number of threads.
#include "statistics/statistics.h"

#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "numbers.h"
#include "permitted.h"
#include "polyattn/arguments.h"

namespace {

using namespace polyattn;

int failures = 0;

void fail(const std::string& where, const char* what, double got, double expected) {
  if (++failures <= 20) {
    std::printf("FAILED: %s: %s: got %.17g, expected %.17g\n", where.c_str(), what, got, expected);
  }
}

// All values are given; `near`: what rounding may move the value by.
void expect(const std::string& where, const char* what, double got, double expected, double near) {
  if (got == expected || (std::isnan(got) && std::isnan(expected))) return;
  if (std::fabs(got - expected) <= near) return;
  fail(where, what, got, expected);
}

uint64_t splitmix64(uint64_t z) {
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// The definition: values in the order of the logical tensor.
std::vector<double> oracle(const std::vector<double>& values) {
  std::vector<double> out(kFields, 0.0);
  const double none = std::nan("");
  long double sum = 0, absolute = 0, squares = 0, m2 = 0, sketch[64] = {};
  int64_t finite = 0;
  double low = HUGE_VAL, high = -HUGE_VAL;
  const int64_t count = static_cast<int64_t>(values.size());
  for (int64_t i = 0; i < count; ++i) {
    const double x = values[static_cast<size_t>(i)];
    out[kNan] += std::isnan(x);
    out[kPlusInf] += x == HUGE_VAL;
    out[kMinusInf] += x == -HUGE_VAL;
    out[kZero] += x == 0;
    if (!std::isfinite(x)) continue;
    ++finite;
    low = std::fmin(low, x);
    high = std::fmax(high, x);
    sum += x;
    absolute += std::fabs(x);
    squares += static_cast<long double>(x) * x;
    const bool negative = splitmix64(static_cast<uint64_t>(i / 64)) >> (i % 64) & 1;
    sketch[i % 64] += negative ? -x : x;
  }
  const long double mean = finite == 0 ? 0 : sum / finite;
  for (const double x : values) {
    if (std::isfinite(x)) m2 += (x - mean) * (x - mean);
  }
  out[kCount] = static_cast<double>(count);
  out[kMin] = finite == 0 ? none : low;
  out[kMax] = finite == 0 ? none : high;
  out[kMean] = finite == 0 ? none : static_cast<double>(mean);
  const auto clipped = [](long double x) {
    return static_cast<double>(std::fmin(std::fmax(x, -static_cast<long double>(DBL_MAX)), DBL_MAX));
  };
  out[kSum] = finite == 0 ? none : clipped(sum);
  out[kL1] = finite == 0 ? none : clipped(absolute);
  out[kAbsMean] = finite == 0 ? none : clipped(absolute / finite);
  out[kStd] = finite == 0 ? none : clipped(std::sqrt(m2 / finite));
  out[kL2] = finite == 0 ? none : clipped(std::sqrt(squares));
  for (int64_t i = 0; i < kSamples; ++i) {
    out[static_cast<size_t>(kSample + i)] =
        count == 0 ? none : values[static_cast<size_t>(i * (count - 1) / 7)];
  }
  for (int64_t i = 0; i < 64; ++i) out[static_cast<size_t>(kSketch + i)] = clipped(sketch[i]);
  return out;
}

void compare(const std::string& where, const double* got, const std::vector<double>& expected,
             double relative) {
  static const char* const names[] = {"count", "nan", "+inf", "-inf", "zero", "min", "max"};
  for (int i = 0; i <= kMax; ++i) expect(where, names[i], got[i], expected[static_cast<size_t>(i)], 0);
  const double size = std::isnan(expected[kAbsMean]) ? 0 : expected[kAbsMean];
  expect(where, "sum", got[kSum], expected[kSum], relative * expected[kL1]);
  expect(where, "mean", got[kMean], expected[kMean], relative * size);
  expect(where, "std", got[kStd], expected[kStd], 2 * relative * expected[kStd]);
  expect(where, "mean size", got[kAbsMean], expected[kAbsMean], relative * size);
  expect(where, "l1", got[kL1], expected[kL1], relative * expected[kL1]);
  expect(where, "l2", got[kL2], expected[kL2], relative * expected[kL2]);
  for (int i = kSample; i < kSketch; ++i) {
    expect(where, "sample", got[i], expected[static_cast<size_t>(i)], 0);
  }
  const double near = std::isnan(expected[kL2]) ? 0 : relative * expected[kL2];
  for (int i = kSketch; i < kFields; ++i) {
    expect(where, "sketch", got[i], expected[static_cast<size_t>(i)], near);
  }
}

struct Stored {
  std::vector<unsigned char> bytes;
  std::vector<double> values;  // as stored, one for each place
};

template <class T>
void put(Stored& made, T x, double value) {
  const size_t at = made.bytes.size();
  made.bytes.resize(at + sizeof x);
  std::memcpy(made.bytes.data() + at, &x, sizeof x);
  made.values.push_back(value);
}

// Random values of one type; `odd`: one in so many is NaN or infinite where the type has these.
Stored random_values(Element element, int64_t count, double mean, double spread, int odd,
                     std::mt19937_64& random) {
  Stored made;
  std::normal_distribution<double> normal(mean, spread);
  std::uniform_int_distribution<int> integer(-100, 100);
  for (int64_t i = 0; i < count; ++i) {
    double x = normal(random);
    if (random() % 16 == 0) x = 0;
    if (odd != 0 && random() % static_cast<uint64_t>(odd) == 0) {
      const double odds[] = {std::nan(""), HUGE_VAL, -HUGE_VAL};
      x = odds[random() % 3];
    }
    const int n = integer(random);
    switch (element) {
      case Element::f32:
        put(made, static_cast<float>(x), static_cast<float>(x));
        break;
      case Element::bf16:
      case Element::f16: {
        const DType dtype = element == Element::bf16 ? DType::bf16 : DType::f16;
        uint16_t bits = 0;
        testing::put(dtype, &bits, 0, x);
        const double stored = testing::get(dtype, &bits, 0);
        put(made, bits, stored);
        break;
      }
      case Element::f64:
        put(made, x, x);
        break;
      case Element::i8:
        put(made, static_cast<int8_t>(n), n);
        break;
      case Element::u8:
        put(made, static_cast<uint8_t>(n + 100), n + 100);
        break;
      case Element::i16:
        put(made, static_cast<int16_t>(n * 100), n * 100);
        break;
      case Element::i32:
        put(made, int32_t{n} * 10000000, n * 1e7);
        break;
      case Element::i64:
        put(made, int64_t{n} * 1000000000000, n * 1e12);
        break;
    }
  }
  return made;
}

Tensor line(const Stored& stored, Element element) {
  Tensor t;
  t.data = stored.bytes.data();
  t.element = element;
  t.dims = 1;
  t.sizes[0] = static_cast<int64_t>(stored.values.size());
  t.strides[0] = 1;
  return t;
}

double relative_of(Element element) {
  const bool in_float64 = element == Element::f64 || element == Element::i32 || element == Element::i64;
  return in_float64 ? 1e-13 : 2e-6;
}

void lengths(const Kernels& kernels) {
  std::mt19937_64 random(1);
  const int64_t all[] = {0, 1, 2, 7, 63, 64, 65, 200, 2047, 2048, 8191, 8192, 8193, 20000, 70000};
  for (int e = 0; e < kElements; ++e) {
    const Element element = static_cast<Element>(e);
    for (const int64_t count : all) {
      for (const int odd : {0, 3, 5000}) {
        const Stored stored = random_values(element, count, 0.5, 3, odd, random);
        const std::string where = std::string(kernels.name) + " type " + std::to_string(e) + " of " +
                                  std::to_string(count) + " odd " + std::to_string(odd);
        double got[kFields];
        statistics(kernels, 1, line(stored, element), got);
        compare(where, got, oracle(stored.values), relative_of(element));
      }
    }
  }
}

void ranges(const Kernels& kernels) {
  std::mt19937_64 random(2);
  struct Range {
    double mean, spread;
  };
  const Range all[] = {{1e6, 1},       {-300, 0.01}, {0, 1e30}, {0, 1e-25}, {0, 1e-38},
                       {1e-20, 1e-22}, {1e25, 1e20}, {5, 0},    {0.1, 0},   {3e38, 0}};
  for (const Range& range : all) {
    const Stored stored = random_values(Element::f32, 50000, range.mean, range.spread, 0, random);
    double got[kFields];
    statistics(kernels, 1, line(stored, Element::f32), got);
    const std::string where = std::string(kernels.name) + " around " + std::to_string(range.mean);
    compare(where, got, oracle(stored.values), 2e-6);
  }
  // float64 whose squares, and whose sums, float64 does not hold
  for (const double spread : {1e307, 1e170, 1e-170, 1e-300, 5e-324}) {
    const Stored stored = random_values(Element::f64, 20000, 0, spread, 100, random);
    double got[kFields];
    statistics(kernels, 2, line(stored, Element::f64), got);
    const std::string where = std::string(kernels.name) + " of spread " + std::to_string(std::log10(spread));
    compare(where, got, oracle(stored.values), spread < 1e-320 ? 1e-2 : 1e-13);
  }
  // without zeros between: the variance is that of the spread alone
  Stored far;
  std::normal_distribution<float> normal(0, 1);
  for (int i = 0; i < 100000; ++i) {
    const float x = 1e5f + normal(random);
    put(far, x, x);
  }
  double got[kFields];
  statistics(kernels, 1, line(far, Element::f32), got);
  compare(std::string(kernels.name) + " far from 0", got, oracle(far.values), 2e-6);
  Stored constant;
  for (int i = 0; i < 100000; ++i) put(constant, 0.1f, 0.1f);
  statistics(kernels, 1, line(constant, Element::f32), got);
  expect(kernels.name, "deviation in a constant", got[kStd], 0, 0);
}

// A view of a random block: dimensions in another order, steps, and a broadcast.
void views(const Kernels& kernels) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 200; ++round) {
    const Element element = static_cast<Element>(random() % kElements);
    int64_t sizes[4], strides[4], length = 1;
    for (int i = 3; i >= 0; --i) {
      sizes[i] = 1 + static_cast<int64_t>(random() % (i < 2 ? 4 : 90));
      strides[i] = length;
      length *= sizes[i];
    }
    const Stored stored = random_values(element, length, 0, 1, random() % 2 ? 0 : 50, random);
    Tensor t;
    t.data = stored.bytes.data();
    t.element = element;
    t.dims = 4;
    int order[4] = {0, 1, 2, 3};
    for (int i = 3; i > 0; --i) std::swap(order[i], order[random() % static_cast<uint64_t>(i + 1)]);
    for (int i = 0; i < 4; ++i) {
      const int64_t step = 1 + static_cast<int64_t>(random() % 2);
      t.sizes[i] = (sizes[order[i]] + step - 1) / step;
      t.strides[i] = strides[order[i]] * step;
      if (random() % 8 == 0) t.strides[i] = 0;
    }
    std::vector<double> values;
    for (int64_t a = 0; a < t.sizes[0]; ++a)
      for (int64_t b = 0; b < t.sizes[1]; ++b)
        for (int64_t c = 0; c < t.sizes[2]; ++c)
          for (int64_t d = 0; d < t.sizes[3]; ++d)
            values.push_back(stored.values[static_cast<size_t>(a * t.strides[0] + b * t.strides[1] +
                                                               c * t.strides[2] + d * t.strides[3])]);
    double got[kFields];
    statistics(kernels, 2, t, got);
    compare(std::string(kernels.name) + " view " + std::to_string(round), got, oracle(values),
            relative_of(element));
  }
}

void threads(const Kernels& kernels) {
  std::mt19937_64 random(4);
  const Stored stored = random_values(Element::f32, 1000003, 0.1, 1, 100000, random);
  double alone[kFields], together[kFields];
  statistics(kernels, 1, line(stored, Element::f32), alone);
  compare(std::string(kernels.name) + " of a million", alone, oracle(stored.values), 2e-6);
  for (const int count : {2, 3, 7, 64}) {
    statistics(kernels, count, line(stored, Element::f32), together);
    if (std::memcmp(alone, together, sizeof alone) != 0) {
      fail(kernels.name, "other numbers with so many threads", count, 1);
    }
  }
  // A transposed tensor has the numbers, to the bit, of its copy.
  Tensor turned = line(stored, Element::f32);
  turned.dims = 2;
  turned.sizes[0] = turned.strides[1] = 997;
  turned.sizes[1] = 1003;
  turned.strides[0] = 1;
  Stored copied;
  for (size_t i = 0; i < 997; ++i) {
    for (size_t j = 0; j < 1003; ++j) {
      const float x = static_cast<float>(stored.values[j * 997 + i]);
      put(copied, x, x);
    }
  }
  statistics(kernels, 1, line(copied, Element::f32), alone);
  for (const int count : {1, 5}) {
    statistics(kernels, count, turned, together);
    if (std::memcmp(alone, together, sizeof alone) != 0) {
      fail(kernels.name, "other numbers of a transposed tensor with so many threads", count, 1);
    }
  }
}

void complaints() {
  const auto refused = [](const Tensor& t, const char* what) {
    if (check(t) == nullptr) fail("check", what, 0, 1);
  };
  const float one = 1;
  Tensor good;
  good.data = &one;
  if (check(good) != nullptr) fail("check", "a scalar", 1, 0);
  Tensor t = good;
  t.data = nullptr;
  refused(t, "no data");
  t.dims = 1;
  if (check(t) != nullptr) fail("check", "no data and no elements", 1, 0);
  t = good;
  t.element = static_cast<Element>(kElements);
  refused(t, "an unknown type");
  t = good;
  t.dims = kMaxDims + 1;
  refused(t, "too many dimensions");
  t = good;
  t.dims = 2;
  t.sizes[0] = -1;
  t.sizes[1] = 1;
  refused(t, "a negative size");
  t.sizes[0] = t.sizes[1] = int64_t{1} << 40;
  refused(t, "too many elements");
  t.sizes[0] = t.sizes[1] = 4;
  t.strides[0] = INT64_MIN;
  refused(t, "a stride out of reach");
}

}  // namespace

int main() {
  for (const Kernels* set : testing::permitted()) {
    lengths(*set);
    ranges(*set);
    views(*set);
    threads(*set);
  }
  complaints();
  std::printf("statistics: %d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

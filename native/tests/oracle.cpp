// Tolerances follow the roundings that a right kernel may make; u is float32's 2**-24.
//
// - A score is a sum of H products in float32. Its error is at most H * u * sum |q k| and behaves
//   like a random walk, so sqrt(H) times a factor of 2 is allowed. Scaling, soft cap and bias each
//   round what they make.
// - An error e of the scores is a relative error of about 2 e of each probability (its own and the
//   normaliser's). Scores so large that e is near 1 only bound the output by its values' range.
// - bfloat16 kernels may round probabilities (and the scores' gradients) to bfloat16 before the
//   second product: 2**-8. Their exponentials need no more than that either: 2**-13.
// - An exponential that would underflow may be 2**-126 instead of 0, and sums below that may be 0.
// - Sums over keys or queries: 2 sqrt(count) * u of the sum of magnitudes, as for scores.
// - The result is rounded once to its type.
// - Keys that are codes of int8, with queries that are not float32: a query is rounded to 16 bits of its
//   largest element, and probabilities (with their scales) to 16 bits of the largest that meets 64 keys.
//   Values that many rows of bfloat16 share are rounded to it.
#include "oracle.h"

#include <algorithm>
#include <cmath>

#include "numbers.h"

namespace polyattn::testing {
namespace {

constexpr double kU = 0x1p-24;
constexpr double kTiny = 0x1p-125;

double walk(int64_t count) { return kU * (2 * std::sqrt(static_cast<double>(count)) + 8); }

// Rounding of an operand that the second product may take in low precision.
double operand(DType dtype) { return dtype == DType::bf16 ? 0x1p-8 : 4 * kU; }

// Of the exponential in the backward pass.
double exponential(DType dtype) { return dtype == DType::bf16 ? 0x1p-13 : 0; }

// Of numbers of 16 bits, of the largest: half a step, and what the products with it round.
constexpr double kPlane = 0.5 / (127 * 256) + kU;

double stored(DType dtype, double value) { return rounding(dtype) * std::fabs(value) + underflow(dtype); }

bool term_visible(const Term& term, const Sequence& s, int64_t n, int64_t t, int64_t j) {
  switch (term.kind) {
    case TermKind::band: {
      const int64_t distance = j - t - (term.bottom_right ? s.kv_len - s.q_len : 0);
      return term.low <= distance && distance <= term.high;
    }
    case TermKind::kv_limit:
      return j < term.lengths[s.b];
    case TermKind::q_limit:
      return t < term.lengths[s.b];
    case TermKind::kv_start:
      return j >= term.lengths[s.b];
    case TermKind::q_start:
      return t >= term.lengths[s.b];
    case TermKind::chunk: {  // of the key, whether the query stands in it
      const int64_t own = t + (term.bottom_right ? s.kv_len - s.q_len : 0), begin = j / term.size * term.size;
      return begin <= own && own < begin + term.size;
    }
    case TermKind::first_keys:
      return j < term.size;
    case TermKind::step:
      return (j - t - (term.bottom_right ? s.kv_len - s.q_len : 0)) % term.size == 0;
    case TermKind::segments:
      return term.q_ids[s.place * term.q_ids_batch + s.q0 + t] ==
             term.kv_ids[s.place * term.kv_ids_batch + s.k0 + j];
    case TermKind::blocks:
      return term.bytes[s.b * term.batch + n * term.head + t / term.block_q * term.row +
                        j / term.block_k * term.column] != 0;
    case TermKind::dense:
      return term.bytes[s.b * term.batch + n * term.head + t * term.row + j * term.column] != 0;
    default:
      return true;
  }
}

// One query's scores against all keys.
struct Row {
  std::vector<double> score, slope, weight, errors;  // slope: d score / d (q . k)
  std::vector<char> seen;
  double lse = -INFINITY, error = 0;  // error: of any score whose weight is not 0
};

struct Loaded {
  std::vector<double> values;
  int64_t width;
  const double* row(int64_t index) const { return values.data() + index * width; }
};

DType stored_type(const Arguments& a) {
  if (a.quantised.codes == Codes::none) return a.dtype;
  return a.quantised.codes == Codes::int8 ? kInt8 : kF8;
}

// Codes whose products may be of bytes.
bool by_bytes(const Arguments& a) { return a.quantised.codes == Codes::int8 && a.dtype != DType::f32; }

double scale_of(const Arguments& a, const Scales& scales, const Sequence& s, int64_t kv_head, int64_t j) {
  if (a.quantised.codes == Codes::none) return 1;
  return scales.data[s.b * scales.batch + kv_head * scales.head + j / a.quantised.block];
}

Loaded load_keys(const Arguments& a, const Array& array, const Scales& scales, const Sequence& s,
                 int64_t kv_head, int64_t width) {
  Loaded loaded{std::vector<double>(static_cast<size_t>(s.kv_len * width)), width};
  for (int64_t j = 0; j < s.kv_len; ++j) {
    const int64_t offset = key_offset(a, array, s, kv_head, j);
    if (offset < 0) continue;
    for (int64_t h = 0; h < width; ++h) {
      loaded.values[static_cast<size_t>(j * width + h)] =
          get(stored_type(a), array.data, offset + h) * scale_of(a, scales, s, kv_head, j);
    }
  }
  return loaded;
}

std::vector<double> load_query(const Arguments& a, const Array& array, const Sequence& s, int64_t n,
                               int64_t t, int64_t width) {
  std::vector<double> values(static_cast<size_t>(width));
  const int64_t offset = s.place * array.batch + n * array.head + (s.q0 + t) * array.row;
  for (int64_t h = 0; h < width; ++h) {
    values[static_cast<size_t>(h)] = get(a.dtype, array.data, offset + h);
  }
  return values;
}

double added_bias(const Arguments& a, const Sequence& s, int64_t n, int64_t t, int64_t j) {
  double sum = 0;
  if (a.bias.data != nullptr) {
    sum += get(a.bias.dtype, a.bias.data,
               s.b * a.bias.batch + n * a.bias.head + t * a.bias.row + j * a.bias.column);
  }
  if (a.slopes.data != nullptr) {
    const double slope = a.slopes.data[s.b * a.slopes.batch + n * a.slopes.head];
    sum -= slope * static_cast<double>(std::abs(t + s.kv_len - s.q_len - j));
  }
  return sum;
}

// Adds one visible key's score to the row.
void add_score(const Arguments& a, const double* q, const double* k, double bias, size_t j, Row& row) {
  const double cap = static_cast<double>(a.softcap), scale = static_cast<double>(a.scale);
  double dot = 0, magnitude = 0, keys = 0, largest = 0;
  for (int64_t h = 0; h < a.head_dim; ++h) {
    keys += std::fabs(k[h]);
    largest = std::max(largest, std::fabs(q[h]));
    dot += q[h] * k[h];
    magnitude += std::fabs(q[h] * k[h]);
  }
  double score = scale * dot;
  double error = walk(a.head_dim) * std::fabs(scale) * magnitude + 4 * kU * std::fabs(score);
  if (by_bytes(a)) error += std::fabs(scale) * keys * largest * kPlane;
  row.slope[j] = scale;
  if (cap > 0) {
    const double tanh = std::tanh(score / cap);
    score = cap * tanh;
    error += 16 * kU * cap;
    row.slope[j] *= 1 - tanh * tanh;
  }
  row.score[j] = score + bias;
  // A score of -inf is exact.
  if (std::isfinite(row.score[j])) {
    row.errors[j] = error + 4 * kU * (std::fabs(bias) + std::fabs(row.score[j]));
  }
}

Row softmax_row(const Arguments& a, const Sequence& s, int64_t n, int64_t t, const double* q,
                const Loaded& keys) {
  const size_t count = static_cast<size_t>(s.kv_len);
  Row row{std::vector<double>(count, -INFINITY), std::vector<double>(count), std::vector<double>(count),
          std::vector<double>(count), std::vector<char>(count)};
  double peak = -INFINITY;
  for (size_t j = 0; j < count; ++j) {
    const int64_t key = static_cast<int64_t>(j);
    row.seen[j] = visible(a, s, n, t, key);
    if (!row.seen[j]) continue;
    add_score(a, q, keys.row(key), added_bias(a, s, n, t, key), j, row);
    peak = std::max(peak, row.score[j]);
  }
  const float* sinks = a.sinks == nullptr ? nullptr : a.sinks + n * a.sink_count;
  const int64_t sink_count = a.sinks == nullptr ? 0 : a.sink_count;
  for (int64_t m = 0; m < sink_count; ++m) peak = std::max<double>(peak, sinks[m]);
  if (peak == -INFINITY) return row;
  double sum = 0;
  for (const double score : row.score) sum += std::exp(score - peak);
  for (int64_t m = 0; m < sink_count; ++m) sum += std::exp(sinks[m] - peak);
  row.lse = peak + std::log(sum);
  for (size_t j = 0; j < count; ++j) {
    row.weight[j] = std::exp(row.score[j] - peak) / sum;
    // Below that, float32's exponential is 0 whatever the error.
    if (row.score[j] + row.errors[j] > peak - 110) row.error = std::max(row.error, row.errors[j]);
  }
  row.error += 4 * kU * std::fabs(row.lse);
  return row;
}

// The relative error of a probability, capped: beyond that the scores say nothing.
double weight_error(const Row& row) { return std::min(std::expm1(2 * row.error), 2.0); }

// What rounding probabilities to 16 bits, 64 keys at a time, may change of column h.
double rounded_probabilities(const Arguments& a, const Sequence& s, int64_t kv_head, const Row& row,
                             const Loaded& values, int64_t h) {
  double all = 0;
  for (int64_t from = 0; from < s.kv_len; from += 64) {
    double codes = 0, largest = 0;
    for (int64_t j = from; j < std::min(from + 64, s.kv_len); ++j) {
      const double scale = scale_of(a, a.quantised.v, s, kv_head, j);
      largest = std::max(largest, row.weight[static_cast<size_t>(j)] * std::fabs(scale));
      codes += scale == 0 ? 128 : std::fabs(values.row(j)[h] / scale);
    }
    all += codes * largest * kPlane;
  }
  return all;
}

int64_t places(const Arguments& a) { return a.cu_q != nullptr ? (a.batch > 0) : a.batch; }

}  // namespace

std::vector<Sequence> sequences(const Arguments& a) {
  std::vector<Sequence> all;
  for (int64_t b = 0; b < a.batch; ++b) {
    if (a.cu_q == nullptr) {
      const int64_t* const lengths = a.pages.lengths;
      all.push_back({b, b, 0, a.q_len, 0, lengths != nullptr ? lengths[b] : a.kv_len});
    } else {
      all.push_back({b, 0, a.cu_q[b], a.cu_q[b + 1] - a.cu_q[b], a.cu_kv[b], a.cu_kv[b + 1] - a.cu_kv[b]});
    }
  }
  return all;
}

int64_t key_offset(const Arguments& a, const Array& array, const Sequence& s, int64_t kv_head, int64_t j) {
  if (a.pages.table == nullptr) {
    return s.place * array.batch + kv_head * array.head + (s.k0 + j) * array.row;
  }
  const int64_t page = a.pages.table[s.b * a.pages.row + j / a.pages.page_size];
  if (page < 0 || page >= a.pages.count) return -1;  // beyond the sequence's length
  return page * array.batch + kv_head * array.head + j % a.pages.page_size * array.row;
}

bool visible(const Arguments& a, const Sequence& s, int64_t n, int64_t t, int64_t j) {
  bool stack[kMaxTerms] = {};
  int depth = 0;
  for (int i = 0; i < a.terms; ++i) {
    const TermKind kind = a.term[i].kind;
    if (kind == TermKind::both || kind == TermKind::either) {
      --depth;
      stack[depth - 1] =
          kind == TermKind::both ? stack[depth - 1] && stack[depth] : stack[depth - 1] || stack[depth];
    } else if (kind == TermKind::complement) {
      stack[depth - 1] = !stack[depth - 1];
    } else {
      stack[depth++] = term_visible(a.term[i], s, n, t, j);
    }
  }
  return a.terms == 0 || stack[0];
}

Forward forward(const Arguments& a) {
  const int64_t rows = places(a) * a.q_heads * a.q_len;
  Forward result{Expected(rows * a.value_dim), Expected(rows)};
  for (const Sequence& s : sequences(a)) {
    for (int64_t n = 0; n < a.q_heads; ++n) {
      const int64_t kv_head = n / (a.q_heads / a.kv_heads);
      const Loaded keys = load_keys(a, a.k, a.quantised.k, s, kv_head, a.head_dim);
      const Loaded values = load_keys(a, a.v, a.quantised.v, s, kv_head, a.value_dim);
      for (int64_t t = 0; t < s.q_len; ++t) {
        const auto q = load_query(a, a.q, s, n, t, a.head_dim);
        const Row row = softmax_row(a, s, n, t, q.data(), keys);
        const int64_t index = (s.place * a.q_heads + n) * a.q_len + s.q0 + t;
        result.lse.value[static_cast<size_t>(index)] = row.lse;
        result.lse.tolerance[static_cast<size_t>(index)] = row.error + walk(s.kv_len);
        const bool coded = a.quantised.codes != Codes::none;
        const double error =
            weight_error(row) + (coded ? 2 : 1) * operand(a.dtype) + 16 * kU + walk(s.kv_len);
        for (int64_t h = 0; h < a.value_dim; ++h) {
          double sum = 0, magnitude = 0, largest = 0, rounded = 0;
          for (int64_t j = 0; j < s.kv_len; ++j) {
            if (!row.seen[static_cast<size_t>(j)]) continue;
            const double v = values.row(j)[h], weight = row.weight[static_cast<size_t>(j)];
            sum += weight * v;
            magnitude += weight * std::fabs(v);
            largest = std::max(largest, std::fabs(v));
          }
          if (by_bytes(a)) rounded = rounded_probabilities(a, s, kv_head, row, values, h);
          if (error > 1) magnitude = largest;
          const size_t at = static_cast<size_t>(index * a.value_dim + h);
          result.out.value[at] = sum;
          result.out.tolerance[at] = error * magnitude + rounded + stored(a.dtype, sum);
        }
      }
    }
  }
  return result;
}

std::vector<double> delta(const Arguments& a, const Forward& expected, const std::vector<double>& dlse) {
  std::vector<double> result(dlse.size());
  for (const Sequence& s : sequences(a)) {
    for (int64_t n = 0; n < a.q_heads; ++n) {
      for (int64_t t = 0; t < s.q_len; ++t) {
        const auto dout = load_query(a, a.dout, s, n, t, a.value_dim);
        const size_t at = static_cast<size_t>((s.place * a.q_heads + n) * a.q_len + s.q0 + t);
        const double* out = expected.out.value.data() + static_cast<int64_t>(at) * a.value_dim;
        double sum = -dlse[at];
        for (size_t h = 0; h < dout.size(); ++h) sum += dout[h] * out[h];
        result[at] = sum;
      }
    }
  }
  return result;
}

namespace {

// Adds factor * source to a row of a gradient; its magnitudes and errors to the tolerance.
void accumulate(Expected& gradient, int64_t row, const double* source, int64_t width, double factor,
                double error) {
  for (int64_t h = 0; h < width; ++h) {
    const size_t at = static_cast<size_t>(row * width + h);
    gradient.value[at] += factor * source[h];
    gradient.tolerance[at] += error * std::fabs(source[h]) + kTiny;
  }
}

void finish(Expected& gradient, DType dtype) {
  for (size_t i = 0; i < gradient.value.size(); ++i) {
    gradient.tolerance[i] += stored(dtype, gradient.value[i]);
  }
}

}  // namespace

Backward backward(const Arguments& a, const std::vector<double>& delta) {
  const int64_t rows = places(a) * a.q_heads * a.q_len;
  const int64_t keys_all = places(a) * a.kv_heads * a.kv_len;
  const bool wants_bias = a.dbias != nullptr;
  Backward result{Expected(rows * a.head_dim), Expected(keys_all * a.head_dim),
                  Expected(keys_all * a.value_dim),
                  Expected(wants_bias ? a.batch * a.q_heads * a.q_len * a.kv_len : 0)};
  const double low = operand(a.dtype);
  for (const Sequence& s : sequences(a)) {
    for (int64_t n = 0; n < a.q_heads; ++n) {
      const int64_t kv_head = n / (a.q_heads / a.kv_heads);
      const Loaded keys = load_keys(a, a.k, a.quantised.k, s, kv_head, a.head_dim);
      const Loaded values = load_keys(a, a.v, a.quantised.v, s, kv_head, a.value_dim);
      for (int64_t t = 0; t < s.q_len; ++t) {
        const int64_t index = (s.place * a.q_heads + n) * a.q_len + s.q0 + t;
        const auto q = load_query(a, a.q, s, n, t, a.head_dim);
        const auto dout = load_query(a, a.dout, s, n, t, a.value_dim);
        const Row row = softmax_row(a, s, n, t, q.data(), keys);
        const double wrong = weight_error(row) + 16 * kU + exponential(a.dtype);
        const double sum = delta[static_cast<size_t>(index)];
        for (int64_t j = 0; j < s.kv_len; ++j) {
          const size_t at = static_cast<size_t>(j);
          if (!row.seen[at]) continue;
          const double weight = row.weight[at];
          // From scores without a meaningful difference to lse, any probability may come.
          const double doubt = (row.error > 0.5 ? 1 : weight * wrong) + kTiny;
          double product = 0, magnitude = 0;
          for (int64_t h = 0; h < a.value_dim; ++h) {
            product += dout[static_cast<size_t>(h)] * values.row(j)[h];
            magnitude += std::fabs(dout[static_cast<size_t>(h)] * values.row(j)[h]);
          }
          const double ds = weight * (product - sum);
          const double ds_error = doubt * (std::fabs(product) + std::fabs(sum)) +
                                  weight * (walk(a.value_dim) * magnitude + 2 * kU * std::fabs(sum));
          // The soft cap's derivative 1 - tanh^2 is off by a few u of 1, not of itself.
          const double cap_error = a.softcap > 0 ? 32 * kU * static_cast<double>(a.scale) : 0;
          const double through = ds * row.slope[at];
          const double error = std::fabs(row.slope[at]) * ds_error +
                               std::fabs(cap_error) * (std::fabs(ds) + ds_error) +
                               (low + walk(s.kv_len + s.q_len * a.q_heads)) * std::fabs(through);
          const int64_t key = (s.place * a.kv_heads + kv_head) * a.kv_len + s.k0 + j;
          accumulate(result.dq, index, keys.row(j), a.head_dim, through, error);
          accumulate(result.dk, key, q.data(), a.head_dim, through, error);
          accumulate(result.dv, key, dout.data(), a.value_dim, weight,
                     doubt + weight * (low + walk(s.q_len * a.q_heads)));
          if (wants_bias) {
            const size_t place = static_cast<size_t>(((s.b * a.q_heads + n) * a.q_len + t) * a.kv_len + j);
            result.dbias.value[place] = ds;
            result.dbias.tolerance[place] =
                ds_error + walk(a.batch * a.q_heads * a.q_len * a.kv_len) * std::fabs(ds);
          }
        }
      }
    }
  }
  finish(result.dq, a.dtype);
  finish(result.dk, a.dtype);
  finish(result.dv, a.dtype);
  return result;
}

}  // namespace polyattn::testing

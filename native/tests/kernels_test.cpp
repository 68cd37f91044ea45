// Random calls of every instruction set against the oracle.
//
// Build from: kernels_test.cpp and the libraries polyattn_testing and polyattn_kernels of CMake.
// Run: kernels_test [--seed N] [--cases N] [--isa NAME] [--pass forward|backward]
// A failure prints the command that repeats its one case.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "oracle.h"
#include "permitted.h"
#include "problem.h"

namespace polyattn::testing {
namespace {

struct Options {
  uint64_t seed = 1;
  int64_t cases = 300;
  const char* isa = nullptr;
  bool passes[2] = {true, true};
};

int failures = 0;

struct Case {
  Problem& problem;
  Pass pass;
  uint64_t seed;
  std::vector<char> seen;  // (sequence, head, query, key), rows of the longest lengths

  bool sees(const Sequence& s, int64_t n, int64_t t, int64_t j) const {
    const Arguments& a = problem.a;
    return seen[static_cast<size_t>(((s.b * a.q_heads + n) * a.q_len + t) * a.kv_len + j)];
  }
};

void report(const Case& c, const char* isa, const std::string& what) {
  ++failures;
  std::printf("FAILED %s: %s\n  %s\n", isa, what.c_str(), c.problem.text.c_str());
  std::printf("  repeat: kernels_test --seed %llu --cases 1 --isa %s --pass %s\n",
              static_cast<unsigned long long>(c.seed), isa, c.pass == Pass::forward ? "forward" : "backward");
}

std::string place(const Tensor& tensor, int64_t number) {
  int64_t at[4] = {};
  for (int i = 3; i >= 0; --i) {
    at[i] = number % tensor.sizes[i];
    number /= tensor.sizes[i];
  }
  std::string text = "[";
  for (int i = 0; i < 4; ++i) text += std::to_string(at[i]) + (i < 3 ? ", " : "]");
  return text;
}

void compare(const Case& c, const char* isa, const char* name, const Tensor& tensor, const Expected& expected,
             const char* when) {
  int64_t wrong = 0;
  std::string first;
  tensor.each([&](int64_t index, int64_t number) {
    const double got = tensor.at(index), want = expected.value[static_cast<size_t>(number)];
    const double tolerance = expected.tolerance[static_cast<size_t>(number)];
    if (got == want || std::fabs(got - want) <= tolerance) return;
    if (wrong++ > 0) return;
    char text[160];
    std::snprintf(text, sizeof text, " got %.9g, expected %.9g +- %.3g", got, want, tolerance);
    first = place(tensor, number) + text;
  });
  if (wrong == 0) return;
  report(c, isa,
         std::string(name) + first + " (" + std::to_string(wrong) + " of " + std::to_string(tensor.count()) +
             " wrong" + when + ")");
}

using Snapshot = std::vector<std::vector<uint8_t>>;

Snapshot run(const Case& c, const Kernels& kernels, int threads) {
  Problem& p = c.problem;
  p.reset(c.pass);
  p.a.threads = threads;
  if (c.pass == Pass::forward) {
    // Nothing to write without queries: the binding, like this, does not enter a kernel then.
    if (p.out.count() > 0) kernels.forward(p.a);
  } else {
    kernels.backward(p.a);
  }
  Snapshot bytes;
  for (const Tensor* tensor : p.written(c.pass)) bytes.push_back(tensor->buffer->bytes());
  return bytes;
}

void determinism(const Case& c, const Kernels& kernels, const Snapshot& once) {
  for (const int threads : {1, 2, 3}) {
    if (run(c, kernels, threads) == once) continue;
    report(c, kernels.name,
           "other bits with " + std::to_string(threads) + " threads (was " +
               std::to_string(c.problem.a.threads) + " or the same again)");
  }
}

// The rows of keys, values and queries that anyone's visible score needs, by their place in memory.
struct Needed {
  std::set<int64_t> q, k, v;
};

template <class Visit>
void each_score(const Case& c, const Visit& visit) {
  const Arguments& a = c.problem.a;
  for (const Sequence& s : sequences(a)) {
    for (int64_t n = 0; n < a.q_heads; ++n) {
      for (int64_t t = 0; t < s.q_len; ++t) {
        for (int64_t j = 0; j < s.kv_len; ++j) {
          if (c.sees(s, n, t, j)) visit(s, n, t, j);
        }
      }
    }
  }
}

Needed needed(const Case& c) {
  const Arguments& a = c.problem.a;
  Needed rows;
  each_score(c, [&](const Sequence& s, int64_t n, int64_t t, int64_t j) {
    const int64_t kv_head = n / (a.q_heads / a.kv_heads);
    rows.q.insert(s.place * a.q.batch + n * a.q.head + (s.q0 + t) * a.q.row);
    rows.k.insert(key_offset(a, a.k, s, kv_head, j));
    rows.v.insert(key_offset(a, a.v, s, kv_head, j));
  });
  return rows;
}

// Sets rows to NaN and gives them their values back.
class Poison {
 public:
  explicit Poison(const Tensor& tensor) : tensor_(tensor), kept_(tensor.buffer->bytes()) {}
  ~Poison() {
    if (kept_.empty()) return;
    std::memcpy(static_cast<uint8_t*>(tensor_.array.data) - tensor_.buffer->front(), kept_.data(),
                kept_.size());
  }
  Poison(const Poison&) = delete;

  void row(int64_t offset) {
    for (int64_t h = 0; h < tensor_.sizes[3]; ++h) {
      put(tensor_.dtype, tensor_.array.data, offset + h, NAN);
    }
  }
  void all_but(const std::set<int64_t>& rows) {
    tensor_.each([&](int64_t index, int64_t number) {
      const int64_t h = number % tensor_.sizes[3];
      if (rows.count(index - h) == 0) put(tensor_.dtype, tensor_.array.data, index, NAN);
    });
  }

 private:
  const Tensor& tensor_;
  std::vector<uint8_t> kept_;
};

// NaN in one key (or value) that some query sees must not reach the rows that do not see it.
void spread(const Case& c, const Kernels& kernels, const Snapshot& clean, const Needed& rows, bool values) {
  Problem& p = c.problem;
  const Arguments& a = p.a;
  const Tensor& tensor = values ? p.v : p.k;
  const std::set<int64_t>& offsets = values ? rows.v : rows.k;
  if (offsets.empty()) return;
  Random random(c.seed);
  const int64_t struck =
      *std::next(offsets.begin(), random.between(0, static_cast<int64_t>(offsets.size()) - 1));
  std::set<int64_t> reached;  // rows of queries, numbered as in lse
  each_score(c, [&](const Sequence& s, int64_t n, int64_t t, int64_t j) {
    if (key_offset(a, tensor.array, s, n / (a.q_heads / a.kv_heads), j) != struck) return;
    reached.insert((s.place * a.q_heads + n) * a.q_len + s.q0 + t);
  });
  Poison poison(tensor);
  poison.row(struck);
  run(c, kernels, a.threads);
  int64_t wrong = 0;
  std::string first;
  size_t which = 0;
  for (const Tensor* output : p.written(Pass::forward)) {
    const std::vector<uint8_t>& before = clean[which++];
    const size_t width = static_cast<size_t>(size_of(output->dtype));
    output->each([&](int64_t index, int64_t number) {
      if (reached.count(number / output->sizes[3]) != 0) return;
      const size_t at = static_cast<size_t>(index) * width;
      const uint8_t* now = static_cast<const uint8_t*>(output->array.data) + at;
      if (std::memcmp(now, before.data() + output->buffer->front() + at, width) == 0) return;
      if (wrong++ == 0) first = place(*output, number);
    });
  }
  if (wrong == 0) return;
  report(c, kernels.name,
         std::string("NaN in a ") + (values ? "value" : "key") + " reaches " + std::to_string(wrong) +
             " elements of rows that do not see it: " + first);
}

void check_forward(const Case& c, const Kernels& kernels, const Forward& expected) {
  Problem& p = c.problem;
  const int threads = p.a.threads;
  const Snapshot clean = run(c, kernels, threads);
  compare(c, kernels.name, "out", p.out, expected.out, "");
  if (p.lse.buffer != nullptr) compare(c, kernels.name, "lse", p.lse, expected.lse, "");
  for (const Tensor* tensor : p.written(c.pass)) {
    if (!tensor->surroundings_untouched()) {
      report(c, kernels.name, "bytes around the rows of out or lse were written");
    }
  }
  determinism(c, kernels, clean);
  p.a.threads = threads;
  const Needed rows = needed(c);
  {
    Poison q(p.q), k(p.k), v(p.v);
    q.all_but(rows.q);
    k.all_but(rows.k);
    v.all_but(rows.v);
    if (run(c, kernels, threads) != clean) {
      compare(c, kernels.name, "out", p.out, expected.out, " with NaN in what is masked");
      report(c, kernels.name, "other bits with NaN in what is masked");
    }
  }
  spread(c, kernels, clean, rows, false);
  spread(c, kernels, clean, rows, true);
}

// The gradient of a bias that is shared over dimensions is the sum over them.
Expected shared_bias(const Problem& p, const Expected& whole) {
  const Arguments& a = p.a;
  const int64_t* sizes = p.dbias.sizes;
  Expected sum(p.dbias.count());
  size_t at = 0;
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t n = 0; n < a.q_heads; ++n) {
      for (int64_t t = 0; t < a.q_len; ++t) {
        for (int64_t j = 0; j < a.kv_len; ++j, ++at) {
          const int64_t row = (b % sizes[0] * sizes[1] + n % sizes[1]) * sizes[2] + t % sizes[2];
          const int64_t place = row * sizes[3] + j % sizes[3];
          sum.value[static_cast<size_t>(place)] += whole.value[at];
          sum.tolerance[static_cast<size_t>(place)] += whole.tolerance[at];
        }
      }
    }
  }
  for (size_t i = 0; i < sum.value.size(); ++i) {
    sum.tolerance[i] += rounding(DType::f32) * std::fabs(sum.value[i]) + underflow(DType::f32);
  }
  return sum;
}

void compare_gradients(const Case& c, const Kernels& kernels, const Backward& expected, const char* when) {
  const Problem& p = c.problem;
  compare(c, kernels.name, "dq", p.dq, expected.dq, when);
  compare(c, kernels.name, "dk", p.dk, expected.dk, when);
  compare(c, kernels.name, "dv", p.dv, expected.dv, when);
  if (p.dbias.buffer != nullptr) {
    compare(c, kernels.name, "dbias", p.dbias, shared_bias(p, expected.dbias), when);
  }
}

void check_backward(const Case& c, const Kernels& kernels, const Backward& expected) {
  Problem& p = c.problem;
  const int threads = p.a.threads;
  const Snapshot clean = run(c, kernels, threads);
  compare_gradients(c, kernels, expected, "");
  for (const Tensor* tensor : p.written(c.pass)) {
    if (!tensor->surroundings_untouched()) {
      report(c, kernels.name, "bytes around the rows of a gradient were written");
    }
  }
  determinism(c, kernels, clean);
  p.a.threads = threads;
  const Needed rows = needed(c);
  Poison q(p.q), k(p.k), v(p.v);
  q.all_but(rows.q);
  k.all_but(rows.k);
  v.all_but(rows.v);
  run(c, kernels, threads);
  compare_gradients(c, kernels, expected, " with NaN in what is masked");
}

// What the backward pass is given, rounded once: sums for each query, or the output to make them of.
Backward prepare_backward(Problem& p, uint64_t seed) {
  Forward forward_pass = forward(p.a);
  Random random(seed);
  std::vector<double> dlse(forward_pass.lse.value.size());
  const bool sums = random.chance(0.75);
  if (sums && random.chance(0.5)) {
    for (double& value : dlse) value = random.uniform(-1, 1);
  }
  p.lse.each([&](int64_t index, int64_t number) {
    put(DType::f32, p.lse.array.data, index, forward_pass.lse.value[static_cast<size_t>(number)]);
  });
  if (!sums) {
    p.out.each([&](int64_t index, int64_t number) {
      double& value = forward_pass.out.value[static_cast<size_t>(number)];
      put(p.a.dtype, p.out.array.data, index, value);
      value = get(p.a.dtype, p.out.array.data, index);
    });
    p.a.delta = {};
  }
  const std::vector<double> deltas = delta(p.a, forward_pass, dlse);
  p.delta.each([&](int64_t index, int64_t number) {
    put(DType::f32, p.delta.array.data, index, deltas[static_cast<size_t>(number)]);
  });
  return backward(p.a, deltas);
}

void one_case(uint64_t seed, Pass pass, const Options& options) {
  const auto problem = random_problem(seed, pass == Pass::backward);
  const Arguments& a = problem->a;
  Case c{*problem, pass, seed, {}};
  c.seen.resize(static_cast<size_t>(a.batch * a.q_heads * a.q_len * a.kv_len));
  for (const Sequence& s : sequences(a)) {
    for (int64_t n = 0; n < a.q_heads; ++n) {
      for (int64_t t = 0; t < s.q_len; ++t) {
        for (int64_t j = 0; j < s.kv_len; ++j) {
          c.seen[static_cast<size_t>(((s.b * a.q_heads + n) * a.q_len + t) * a.kv_len + j)] =
              visible(a, s, n, t, j);
        }
      }
    }
  }
  if (const char* complaint = check(a, pass)) {
    return report(c, "check", std::string("refused: ") + complaint);
  }
  const int threads = a.threads;
  const auto each_isa = [&](const auto& body) {
    for (const Kernels* set : permitted()) {
      if (options.isa != nullptr && std::strcmp(options.isa, set->name) != 0) continue;
      problem->a.threads = threads;
      body(*set);
    }
  };
  if (pass == Pass::forward) {
    const Forward expected = forward(a);
    each_isa([&](const Kernels& kernels) { check_forward(c, kernels, expected); });
  } else {
    const Backward expected = prepare_backward(*problem, seed);
    each_isa([&](const Kernels& kernels) { check_backward(c, kernels, expected); });
  }
}

}  // namespace
}  // namespace polyattn::testing

int main(int count, char** words) {
  using namespace polyattn::testing;
  Options options;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = words[i], value = words[i + 1];
    if (name == "--seed") options.seed = std::strtoull(value.c_str(), nullptr, 10);
    if (name == "--cases") options.cases = std::strtoll(value.c_str(), nullptr, 10);
    if (name == "--isa") options.isa = words[i + 1];
    if (name == "--pass") {
      options.passes[0] = value == "forward";
      options.passes[1] = value == "backward";
    }
  }
  if (options.isa != nullptr && polyattn::find(options.isa) == nullptr) {
    std::printf("this processor or this build has no %s\n", options.isa);
    return 2;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  for (int64_t i = 0; i < options.cases && failures < 20; ++i) {
    const uint64_t seed = options.seed + static_cast<uint64_t>(i);
    if (options.passes[0]) one_case(seed, polyattn::Pass::forward, options);
    if (options.passes[1]) one_case(seed, polyattn::Pass::backward, options);
  }
  std::printf("%lld cases, %d failures\n", static_cast<long long>(options.cases), failures);
  return failures == 0 ? 0 : 1;
}

// Taps of JAX programs: what a call tells is the row of its tensor, a call that is none is refused, and
// a queue that is full, closed or gone holds nobody up for ever.
//
// Build from: taps_test.cpp, ../src/taps.cpp and the kernels.
#include "taps.h"

#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "polyattn/arguments.h"
#include "statistics/statistics.h"

namespace {

using namespace polyattn;

int failures = 0;

void expect(bool right, const char* what) {
  if (right) return;
  std::printf("taps: %s\n", what);
  ++failures;
}

std::string complaint;

xla::Error* create_error(xla::ErrorArguments* arguments) {
  complaint = arguments->message;
  return reinterpret_cast<xla::Error*>(&complaint);
}

constexpr int64_t kSession = 42;

// A call with a token and a tensor of 2 x 3 numbers.
struct Call {
  float values[6] = {1, -2, 0, 4, 5, -6};
  int64_t dims[2] = {2, 3};
  int64_t tap[6] = {7, 3, 0, 1, static_cast<int64_t>(Element::f32), kSession};
  xla::Api api{sizeof api, nullptr, {sizeof(xla::Version), nullptr, 0, 3}, nullptr, create_error};
  xla::Buffer token{sizeof token, nullptr, 17, nullptr, 0, nullptr};
  xla::Buffer x{sizeof x, nullptr, 11, values, 2, dims};
  void* arguments[2] = {&token, &x};
  int kinds[2] = {1, 1};
  xla::Numbers numbers{5, 6, tap};
  xla::Span name{"tap", 3};
  xla::Span* names[1] = {&name};
  void* attributes[1] = {&numbers};
  int attribute_kinds[1] = {xla::kArray};
  xla::Frame frame{};

  Call() {
    frame.struct_size = sizeof frame;
    frame.api = &api;
    frame.stage = 3;
    frame.arguments = {sizeof frame.arguments, nullptr, 2, kinds, arguments};
    frame.attributes = {sizeof frame.attributes, nullptr, 1, attribute_kinds, names, attributes};
  }

  bool refused(const char* text) {
    complaint.clear();
    return xla::tap(&frame) != nullptr && complaint.find(text) != std::string::npos;
  }
};

void what_a_call_tells() {
  auto taps = std::make_shared<Taps>(4);
  hear(7, taps);
  Call call;
  expect(xla::tap(&call.frame) == nullptr, "a call was refused");
  std::deque<Told> found;
  expect(taps->take(0, found) && found.size() == 1 && taps->told() == 1, "a call told nothing");
  Tensor tensor;
  tensor.data = call.values;
  tensor.dims = 1, tensor.sizes[0] = 6, tensor.strides[0] = 1;
  double row[kFields];
  statistics(*available()[0], 1, tensor, row);
  expect(found[0].place == 3 && found[0].rank == -1, "the wrong place");
  expect(found[0].numbers == std::string(reinterpret_cast<char*>(row), sizeof row), "other numbers");
  found.clear();
  hear(7, nullptr);
  expect(xla::tap(&call.frame) == nullptr && !taps->take(0, found), "a trace that has ended was told");
}

void what_is_no_call() {
  const auto taps = std::make_shared<Taps>(4);
  hear(7, taps);
  const struct {
    int place;
    int64_t value;
    const char* text;
  } spoilt[] = {
      {2, 99, "instruction set"}, {2, -1, "instruction set"}, {4, 99, ""}, {5, 1, "another process"}};
  for (const auto& one : spoilt) {
    Call call;
    call.tap[one.place] = one.value;
    expect(call.refused(one.text), one.text);
  }
  Call call;
  call.name = {"other", 5};
  expect(call.refused("six numbers"), "no attribute");
  call.name = {"tap", 3};
  call.numbers.size = 5;
  expect(call.refused("six numbers"), "too few numbers");
  call.numbers.size = 6;
  call.frame.arguments.size = 0;
  expect(call.refused("without a tensor"), "no tensor");
  expect(taps->told() == 0, "what was refused was told");
  hear(7, nullptr);
}

void metadata() {
  Call call;
  xla::Metadata found{sizeof found, {sizeof(xla::Version), nullptr, -1, -1}, 9};
  xla::MetadataExtension asks{{sizeof asks, 1, nullptr}, &found};
  call.frame.extensions = &asks.base;
  expect(xla::tap(&call.frame) == nullptr && found.version.minor == 3 && found.traits == 0, "metadata");
}

void a_full_queue() {
  Taps taps(2);
  std::thread program([&] {
    for (int i = 0; i < 100; ++i) taps.tell({i, -1, "n"});
  });
  int64_t next = 0;
  while (next < 100) {
    std::deque<Told> found;
    taps.take(1, found);
    expect(found.size() <= 2, "more wait than may");
    for (const Told& one : found) expect(one.place == next++, "another order");
  }
  program.join();
  taps.tell({0, -1, ""});
  taps.tell({1, -1, ""});
  std::thread waits([&] { taps.tell({2, -1, ""}); });
  taps.close();
  waits.join();  // it gave up
  std::deque<Told> found;
  expect(taps.take(0, found) && found.size() == 2, "what waited at the end was lost");
  expect(!taps.take(60, found), "a closed queue is waited for");
}

}  // namespace

int main() {
  begin_session(kSession);
  what_a_call_tells();
  what_is_no_call();
  metadata();
  a_full_queue();
  std::printf(failures == 0 ? "taps: right\n" : "taps: %d wrong\n", failures);
  return failures == 0 ? 0 : 1;
}

// The Python module polyattn._native: what there is beside attention itself (attention.cpp) and the
// classes of a trace (trace_lines.cpp, trace_record.cpp).
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "door.h"
#include "module_parts.h"
#include "polyattn/arguments.h"
#include "reader.h"
#include "statistics/statistics.h"
#include "threads.h"
#include "trace_protocol.h"
#include "unlocked.h"
#include "xla.h"

namespace nb = nanobind;

namespace polyattn {
namespace {

Tensor read_tensor(int element, int64_t data, nb::handle sizes, nb::handle strides) {
  Tensor tensor;
  tensor.data = reinterpret_cast<const void*>(static_cast<intptr_t>(data));
  tensor.element = static_cast<Element>(element);
  const Py_ssize_t dims = PyTuple_Check(sizes.ptr()) ? NB_TUPLE_GET_SIZE(sizes.ptr()) : 0;
  if (dims > kMaxDims) refuse("sizes: expected 0 to 64 of them");
  tensor.dims = static_cast<int32_t>(dims);
  Reader size(sizes, "sizes", "of integers", tensor.dims);
  Reader stride(strides, "strides", "as long as sizes", tensor.dims);
  for (int i = 0; i < tensor.dims; ++i) {
    tensor.sizes[i] = size.integer();
    tensor.strides[i] = stride.integer();
  }
  return tensor;
}

void trace_statistics(int isa, int threads, int element, int64_t data, nb::handle sizes, nb::handle strides,
                      int64_t out) {
  const Tensor tensor = read_tensor(element, data, sizes, strides);
  if (const char* complaint = check(tensor)) refuse(complaint);
  double* const row = reinterpret_cast<double*>(static_cast<intptr_t>(out));
  if (row == nullptr) refuse("out: got a null pointer");
  if (!summarize_unlocked(isa, threads, tensor, row)) throw std::bad_alloc();  // MemoryError
}

struct Spin {
  const Kernels* kernels;
  bool bf16;
  int64_t iterations;
  std::vector<double> operations;
};

void spin_one(void* context, int thread) {
  Spin& spin = *static_cast<Spin*>(context);
  spin.operations[static_cast<size_t>(thread)] = spin.kernels->spin(spin.bf16, spin.iterations);
}

std::pair<double, double> spin(int isa, bool bf16, int64_t iterations, int threads) {
  if (threads < 1 || threads > 1024) refuse("threads must be 1 to 1024");
  if (iterations < 1) refuse("iterations must be 1 or more");
  Spin work{&chosen(isa), bf16, iterations, std::vector<double>(static_cast<size_t>(threads))};
  const Unlocked unlocked;
  // The first region only wakes the workers and raises the clock.
  Spin warm_up{work.kernels, bf16, iterations / 16 + 1, work.operations};
  parallel(threads, spin_one, &warm_up);
  const auto start = std::chrono::steady_clock::now();
  parallel(threads, spin_one, &work);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  double operations = 0;
  for (const double count : work.operations) operations += count;
  return {operations, seconds.count()};
}

nb::list names(const Kernels* const* sets) {
  nb::list list;
  for (; *sets != nullptr; ++sets) list.append((*sets)->name);
  return list;
}

std::string compiler() {
#if defined(__apple_build_version__)
  const char* const name = "AppleClang";
#elif defined(__clang__)
  const char* const name = "Clang";
#else
  const char* const name = "GNU";
#endif
#if defined(__clang__)
  const int version[] = {__clang_major__, __clang_minor__, __clang_patchlevel__};
#else
  const int version[] = {__GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__};
#endif
  return std::string(name) + " " + std::to_string(version[0]) + "." + std::to_string(version[1]) + "." +
         std::to_string(version[2]);
}

nb::dict build() {
  nb::dict facts;
  facts["compiler"] = compiler();
  facts["compiled"] = names(compiled());
  facts["version"] = POLYATTN_VERSION;
  facts["statistics"] = kLayout;
  facts["statistics_width"] = static_cast<int>(kFields);
  facts["trace_protocol"] = kTraceProtocol;
  return facts;
}

const Kernels& at_place(int isa) {
  const Kernels* const* sets = available();
  for (int i = 0; isa >= 0 && sets[i] != nullptr; ++i) {
    if (i == isa) return *sets[i];
  }
  refuse("isa: expected an index into isas()");
}

// None, or why this process may not run the instruction set.
nb::object refusal(int isa) {
  const Kernels& kernels = at_place(isa);
  const char* text = kernels.prepare != nullptr ? kernels.prepare() : nullptr;
  return text != nullptr ? nb::object(nb::str(text)) : nb::none();
}

}  // namespace

const Kernels& chosen(int isa) {
  const Kernels& kernels = at_place(isa);
  if (kernels.prepare != nullptr) {
    if (const char* refusal = kernels.prepare()) refuse(refusal);
  }
  return kernels;
}

bool summarize_unlocked(int isa, int threads, const Tensor& tensor, double* row) {
  constexpr int64_t kShort = 32768;  // others wait for these for some microseconds
  const Kernels& kernels = chosen(isa);
  if (threads < 1 || threads > 1024) refuse("threads must be 1 to 1024");
  int64_t count = 1;
  for (int i = 0; i < tensor.dims; ++i) count *= tensor.sizes[i];
  if (count <= kShort) return statistics(kernels, 1, tensor, row);
  const Unlocked unlocked;
  return statistics(kernels, threads, tensor, row);
}

}  // namespace polyattn

NB_MODULE(_native, m) {
  nanobind::set_leak_warnings(false);  // a trace may be open while the program ends
  using namespace nanobind::literals;
  m.doc() = "Tiled CPU attention kernels. Use polyattn.native or the native_cpu backend.";
  m.def(
      "isas", [] { return polyattn::names(polyattn::available()); },
      "Instruction sets that this processor runs, best first, then those that are never the best of all.");
  m.def("refusal", &polyattn::refusal, "isa"_a,
        "None, or why the operating system does not let this process run an instruction set.");
  m.def("build", &polyattn::build, "Compiler, compiled instruction sets, version, what traces are made of.");
  polyattn::add_attention(m);
  polyattn::add_tensors(m);
  m.def("statistics", &polyattn::trace_statistics, "isa"_a, "threads"_a, "element"_a, "data"_a, "sizes"_a,
        "strides"_a, "out"_a, "The numbers of a tensor, a row of them: see native/src/statistics/fields.h.");
  polyattn::add_door(m);
  polyattn::add_bare_call(m);
  polyattn::add_trained_call(m);
  polyattn::add_trace_lines(m);
  polyattn::add_trace_record(m);
  polyattn::add_trace_taps(m);
  m.def("spin", &polyattn::spin, "isa"_a, "bf16"_a, "iterations"_a, "threads"_a,
        "(operations, seconds) of multiply-adds from registers only: the peak of this processor.");
  m.def(
      "xla_handlers",
      [] {
        return nb::make_tuple(nb::capsule(reinterpret_cast<void*>(&polyattn::xla::forward)),
                              nb::capsule(reinterpret_cast<void*>(&polyattn::xla::backward)));
      },
      "The forward and the backward pass as handlers of XLA's foreign function interface.");
  m.def("threads_in_use", &polyattn::pool_name, "Whose threads the kernels run on.");
}

// The Python class polyattn._native.TraceTaps: what one trace of JAX programs hears (taps.h).
#include <nanobind/nanobind.h>

#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "module_parts.h"
#include "taps.h"
#include "unlocked.h"

namespace nb = nanobind;

namespace polyattn {
namespace {

class TraceTaps {
 public:
  TraceTaps(int64_t slot, size_t most) : slot_(slot), taps_(std::make_shared<Taps>(most)) {
    hear(slot_, taps_);
  }
  ~TraceTaps() { end(); }
  TraceTaps(const TraceTaps&) = delete;
  TraceTaps& operator=(const TraceTaps&) = delete;

  void tell(int64_t place, int64_t rank, const nb::bytes& numbers) {
    Told told{place, rank, std::string(static_cast<const char*>(numbers.data()), numbers.size())};
    const Unlocked unlocked;
    taps_->tell(std::move(told));
  }

  nb::list take(double seconds) {
    std::deque<Told> came;
    {
      const Unlocked unlocked;
      taps_->take(seconds, came);
    }
    nb::list found;
    for (const Told& one : came) {
      found.append(nb::make_tuple(one.place, one.rank, nb::bytes(one.numbers.data(), one.numbers.size())));
    }
    return found;
  }

  void end() {
    if (!ended_) hear(slot_, nullptr);
    ended_ = true;
    taps_->close();
  }

  int64_t told() const { return taps_->told(); }

 private:
  const int64_t slot_;
  const std::shared_ptr<Taps> taps_;
  bool ended_ = false;
};

}  // namespace

void add_trace_taps(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<TraceTaps>(m, "TraceTaps", "What a trace of JAX programs hears: see native/src/taps.h.")
      .def(nb::init<int64_t, size_t>(), "slot"_a, "most"_a)
      .def("tell", &TraceTaps::tell, "place"_a, "rank"_a, "numbers"_a, "Has it hear this, too.")
      .def("take", &TraceTaps::take, "seconds"_a,
           "All that waits, as (place, rank, numbers), after waiting for some that long.")
      .def("end", &TraceTaps::end, "Nothing more is heard; what waits can still be taken.")
      .def_prop_ro("told", &TraceTaps::told, "How many were told.");
  m.def(
      "tap_handler",
      [](int64_t session) {
        begin_session(session);
        return nb::capsule(reinterpret_cast<void*>(&xla::tap));
      },
      "session"_a, "The handler of XLA's foreign function interface that TraceTaps hear.");
}

}  // namespace polyattn

// What the taps of compiled JAX programs tell a trace: a handler of XLA's foreign function interface
// reads a tensor where XLA has it and queues its numbers, so that no Python runs while a program does.
// A call comes with one attribute and, last of its arguments, the tensor (before it a token, where the
// calls have an order; then its result is one, too):
//   tap   int64: slot, place, instruction set (of available()), threads, element, session
// `slot` is a trace, `place` where in the model; a trace that has ended hears nothing. `session` is the
// process that compiled the program: places mean nothing in another, which may have it from a cache.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "xla_abi.h"

namespace polyattn {

struct Told {
  int64_t place, rank;
  std::string numbers;  // the row of statistics, or what else the device made of a tensor
};

// What waits for the thread that makes records. Bounded: then whoever tells more waits.
class Taps {
 public:
  explicit Taps(size_t most) : most_(most) {}

  // Waits while it is full; drops what comes after close().
  void tell(Told told);

  // Moves all that waits into `to`, after waiting for some: false, and nothing, after `seconds` or
  // where it is closed and empty.
  bool take(double seconds, std::deque<Told>& to);

  // Nothing more is heard; what waits can still be taken.
  void close();

  // How many were told.
  int64_t told() const;

 private:
  mutable std::mutex lock_;
  std::condition_variable came_, went_;
  std::deque<Told> waiting_;
  const size_t most_;
  int64_t told_ = 0;
  bool closed_ = false;
};

// From now on `slot` is heard by these, or by nobody.
void hear(int64_t slot, std::shared_ptr<Taps> taps);

// Programs of other sessions are refused.
void begin_session(int64_t session);

namespace xla {
Error* tap(Frame* frame);
}

}  // namespace polyattn

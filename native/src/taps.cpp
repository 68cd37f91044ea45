#include "taps.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <new>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "polyattn/arguments.h"
#include "statistics/statistics.h"
#include "xla_reply.h"

namespace polyattn {
namespace {

constexpr int kNumbers = 6;
constexpr int kS64 = 5;  // of enum XLA_FFI_DataType

std::mutex hearing;
// Leaked: XLA's threads may call while the program ends.
std::unordered_map<int64_t, std::shared_ptr<Taps>>& heard() {
  static auto* const every = new std::unordered_map<int64_t, std::shared_ptr<Taps>>;
  return *every;
}
int64_t session_now = 0;

std::shared_ptr<Taps> who_hears(int64_t slot, int64_t session) {
  const std::lock_guard<std::mutex> held(hearing);
  if (session != session_now) {
    throw std::runtime_error(
        "got a traced program that another process compiled, expected one of this process: clear "
        "JAX's compilation cache, or trace without it");
  }
  const auto found = heard().find(slot);
  return found == heard().end() ? nullptr : found->second;
}

const int64_t* numbers_of(const xla::Attributes& every) {
  for (int64_t i = 0; i < every.size; ++i) {
    const xla::Span& name = *every.names[i];
    if (std::string(name.data, name.size) != "tap" || every.types[i] != xla::kArray) continue;
    const auto* found = static_cast<const xla::Numbers*>(every.each[i]);
    if (found->dtype == kS64 && found->size == kNumbers) return static_cast<const int64_t*>(found->data);
  }
  throw std::runtime_error("got a tap without its six numbers");
}

const Kernels& set_at(int64_t place) {
  const Kernels* const* sets = available();
  for (int64_t i = 0; place >= 0 && sets[i] != nullptr; ++i) {
    if (i == place) return *sets[i];
  }
  throw std::runtime_error("got an instruction set that is none");
}

void told(const xla::Frame& frame) {
  if (frame.arguments.size < 1) throw std::runtime_error("got a tap without a tensor");
  const int64_t* const call = numbers_of(frame.attributes);
  const std::shared_ptr<Taps> taps = who_hears(call[0], call[5]);
  if (taps == nullptr) return;
  const auto& x = *static_cast<const xla::Buffer*>(frame.arguments.each[frame.arguments.size - 1]);
  Tensor tensor;
  tensor.data = x.data;
  tensor.element = static_cast<Element>(call[4]);
  tensor.dims = 1;  // row-major, so the dimensions do not matter
  tensor.sizes[0] = tensor.strides[0] = 1;
  for (int64_t i = 0; i < x.rank; ++i) tensor.sizes[0] *= x.dims[i];
  if (const char* wrong = check(tensor)) throw std::runtime_error(wrong);
  double row[kFields];
  const auto threads = static_cast<int>(call[3] < 1 ? 1 : call[3]);
  // Without memory the trace is told that it lost a tensor, and the program goes on.
  if (!statistics(set_at(call[2]), threads, tensor, row)) {
    std::fill(row, row + kFields, std::numeric_limits<double>::quiet_NaN());
  }
  taps->tell({call[1], -1, std::string(reinterpret_cast<const char*>(row), sizeof row)});
}

}  // namespace

void Taps::tell(Told told) {
  std::unique_lock<std::mutex> held(lock_);
  went_.wait(held, [&] { return closed_ || waiting_.size() < most_; });
  if (closed_) return;
  waiting_.push_back(std::move(told));
  ++told_;
  held.unlock();
  came_.notify_one();
}

bool Taps::take(double seconds, std::deque<Told>& to) {
  std::unique_lock<std::mutex> held(lock_);
  came_.wait_for(held, std::chrono::duration<double>(seconds), [&] { return closed_ || !waiting_.empty(); });
  if (waiting_.empty()) return false;
  to.swap(waiting_);
  waiting_.clear();
  held.unlock();
  went_.notify_all();
  return true;
}

void Taps::close() {
  {
    const std::lock_guard<std::mutex> held(lock_);
    closed_ = true;
  }
  came_.notify_all();
  went_.notify_all();
}

int64_t Taps::told() const {
  const std::lock_guard<std::mutex> held(lock_);
  return told_;
}

void hear(int64_t slot, std::shared_ptr<Taps> taps) {
  const std::lock_guard<std::mutex> held(hearing);
  if (taps == nullptr) {
    heard().erase(slot);
  } else {
    heard()[slot] = std::move(taps);
  }
}

void begin_session(int64_t session) {
  const std::lock_guard<std::mutex> held(hearing);
  session_now = session;
}

namespace xla {

Error* tap(Frame* frame) {
  if (tells_metadata(*frame)) return nullptr;
  if (frame->stage != 3) return nullptr;
  try {
    told(*frame);
    return nullptr;
  } catch (const std::bad_alloc&) {
    return failed(*frame, "polyattn: there is no memory for a tap", kResourceExhausted);
  } catch (const std::exception& error) {
    return failed(*frame, (std::string("polyattn: ") + error.what()).c_str(), kInvalidArgument);
  }
}

}  // namespace xla
}  // namespace polyattn

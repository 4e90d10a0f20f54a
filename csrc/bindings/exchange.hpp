// The exchange object behind the Python classes. exchange.cpp and fabric.cpp share it.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "exchange/common/group.hpp"
#include "exchange/common/params.hpp"

namespace py = pybind11;

namespace ep {

// Thrown with the GIL released. The boundary turns it into an exception of errors.py.
struct ExchangeFailure {
  Status status;
};

inline bool signal_raised() {
  py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

inline void check(const Status& status) {
  if (status) throw ExchangeFailure{status};
}

// A rank's dispatch rows as a Python buffer. Keeps the memory alive.
struct RegionView {
  std::shared_ptr<void> memory;
  std::byte* begin;
  uint64_t bytes;
};

class Exchange {
 public:
  Exchange(const Geometry& geometry, uint32_t rank, const std::vector<int32_t>& placement,
           const Timing& timing)
      : group_(geometry, rank, placement.data(), timing) {
    group_.interrupted = signal_raised;
  }

  // memory: holds the group's regions. service: keeps peers informed; it ends before the group does.
  void attach(std::shared_ptr<void> memory, std::shared_ptr<void> service) {
    memory_ = std::move(memory);
    service_ = std::move(service);
  }

  Group& group() { return group_; }
  const std::shared_ptr<void>& memory() const { return memory_; }
  std::mutex& busy() { return busy_; }

 private:
  std::shared_ptr<void> memory_;
  Group group_;
  std::shared_ptr<void> service_;
  std::mutex busy_;
};

// Only one thread at a time may call an exchange. A second one gets an error instead of a race.
class SingleCaller {
 public:
  explicit SingleCaller(Exchange& exchange) : lock_(exchange.busy(), std::try_to_lock) {
    if (!lock_) throw BadArgument("thread", "a second one", "the only one inside this exchange");
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

// Rejects operations of another group, whose sizes differ. Also rejects operations from before a reset: their
// cells will never arrive.
template <class State>
void check_origin(const Group& group, const State& state, const char* what) {
  const bool mine = state.origin.group == group.id;
  if (mine && state.origin.generation == group.generation) return;
  throw BadArgument(what, "epoch " + std::to_string(state.epoch),
                    mine ? "of this generation: reset() dropped it" : "of this exchange, not of another one");
}

template <class Fn>
void run(Exchange& exchange, Fn&& fn) {
  py::gil_scoped_release release;
  SingleCaller caller(exchange);
  check(fn(exchange.group()));
}

}  // namespace ep

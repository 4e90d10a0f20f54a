// The exchange as the bindings hold it, whatever carries it: shared by bindings.cpp and bindings_fabric.cpp.
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

// Thrown while the GIL is held nowhere; becomes an exception of errors.py at the boundary.
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

// Lets Python build tensors over a rank's dispatch rows; keeps the memory alive.
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

  // memory: what the group's regions are part of; service: what keeps peers informed, ended before the group.
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

// One thread at a time drives an exchange; a second one is an error, not a race.
class Turn {
 public:
  explicit Turn(Exchange& exchange) : lock_(exchange.busy(), std::try_to_lock) {
    if (!lock_) throw BadArgument("thread", "a second one", "the only one inside this exchange");
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

// An operation of another group has other sizes; one from before a reset has cells that never come again.
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
  Turn turn(exchange);
  check(fn(exchange.group()));
}

}  // namespace ep

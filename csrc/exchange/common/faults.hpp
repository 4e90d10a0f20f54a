// Fault injection: delay, drop or kill at a phase of an operation. Part of the library; off unless set.
#pragma once

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "exchange/common/status.hpp"

namespace ep {

// kDelay: a slow rank, which sleeps. For a slow network see fabric/network_emulation.hpp.
enum class Action : uint32_t { kDelay, kDrop, kKill };

struct Fault {
  Op op;
  Phase phase;
  Action action;
  uint64_t epoch;     // of the operation, counted from 1; 0 = every one
  int64_t peer;       // kDrop: the peer whose cell is not written; -1 = all peers
  uint64_t delay_ns;  // kDelay
};

class FaultPlan {
 public:
  void set(std::vector<Fault> faults) { faults_ = std::move(faults); }

  // Applies delays and kills of a phase. The caller checks for drops separately.
  void at(Op op, Phase phase, uint64_t epoch) const {
    for (const Fault& f : faults_) {
      if (f.op != op || f.phase != phase || (f.epoch != 0 && f.epoch != epoch)) continue;
      if (f.action == Action::kKill) kill(getpid(), SIGKILL);
      if (f.action == Action::kDelay) {
        timespec left{time_t(f.delay_ns / 1'000'000'000), long(f.delay_ns % 1'000'000'000)};
        while (nanosleep(&left, &left) != 0) {
        }
      }
    }
  }

  bool drops(Op op, Phase phase, uint64_t epoch, uint32_t peer) const {
    for (const Fault& f : faults_) {
      if (f.action == Action::kDrop && f.op == op && f.phase == phase && (f.epoch == 0 || f.epoch == epoch) &&
          (f.peer < 0 || f.peer == int64_t(peer)))
        return true;
    }
    return false;
  }

 private:
  std::vector<Fault> faults_;
};

}  // namespace ep

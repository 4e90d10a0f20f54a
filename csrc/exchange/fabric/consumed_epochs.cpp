// Decides when a consumed epoch is sent, and with which message.
#include "exchange/fabric/consumed_epochs.hpp"

#include <algorithm>

namespace ep::fabric {

bool ConsumedEpochs::keep(const Command& command, uint32_t last_sent, uint64_t now) {
  Epoch& it = epochs_[uint32_t(command.op())][command.peer];
  // The peer needs it at once if two more sends would use up all banks that it knows to be free.
  const uint32_t soon = last_sent + 2;
  if (int32_t(soon - it.told - num_banks_) > 0) {
    it.told = command.epoch;
    it.since = 0;
    return false;
  }
  it.command = command;
  if (it.since == 0) it.since = now;
  if (oldest_ == 0) oldest_ = now;
  return true;
}

std::vector<Command> ConsumedEpochs::overdue(uint64_t before) {
  std::vector<Command> found;
  if (oldest_ == 0 || oldest_ > before) return found;
  oldest_ = 0;
  for (auto& of_op : epochs_) {
    for (Epoch& it : of_op) {
      if (it.since == 0) continue;
      if (it.since > before) {
        oldest_ = oldest_ == 0 ? it.since : std::min(oldest_, it.since);
        continue;
      }
      it.told = it.command.epoch;
      it.since = 0;
      found.push_back(it.command);
    }
  }
  return found;
}

void ConsumedEpochs::told(uint32_t peer) {
  for (auto& of_op : epochs_) {
    Epoch& it = of_op[peer];
    if (it.since != 0) it.told = it.command.epoch;
    it.since = 0;
  }
}

void ConsumedEpochs::forget(uint32_t peer) {
  for (auto& of_op : epochs_) of_op[peer].since = 0;
}

}  // namespace ep::fabric

// For each peer, the epoch up to which this rank has read its data, kept until the peer has been informed. An
// epoch travels with the next routing for its peer. It is sent alone if it has waited too long, or at once if
// the peer may be waiting for it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "exchange/common/group.hpp"
#include "exchange/common/params.hpp"

namespace ep::fabric {

class ConsumedEpochs {
 public:
  explicit ConsumedEpochs(uint32_t num_banks) : num_banks_(num_banks) {}

  // Keeps the epoch. Returns false, without keeping it, if the peer needs it at once. last_sent: the epoch of
  // the same operation that this rank last sent to the peer.
  bool keep(const Command& command, uint32_t last_sent, uint64_t now);
  // Removes and returns what has been kept since `before`.
  std::vector<Command> overdue(uint64_t before);
  // The epoch kept for a peer; 0 = none.
  uint32_t kept(uint32_t op, uint32_t peer) const {
    const Epoch& it = epochs_[op][peer];
    return it.since != 0 ? it.command.epoch : 0;
  }
  // A message carried everything that was kept for a peer.
  void told(uint32_t peer);
  void forget(uint32_t peer);

 private:
  struct Epoch {
    Command command{};
    uint32_t told = 0;   // the last epoch sent to the peer
    uint64_t since = 0;  // when it was kept; 0 = none is kept
  };
  const uint32_t num_banks_;
  std::array<std::array<Epoch, kMaxRanks>, kBankedOps> epochs_{};
  uint64_t oldest_ = 0;  // not later than the oldest kept epoch; 0 = none
};

}  // namespace ep::fabric

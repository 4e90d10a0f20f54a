// The epochs up to which this rank has read what each peer sent, until the peer knows them. An epoch travels
// with the next routing for its peer, alone if it has waited too long, or at once if the peer may wait for
// it.
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

  // Keeps it, unless the peer needs it at once: then returns false.
  // last_sent: epoch of the same operation that this rank last sent to the peer.
  bool keep(const Command& command, uint32_t last_sent, uint64_t now);
  // Takes out what has been kept since `before`.
  std::vector<Command> overdue(uint64_t before);
  // What is kept for a peer; 0 = nothing.
  uint32_t kept(uint32_t op, uint32_t peer) const {
    const Epoch& it = epochs_[op][peer];
    return it.since != 0 ? it.command.epoch : 0;
  }
  // A message took along all that was kept for a peer.
  void told(uint32_t peer);
  void forget(uint32_t peer);

 private:
  struct Epoch {
    Command command{};
    uint32_t told = 0;   // what the peer knows
    uint64_t since = 0;  // kept; 0 = nothing is
  };
  const uint32_t num_banks_;
  std::array<std::array<Epoch, kMaxRanks>, kBankedOps> epochs_{};
  uint64_t oldest_ = 0;  // no later than the first that is kept; 0 = none
};

}  // namespace ep::fabric

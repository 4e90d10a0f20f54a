// Announces rows for remote peers to the carrier while they are written. Neighbouring slots share one
// command. Long runs are announced early, so that the network is busy while the rest is written.
#pragma once

#include <algorithm>
#include <array>

#include "exchange/common/group.hpp"

namespace ep {

class RowRuns {
 public:
  // row_bytes: pitch of the slots of this operation.
  RowRuns(Group& group, Op op, uint32_t bank, uint64_t epoch, uint64_t row_bytes)
      : group_(group),
        op_bank_(uint8_t(uint32_t(op) << 4 | bank)),
        epoch_(uint32_t(epoch)),
        longest_(uint32_t(std::max<uint64_t>(1, kChunkBytes / row_bytes))) {}

  // The row in `slot` of the peer's block has been written. Slots of one peer come in ascending order.
  void add(uint32_t peer, uint32_t slot) {
    Run& run = runs_[peer];
    if (run.count != 0 && (run.first + run.count != slot || run.count == longest_)) {
      const bool full = run.count == longest_;
      flush(peer);
      if (full) group_.carrier->drive();
    }
    if (run.count == 0) run.first = slot;
    ++run.count;
  }

  // Ends the rows for this peer. The header that follows makes the carrier send them.
  void flush(uint32_t peer) {
    Run& run = runs_[peer];
    if (run.count == 0) return;
    group_.carrier->push(
        {Notice::kRows, op_bank_, uint8_t(peer), uint8_t(group_.generation), run.first, run.count, epoch_});
    run.count = 0;
  }

 private:
  static constexpr uint64_t kChunkBytes = 256 << 10;  // of one write; hides the cost of posting it
  struct Run {
    uint32_t first = 0, count = 0;
  };
  Group& group_;
  const uint8_t op_bank_;
  const uint32_t epoch_, longest_;
  std::array<Run, kMaxRanks> runs_{};
};

}  // namespace ep

// Launch policy of dispatch and combine: how many blocks and threads a kernel gets. Pure functions of sizes:
// tests/unit/exchange/nvlink/test_launch_grid.py calls them without a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "exchange/common/layout.hpp"

namespace ep::cuda {

// The halves of an operation that one kernel runs.
enum class Halves : uint32_t { kSend = 1, kRecv = 2, kBoth = 3 };
EP_HOST_DEVICE constexpr bool sends(Halves halves) {
  return (uint32_t(halves) & uint32_t(Halves::kSend)) != 0;
}
EP_HOST_DEVICE constexpr bool receives(Halves halves) {
  return (uint32_t(halves) & uint32_t(Halves::kRecv)) != 0;
}

constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kMaxThreads = 224;  // per block: for 7168 channels, four words of a row per thread
constexpr uint32_t kBlocksPerSm = 4;
constexpr uint32_t kMaxSplit = 2;  // combine: at most 1 << 2 blocks for a row
// Threads of a combine with AddNorm that one multiprocessor holds, if each has at most 128 registers (125
// today). With more registers, fewer blocks are resident than planned, which costs time only.
constexpr uint32_t kNormThreads = 512;

// Threads per block to move rows of `words` 16-byte words, at `words_per_thread` each.
constexpr uint32_t threads_for(uint32_t words, uint32_t words_per_thread) {
  const uint32_t wanted = words / words_per_thread;
  const uint32_t whole_warps = (wanted + kWarpThreads - 1) / kWarpThreads * kWarpThreads;
  return std::clamp(whole_warps, 4 * kWarpThreads, kMaxThreads);
}

// What a dispatch has to move. sent_tokens: of this rank. expected_tokens: the maximum over ranks.
struct DispatchSizes {
  uint32_t sent_tokens, expected_tokens, num_ranks, num_experts, local_experts, hidden;
};

// Blocks: one for bookkeeping, one for headers (sends), `senders`, then the receivers.
struct DispatchGrid {
  uint32_t blocks, threads, senders;
  uint32_t split;  // 1 << split blocks for a row
  size_t shared_bytes;
};

constexpr DispatchGrid grid_for(Halves halves, const DispatchSizes& d, uint32_t num_sms) {
  const uint32_t resident = num_sms * kBlocksPerSm;
  DispatchGrid grid{1, threads_for(d.hidden / 8, 4), 0, 0, d.num_experts * sizeof(uint32_t)};
  if (2 * d.sent_tokens + 2 <= num_sms) grid.split = 1;  // every block has a multiprocessor of its own
  if (sends(halves)) {
    grid.senders = std::clamp(d.sent_tokens << grid.split, 1u, resident);
    grid.blocks += 1 + grid.senders;
  }
  if (receives(halves)) {
    grid.blocks += 1 + std::clamp(d.expected_tokens * d.num_ranks, 1u, resident);
    const size_t counters =
        (d.local_experts + 1) * sizeof(int32_t) + d.num_ranks * d.local_experts * sizeof(uint16_t);
    grid.shared_bytes = std::max(grid.shared_bytes, counters);
  }
  return grid;
}

// What a combine has to move. tokens: the maximum over ranks. norms: AddNorm follows.
struct CombineSizes {
  uint32_t tokens, num_ranks, row_bytes;
  bool norms;
};

// Blocks: one for bookkeeping, `senders` (the first writes headers), receivers (the first awaits headers).
struct CombineGrid {
  uint32_t blocks, threads, senders;
  uint32_t send_split, recv_split;  // 1 << split blocks for a row
};

constexpr uint32_t combine_send_split(uint32_t rows, uint32_t resident, uint32_t num_sms) {
  uint32_t split = rows * 2 <= resident ? 1 : 0;
  while (split < kMaxSplit && rows << (split + 1) <= num_sms) ++split;
  return split;
}

constexpr uint32_t combine_recv_split(uint32_t tokens, uint32_t num_sms, bool norms) {
  if (norms) return 0;  // the norm needs the whole row in one block
  return tokens << kMaxSplit <= num_sms ? kMaxSplit : 1;
}

// All blocks are resident at once if they fit, so a block that waits for its stores delays no other. A row is
// split further while every part has its own multiprocessor.
constexpr CombineGrid grid_for(Halves halves, const CombineSizes& c, uint32_t num_sms) {
  CombineGrid grid{1, threads_for(c.row_bytes / 16, 4), 0, 0, 0};
  const uint32_t blocks_per_sm = c.norms ? std::min(kNormThreads / grid.threads, kBlocksPerSm) : kBlocksPerSm;
  const uint32_t resident = num_sms * blocks_per_sm, rows = c.tokens * c.num_ranks;
  grid.send_split = combine_send_split(rows, resident, num_sms);
  grid.recv_split = combine_recv_split(c.tokens, num_sms, c.norms);
  if (sends(halves)) grid.senders = 1 + std::clamp(rows << grid.send_split, 1u, 2 * resident);
  grid.blocks += grid.senders;
  if (receives(halves)) grid.blocks += 1 + std::clamp(c.tokens << grid.recv_split, 1u, resident);
  return grid;
}

}  // namespace ep::cuda

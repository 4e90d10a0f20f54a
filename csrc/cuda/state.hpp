// What one rank keeps on its GPU between operations, and what a kernel gets by value. Plain data for host and
// device; the host reads DeviceState by copying it, without stopping the streams that work.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ep/layout.hpp"
#include "ep/params.hpp"
#include "ep/statistics.hpp"
#include "ep/status.hpp"

namespace ep::cuda {

constexpr uint32_t kMaxPeers = 8;     // ranks of one host
constexpr Code kBadIds = Code(16);    // expert ids out of range or repeated; `seen` holds token and choice
constexpr Code kCapacity = Code(17);  // more rows than the compact view has room for; `seen` = how many

// Written by the host only while no kernel of the group runs, `masked` excepted.
struct alignas(64) Control {
  uint64_t next[kBankedOps];  // epoch of the last send
  uint64_t base;              // no epoch up to this one belongs to this generation
  uint64_t masked;            // bit per rank
  uint64_t failed;            // not 0 once a status was written
  uint64_t timeout_ns;
  uint64_t mask_on_timeout;
};

enum class Slot : uint32_t { kDispatchSend, kDispatchRecv, kCombineSend, kCombineRecv };
constexpr uint32_t kSlots = 4;

// Scratch of one kernel, reset by its last block.
struct alignas(64) Scratch {
  uint64_t start_ns, sent_ns;  // when block 0 began, when the last sending block ended
  uint32_t done, rows;         // blocks that ended; rows received
  uint64_t wait_ns[kMaxPeers];
};

struct Totals {
  uint64_t times[kBankedOps][kNumParts][kNumBuckets];
  uint64_t sums[kBankedOps][kNumParts];
  uint64_t peer_wait_ns[kBankedOps][kMaxPeers], peer_wait_max_ns[kBankedOps][kMaxPeers];
  uint64_t bytes[kBankedOps], bytes_local[kBankedOps];
  uint64_t tokens, rows, timeouts;
};

struct DeviceState {
  Control control;
  Scratch scratch[kSlots];
  uint64_t decisions[kBankedOps][kMaxPeers];  // of late headers: epoch << 1 | arrived
  Totals totals;
};

// By value into every kernel.
struct Device {
  Layout layout;
  DeviceLayout cells;
  uint32_t rank, num_ranks, num_experts, local_experts, hidden;
  Payload payload;
  std::byte* regions[kMaxPeers];
  uint32_t experts_of[kMaxPeers];  // how many experts each rank owns
  DeviceState* state;
  Status* status;           // in host memory; code written last
  const uint32_t* table;    // [E] owner << 24 | index among the owner's experts
  uint64_t* expert_tokens;  // [E_local] rows received, cumulative

  EP_HOST_DEVICE std::byte* own() const { return regions[rank]; }
  EP_HOST_DEVICE uint32_t bank_of(uint64_t epoch) const { return uint32_t(epoch) & (layout.num_banks - 1); }
  EP_HOST_DEVICE uint64_t all() const { return (1ull << num_ranks) - 1; }
};
constexpr uint32_t kOwnerShift = 24, kLocalMask = (1u << kOwnerShift) - 1;

struct DispatchSendArgs {
  const void* x;                    // [T, H] bf16
  const int64_t* ids;               // [T, K]
  const float* weights;             // [T, K] or null
  const int32_t* tokens_on_device;  // T of this replay, at most `tokens`; or null
  uint32_t tokens;
  uint32_t parts;  // blocks to a row: 1 or kParts
};

struct DispatchRecvArgs {
  View view;
  uint32_t capacity;     // rows of the compact views
  uint32_t scale_pitch;  // PADDED: tokens from one scale column to the next
  void* rows;
  uint32_t* scales;
  int64_t* row_ids;       // INDEX: (bank * R + source) * max_tokens + token
  int32_t* counts;        // [E_local]
  int64_t* offsets;       // [E_local + 1]
  int32_t* src_info;      // [E_local, R * max_tokens] or null
  int64_t* layout_range;  // [E_local, R] begin << 32 | count, or null
};

struct CombineSendArgs {
  const void* expert_out;
  Reduction reduction;
  uint32_t parts;  // blocks to a row: 1 or kParts
};

struct CombineRecvArgs {
  void* out;             // [T, H] bf16
  const float* weights;  // [T, K]: SOURCE; null = those of the dispatch
  Reduction reduction;
};

}  // namespace ep::cuda

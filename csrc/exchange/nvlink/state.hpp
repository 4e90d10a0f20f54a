// State that a rank keeps on its GPU between operations, and kernel arguments. Plain data for host and
// device. The host reads DeviceState by copying it, without stopping the working streams.
#pragma once

#include <cstddef>
#include <cstdint>

#include "exchange/common/layout.hpp"
#include "exchange/common/params.hpp"
#include "exchange/common/statistics.hpp"
#include "exchange/common/status.hpp"

namespace ep::cuda {

constexpr uint32_t kMaxPeers = 8;     // ranks of one host
constexpr Code kBadIds = Code(16);    // expert ids out of range or repeated; `seen` holds token and choice
constexpr Code kCapacity = Code(17);  // more rows than the compact view has room for; `seen` = how many

// A ticket counts kernels by their blocks. Each block adds its share when it ends, and all shares add up to
// one. So all blocks of a kernel read the same number of ended kernels, and none has to know whether it is
// the last.
constexpr uint32_t kTicketShift = 24;

// The host writes it only while no kernel of the group runs, except `masked_by_host`. Every block reads all
// of it at once, in the order of ControlWord. Pairs of 32-bit members are read together.
struct alignas(64) Control {
  uint64_t base;            // epochs of this generation are above it; a multiple of num_banks
  uint32_t masked;          // bit per rank: those that kernels masked
  uint32_t masked_by_host;  // separate, so that neither writer can undo the other's change
  uint64_t failed;          // not 0 after a status was written
  uint32_t num_faults;
  uint32_t absent;  // bit per rank: masked since the generation began
  uint64_t timeout_ns;
  uint64_t mask_on_timeout;
};
EP_HOST_DEVICE constexpr uint32_t low_word(uint64_t pair) { return uint32_t(pair); }
EP_HOST_DEVICE constexpr uint32_t high_word(uint64_t pair) { return uint32_t(pair >> 32); }
enum ControlWord : uint32_t { kBase, kMasked, kFailed, kNumFaults, kControlWords };

// Sums over the blocks of one operation.
struct alignas(128) Tally {
  uint64_t sends;               // ticket: the epoch of the last send
  uint64_t bytes, bytes_local;  // written into memory of other ranks, and into this rank's own
  uint64_t rows;                // received
  uint64_t reads[kMaxBanks];    // tickets of the receives of each bank
};

enum class Slot : uint32_t { kDispatchSend, kDispatchRecv, kCombineSend, kCombineRecv };
constexpr uint32_t kSlots = 4;

// Times of one kernel. The next kernel in its bank adds them to the totals, so nothing waits for that.
struct alignas(64) Scratch {
  uint64_t start_ns, sent_ns, end_ns;
  uint64_t both;  // whether the kernel had both halves
  uint64_t wait_ns[kMaxPeers];
};

// Times of an operation for many rows, a sequence of kernels. A kernel of the next operation adds them to the
// totals. Written by block 0, `end_ns` by others too.
struct alignas(64) BulkTimes {
  uint64_t start_ns;    // 0 = none
  uint64_t sent_ns;     // rows are on their way; earlier by what was waited until then
  uint64_t arrived_ns;  // dispatch: all rows are here
  uint64_t end_ns;      // 0 = it runs
  uint64_t wait_ns[kMaxPeers];
};

// By operation: dispatch and combine, then the same for many rows.
constexpr uint32_t kKinds = 2 * kBankedOps;
EP_HOST_DEVICE constexpr uint32_t kind_of(Op op, bool many) { return uint32_t(op) + (many ? kBankedOps : 0); }

struct Totals {
  uint64_t times[kKinds][kNumParts][kNumBuckets];
  uint64_t sums[kKinds][kNumParts];
  uint64_t peer_wait_ns[kKinds][kMaxPeers], peer_wait_max_ns[kKinds][kMaxPeers];
  uint64_t tokens, timeouts;
  uint64_t bulk_rows, bulk_bytes[kBankedOps], bulk_bytes_local[kBankedOps];  // of many rows, as in Tally
};

// Faults injected by tests. csrc/exchange/common/faults.hpp explains them.
struct DeviceFault {
  Op op;
  Phase phase;
  uint32_t drops;  // bit per peer that gets nothing
  uint32_t unused;
  uint64_t epoch;  // 0 = every one
  uint64_t delay_ns;
};
constexpr uint32_t kMaxFaults = 8;

struct DeviceState {
  Control control;
  Tally tally[kBankedOps];
  uint64_t published[kBankedOps][kMaxBanks];  // reads of each bank that were published to the senders
  Scratch scratch[kSlots][2 * kMaxBanks];     // by epoch
  uint64_t arrivals[kMaxBanks];  // of dispatches: epoch << kMaxPeers | bits of the ranks whose header counts
  uint64_t masked_since_ns[kMaxPeers];  // when a receive first saw the mask; 0 = never
  uint64_t bulk_operations;             // ticket of the kernels in bulk.hpp
  uint32_t bulk_taken[2][2];            // [parity of the operation]: of its rows, to send and to keep
  BulkTimes bulk[kBankedOps];
  Totals totals;
  DeviceFault faults[kMaxFaults];
};

// Passed by value to every kernel.
struct Device {
  DeviceLayout layout;
  BulkLayout bulk;
  uint32_t rank, num_ranks, num_experts, local_experts, hidden, scale_words;
  uint64_t rank_inverse;  // 2^32 / num_ranks, rounded up
  Payload payload;
  std::byte* regions[kMaxPeers];
  uint32_t experts_of[kMaxPeers];      // how many experts each rank owns
  uint32_t experts_before[kMaxPeers];  // and all lower ranks together
  DeviceState* state;
  Status* status;           // in host memory; code written last
  const uint32_t* table;    // [E] owner << 24 | index among the owner's experts
  uint64_t* expert_tokens;  // [E_local] rows received, cumulative

  EP_HOST_DEVICE std::byte* own() const { return regions[rank]; }
  EP_HOST_DEVICE uint32_t bank_of(uint64_t epoch) const { return uint32_t(epoch) & (layout.num_banks - 1); }
  EP_HOST_DEVICE uint32_t all() const { return (1u << num_ranks) - 1; }
  // Maps an index to (token, rank), so that a block takes all ranks of a token in turn, this rank last. i <
  // 2^28.
  EP_HOST_DEVICE uint32_t token_of(uint32_t i) const { return uint32_t(i * rank_inverse >> 32); }
  EP_HOST_DEVICE uint32_t source_of(uint32_t i) const {
    const uint32_t after = rank + 1 + i - token_of(i) * num_ranks;
    return after < num_ranks ? after : after - num_ranks;
  }
  EP_HOST_DEVICE Tally& tally(Op op) const { return state->tally[uint32_t(op)]; }
  EP_HOST_DEVICE Scratch& scratch(Slot slot, uint64_t epoch) const {
    return state->scratch[uint32_t(slot)][epoch & (2 * layout.num_banks - 1)];
  }
};
constexpr uint32_t kOwnerShift = 24, kLocalMask = (1u << kOwnerShift) - 1;

// Wire format of combine's rows: bfloat16, e4m3 with a scale per 128 channels, or 10-bit logarithms.
enum class Wire : uint32_t { kBf16, kFp8, kLog10 };

struct DispatchSendArgs {
  const void* x;                    // [T, H] bf16
  const int64_t* ids;               // [T, K]
  const float* weights;             // [T, K] or null
  const int32_t* tokens_on_device;  // T of this replay, at most `tokens`; or null
  uint32_t tokens;
  uint32_t split;  // 1 << split blocks for a row
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
  int32_t* expert_stats;  // [E_local] += rows received, or null
  int64_t* wait_stats;    // [R] += ns waited, or null
  bool next_reads_ahead;  // the next kernel may be set up at once; it reads nothing of this one before
};

struct CombineSendArgs {
  const void* expert_out;
  const float* weights;  // [T, K] to push to the experts' ranks
  Reduction reduction;
  Wire wire;
  bool pushes_weights;  // the same on all ranks; otherwise the dispatch carried them
  bool frees_dispatch;  // an in-place view of the dispatch was read
  uint32_t split;       // 1 << split blocks for a row
};

// What follows combine's sums at the end of a layer. bf16, at multiples of 16 bytes.
struct AddNorm {
  void* residual;      // [T, H], the sum is added to it
  const void* shared;  // [T, H], added to the sums first, or null
  const void* weight;  // [H]; null = no AddNorm
  float eps;
  float share = 0.0f;  // weight of a channel in the mean, 1 / H; combine sets it
};

struct CombineRecvArgs {
  void* out;             // [T, H] bf16: the sums, or the norm with AddNorm
  const float* weights;  // [T, K], SOURCE only; null = use those of the dispatch
  Reduction reduction;
  Wire wire;
  int64_t* wait_stats;    // [R] += ns waited, or null
  uint32_t split;         // 1 << split blocks for a row
  bool next_reads_ahead;  // as with dispatch
  AddNorm norm;           // needs both halves in one kernel, and wire kBf16
};

}  // namespace ep::cuda

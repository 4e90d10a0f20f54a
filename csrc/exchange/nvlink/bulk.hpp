// The exchange of many rows at once, on a bounded number of multiprocessors. A dispatch is planned first:
// ranks tell each other how many rows they send, and every row gets its final place. Rows are then copied
// straight to that place through registers, in the order of (source, token). Units: bytes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "exchange/nvlink/state.hpp"

namespace ep::cuda {

constexpr uint64_t kBulkOperation = 1ull << kTicketShift;  // of a `done` cell

// Written by the kernel of a plan; `ticket` last.
struct BulkReport {
  uint64_t ticket;
  uint32_t rows, unused;
  int32_t expert_rows[BulkLayout::kMaxLocalExperts];  // rounded up to the alignment
};

struct BulkPlanArgs {
  const uint8_t* in_rank;        // bool [T, R]
  const int32_t* expert_tokens;  // [E] of this rank's tokens
  int32_t* places;               // [T, R], written: number of the row among those for that rank, or -1
  int32_t* prefix;               // [R, R], written: rows of sources 0 .. s for each rank
  BulkReport* report;            // null = nobody waits for it
  uint64_t ticket;
  uint32_t tokens, local_experts, alignment;
};

// Where an operation's rows come in: a block of this rank's heap.
struct BulkTarget {
  uint64_t offset;    // in the heap, a multiple of BulkLayout::kUnit
  uint32_t capacity;  // rows
};

struct BulkDispatchArgs {
  const void* x;           // [T, row_bytes]
  const uint32_t* scales;  // [T, scale_words] or null
  const int64_t* ids;      // [T, K] or null
  const float* weights;    // [T, K] or null
  const int32_t* places;   // [T, R]
  const int32_t* prefix;   // [R, R]
  BulkTarget target;
  uint32_t tokens, row_bytes, scale_words, top_k, local_experts;
  uint32_t scale_row, scale_column;  // strides in words
  bool sources;                      // the block has room for the numbers of the tokens
  bool fill;                         // ids behind the last row become -1
};

struct BulkCombineArgs {
  const void* x;          // bf16 [rows, H], in the order of dispatch
  const float* weights;   // [rows, K] or null
  const void* bias[2];    // bf16 [T, H] or null
  const int32_t* places;  // [T, R]
  const int32_t* prefix;  // [R, R]
  void* out;              // bf16 [T, H]
  float* out_weights;     // [T, K] or null
  BulkTarget target;      // capacity: (R - 1) * T
  uint32_t tokens, row_bytes, top_k;
};

constexpr uint32_t kBulkPlanThreads = 256;
constexpr uint32_t kBulkDispatchThreads = 640;  // the warps that do not send rows write what goes with them
constexpr uint32_t kBulkCombineThreads = 640;
constexpr uint32_t kSendingWarps = 10;  // of a dispatch's block

// Blocks of a dispatch that only copy what stays on this GPU. With many blocks all do everything: then each
// has little that waits.
EP_HOST_DEVICE constexpr uint32_t keeping_blocks(uint32_t blocks) {
  return blocks <= 48 ? blocks * 3 / 8 : 0;
}

struct BulkLaunch {
  cudaStream_t stream;
  uint32_t num_sms;  // blocks, one on each
};

// Each call enqueues one kernel. All ranks make the same calls in the same order.
cudaError_t bulk_plan(const BulkLaunch& launch, const Device& device, const BulkPlanArgs& args);
cudaError_t bulk_dispatch(const BulkLaunch& launch, const Device& device, const BulkDispatchArgs& args);
cudaError_t bulk_combine(const BulkLaunch& launch, const Device& device, const BulkCombineArgs& args);

// For measurements: every block stores registers to the heap of `peer`, `bytes` in all, 16 at a time.
cudaError_t bulk_stores(const BulkLaunch& launch, const Device& device, uint32_t peer, uint64_t bytes);

// Starts a kernel with one block on each of the multiprocessors.
template <class Args>
cudaError_t start_bulk_kernel(const BulkLaunch& launch, void (*kernel)(Device, Args), uint32_t threads,
                              uint32_t shared, const Device& device, const Args& args) {
  if (shared > 0) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(launch.num_sms);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = launch.stream;
  return cudaLaunchKernelEx(&config, kernel, device, args);
}

}  // namespace ep::cuda

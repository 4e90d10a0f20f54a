// The kernels around those of bulk.hpp in a step of the server: which ranks a token goes to, the order of
// received rows by expert, and the sums that a rank returns.
#pragma once

#include "exchange/nvlink/bulk.hpp"

namespace ep::cuda {

// T tokens of this rank, K choices, N received rows, of which there may be fewer than `rows`.
struct ManyRouteArgs {
  const void* x;       // bf16 [T, H], only for FP8
  const int64_t* ids;  // [T, K]
  uint8_t* in_rank;    // bool [T, R], written
  int64_t* placed;     // [T, K], written: owner * stride + number among the owner's experts, or -1
  void* codes;         // e4m3 [T, H], written for FP8
  uint32_t* scales;    // [T, scale words], written for FP8
  uint32_t tokens, stride;
};

struct ManyOrderArgs {
  const int64_t* ids;     // [rows, K], of this rank's experts; -1 elsewhere
  const int32_t* prefix;  // [R, R] of the plan, which says how many rows there are
  int32_t* sums;          // [blocks, E_local] scratch memory
  int32_t* counts;        // [E_local], written, as are all that follow
  int64_t* offsets;       // [E_local + 1]
  int64_t* row_ids;       // [capacity], by (expert, row)
  int32_t* places;        // [rows, K], where in row_ids each choice is
  int32_t* expert_stats;  // [E_local] += counts, or null
  uint32_t rows, top_k, capacity;
};

struct ManySumArgs {
  const void* expert_out;  // bf16 [capacity, H], in the order of row_ids
  const int64_t* ids;      // [rows, K]
  const float* weights;    // [rows, K]
  const int32_t* places;   // [rows, K]
  const int32_t* prefix;   // [R, R]
  void* out;               // bf16 [rows, H]: of each row the weighted sum, float32 in top-k order
  uint32_t rows, top_k, capacity;
};

constexpr uint32_t kOrderRows = 128;  // of a block
EP_HOST_DEVICE constexpr uint32_t order_blocks(uint32_t rows) { return (rows + kOrderRows - 1) / kOrderRows; }

cudaError_t many_route(const BulkLaunch& launch, const Device& device, const ManyRouteArgs& args);
cudaError_t many_order(const BulkLaunch& launch, const Device& device, const ManyOrderArgs& args);
cudaError_t many_sum(const BulkLaunch& launch, const Device& device, const ManySumArgs& args);

}  // namespace ep::cuda

// Sorts received rows by expert: first by block, then all blocks together. The order is that of the rows, so
// it never depends on timing. If the group has failed, rows may hold anything: no index leaves its array.
#include "exchange/nvlink/bulk_times.cuh"
#include "exchange/nvlink/many_rows.hpp"
#include "exchange/nvlink/wait.cuh"

namespace ep::cuda {
namespace {

constexpr uint32_t kThreads = 256, kScanThreads = 512;
constexpr uint32_t kMaxLocal = BulkLayout::kMaxLocalExperts;

// Rows that came in, at most as many as there is room for.
__device__ __forceinline__ uint32_t rows_of(const Device& g, const ManyOrderArgs& a) {
  return min(uint32_t(a.prefix[(g.num_ranks - 1) * g.num_ranks + g.rank]), a.rows);
}

// Choices of this block's rows, in shared memory. kNothing: none here.
struct Choices {
  uint32_t* ids;
  uint32_t first, count;  // of all choices

  __device__ __forceinline__ void load(const Device& g, const ManyOrderArgs& a) {
    const uint32_t row = min(blockIdx.x * kOrderRows, rows_of(g, a));
    first = row * a.top_k;
    count = (min(row + kOrderRows, rows_of(g, a)) - row) * a.top_k;
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
      const int64_t id = a.ids[first + i];
      ids[i] = id >= 0 && id < int64_t(g.local_experts) ? uint32_t(id) : kNothing;
    }
    __syncthreads();
  }
};

// Rows of the block for each expert.
__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ Device g, const __grid_constant__ ManyOrderArgs a) {
  __shared__ uint32_t counts[kMaxLocal];
  for (uint32_t e = threadIdx.x; e < g.local_experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  Choices choices{dynamic_shared(), 0, 0};
  choices.load(g, a);
  for (uint32_t i = threadIdx.x; i < choices.count; i += blockDim.x)
    if (choices.ids[i] != kNothing) atomicAdd(&counts[choices.ids[i]], 1u);
  __syncthreads();
  for (uint32_t e = threadIdx.x; e < g.local_experts; e += blockDim.x)
    a.sums[uint64_t(blockIdx.x) * g.local_experts + e] = int32_t(counts[e]);
}

// One block, threads = experts in turn: where the rows of each block begin.
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(const __grid_constant__ Device g, const __grid_constant__ ManyOrderArgs a) {
  __shared__ uint32_t totals[kMaxLocal];
  const uint32_t experts = g.local_experts, blocks = order_blocks(a.rows);
  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) {
    uint32_t total = 0;
#pragma unroll 8
    for (uint32_t b = 0; b < blocks; ++b) {
      int32_t& sum = a.sums[uint64_t(b) * experts + e];
      const uint32_t mine = uint32_t(sum);
      sum = int32_t(total);
      total += mine;
    }
    totals[e] = total;
  }
  __syncthreads();
  if (threadIdx.x == 0) a.offsets[0] = 0;
  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) {
    const uint32_t total = totals[e];
    uint32_t upto = total;
    for (uint32_t i = 0; i < e; ++i) upto += totals[i];
    a.offsets[e + 1] = min(upto, a.capacity);
    a.counts[e] = int32_t(total);
    if (a.expert_stats != nullptr) a.expert_stats[e] += int32_t(total);
    g.expert_tokens[e] += total;
  }
}

// Thread = expert: takes its choices of the block in order.
__global__ void __launch_bounds__(kThreads)
    place_kernel(const __grid_constant__ Device g, const __grid_constant__ ManyOrderArgs a) {
  Choices choices{dynamic_shared(), 0, 0};
  choices.load(g, a);
  for (uint32_t e = threadIdx.x; e < g.local_experts; e += blockDim.x) {
    uint32_t place = uint32_t(a.offsets[e]) + uint32_t(a.sums[uint64_t(blockIdx.x) * g.local_experts + e]);
#pragma unroll 4
    for (uint32_t i = 0; i < choices.count; ++i) {
      if (choices.ids[i] != e) continue;
      if (place < a.capacity) {
        a.row_ids[place] = int64_t((choices.first + i) / a.top_k);
        a.places[choices.first + i] = int32_t(place);
      }
      ++place;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && !has_failed(g)) raise(g.state->bulk[uint32_t(Op::kDispatch)].end_ns, clock_ns());
}

}  // namespace

cudaError_t many_order(const BulkLaunch& launch, const Device& device, const ManyOrderArgs& args) {
  const uint32_t shared = kOrderRows * args.top_k * uint32_t(sizeof(uint32_t));
  const uint32_t grid = order_blocks(args.rows);
  const BulkLaunch blocks{launch.stream, grid}, one{launch.stream, 1};
  cudaError_t error = cudaSuccess;
  if (grid != 0) error = start_bulk_kernel(blocks, count_kernel, kThreads, shared, device, args);
  if (error == cudaSuccess) error = start_bulk_kernel(one, scan_kernel, kScanThreads, 0, device, args);
  if (error == cudaSuccess && grid != 0)
    error = start_bulk_kernel(blocks, place_kernel, kThreads, shared, device, args);
  return error;
}

}  // namespace ep::cuda

// Gives every row its place at its destination and tells all ranks how many rows there are.
#include "exchange/nvlink/bulk_copy.cuh"

namespace ep::cuda {
namespace {

// Sum of the values of all lower threads; `total` of all. The whole block calls it.
__device__ __forceinline__ uint32_t scan_block(uint32_t mine, uint32_t* total) {
  __shared__ uint32_t sums[kBulkPlanThreads / kWarp];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint32_t upto = mine;
#pragma unroll
  for (uint32_t by = 1; by < kWarp; by *= 2) {
    const uint32_t below = __shfl_up_sync(kFull, upto, by);
    if (lane >= by) upto += below;
  }
  if (lane == kWarp - 1) sums[warp] = upto;
  __syncthreads();
  uint32_t before = 0, all = 0;
#pragma unroll
  for (uint32_t w = 0; w < kBulkPlanThreads / kWarp; ++w) {
    before += w < warp ? sums[w] : 0;
    all += sums[w];
  }
  *total = all;
  return before + upto - mine;
}

// Numbers the rows for one rank, in the order of tokens. Returns how many there are.
__device__ __forceinline__ uint32_t number_rows(const Device& g, const BulkPlanArgs& a, uint32_t to) {
  const uint32_t each = (a.tokens + blockDim.x - 1) / blockDim.x;
  const uint32_t begin = min(threadIdx.x * each, a.tokens), end = min(begin + each, a.tokens);
  uint32_t mine = 0, total;
  for (uint32_t t = begin; t < end; ++t) mine += a.in_rank[uint64_t(t) * g.num_ranks + to] != 0;
  uint32_t place = scan_block(mine, &total);
  for (uint32_t t = begin; t < end; ++t) {
    const uint64_t at = uint64_t(t) * g.num_ranks + to;
    a.places[at] = a.in_rank[at] != 0 ? int32_t(place++) : -1;
  }
  return total;
}

// Adds up what the operations of this plan will move. Thread = destination, which gets `rows`, `own` of them
// from this rank.
__device__ __forceinline__ void count_traffic(const Device& g, const BulkPlanArgs& a, uint32_t rows,
                                              uint32_t own) {
  Totals& t = g.state->totals;
  const bool here = threadIdx.x == g.rank;
  const uint64_t channels = uint64_t(g.hidden) * (g.scale_words == 0 ? sizeof(uint16_t) : 1);
  const uint64_t choices = g.layout.top_k * (sizeof(int64_t) + sizeof(float));
  const uint64_t row = channels + g.scale_words * sizeof(uint32_t) + choices;
  const uint64_t sum = uint64_t(g.hidden) * sizeof(uint16_t);
  add((here ? t.bulk_bytes_local : t.bulk_bytes)[uint32_t(Op::kDispatch)], own * row);
  if (!here) return;
  add(t.bulk_bytes[uint32_t(Op::kCombine)], (rows - own) * sum);
  add(t.bulk_bytes_local[uint32_t(Op::kCombine)], own * sum);
  add(t.bulk_rows, rows);
  add(t.tokens, a.tokens);
}

// Sums what all ranks have sent, for this rank's caller.
__device__ __forceinline__ void sum_counts(const Device& g, const BulkPlanArgs& a, const BulkOpened& o) {
  const uint32_t parity = o.operation & 1;
  uint32_t rows = 0, own = 0;
  if (threadIdx.x < g.num_ranks) {
    for (uint32_t s = 0; s < g.num_ranks; ++s) {
      const uint32_t more =
          o.is_absent(s) ? 0 : peek4(g.own() + g.bulk.counts_at(parity, s) + threadIdx.x * sizeof(uint32_t));
      if (s == g.rank) own = more;
      a.prefix[s * g.num_ranks + threadIdx.x] = int32_t(rows += more);
    }
    count_traffic(g, a, rows, own);
  }
  if (a.report == nullptr) return;
  volatile BulkReport* report = a.report;
  if (threadIdx.x == g.rank) report->rows = rows;
  for (uint32_t e = threadIdx.x; e < a.local_experts; e += blockDim.x) {
    uint32_t count = 0;
    for (uint32_t s = 0; s < g.num_ranks; ++s)
      if (!o.is_absent(s))
        count +=
            peek4(g.own() + g.bulk.counts_at(parity, s) + (BulkLayout::kMaxRanks + e) * sizeof(uint32_t));
    report->expert_rows[e] = int32_t((count + a.alignment - 1) / a.alignment * a.alignment);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  report->ticket = a.ticket;
}

// Block = destination.
__global__ void __launch_bounds__(kBulkPlanThreads, 1)
    bulk_plan_kernel(const __grid_constant__ Device g, const __grid_constant__ BulkPlanArgs a) {
  __shared__ BulkOpened o;
  open_bulk(g, Op::kDispatch, nullptr, o);
  const uint32_t to = blockIdx.x, parity = o.operation & 1, rows = number_rows(g, a, to);
  if (threadIdx.x < g.num_ranks && !o.is_absent(threadIdx.x))
    put4(g.regions[threadIdx.x] + g.bulk.counts_at(parity, g.rank) + to * sizeof(uint32_t), rows);
  std::byte* counts =
      g.regions[to] + g.bulk.counts_at(parity, g.rank) + BulkLayout::kMaxRanks * sizeof(uint32_t);
  for (uint32_t e = threadIdx.x; e < a.local_experts && !o.is_absent(to); e += blockDim.x)
    put4(counts + e * sizeof(uint32_t), uint32_t(a.expert_tokens[to * a.local_experts + e]));
  close_bulk(g, o);
  if (blockIdx.x != 0 || !o.alive) return;
  if (threadIdx.x == kWarp) flush_bulk_times(g, Op::kCombine);  // while the others wait
  await_done(g, Op::kDispatch, o);
  __syncthreads();
  if (!has_failed(g)) sum_counts(g, a, o);
}

}  // namespace

cudaError_t bulk_plan(const BulkLaunch& launch, const Device& device, const BulkPlanArgs& args) {
  const BulkLaunch blocks{launch.stream, device.num_ranks};
  return start_bulk_kernel(blocks, bulk_plan_kernel, kBulkPlanThreads, 0, device, args);
}

}  // namespace ep::cuda

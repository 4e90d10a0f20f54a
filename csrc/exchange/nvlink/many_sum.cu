// The rows that a rank returns: for each received row the weighted sum of its experts' outputs.
#include "exchange/nvlink/bulk_times.cuh"
#include "exchange/nvlink/many_rows.hpp"
#include "exchange/nvlink/wait.cuh"
#include "exchange/nvlink/weighted_sum.cuh"

namespace ep::cuda {
namespace {

constexpr uint32_t kThreads = kMaxWarps * kWarp;

// One warp. Lane = choice, then 8 channels.
__device__ __forceinline__ void sum_row(const Device& g, const ManySumArgs& a, uint32_t row, Terms& terms) {
  const uint32_t lane = threadIdx.x % kWarp, bytes = g.hidden * uint32_t(sizeof(uint16_t));
  const uint64_t choice = uint64_t(row) * a.top_k + lane;
  const int64_t id = lane < a.top_k ? a.ids[choice] : -1;
  const bool here = id >= 0 && id < int64_t(g.local_experts);
  const uint32_t place = here ? uint32_t(a.places[choice]) : kNothing;
  auto* from = const_cast<std::byte*>(static_cast<const std::byte*>(a.expert_out)) + uint64_t(place) * bytes;
  const bool valid = place < a.capacity;
  terms.collect(valid, {valid ? from : nullptr, here ? a.weights[choice] : 0.0f, lane});
  std::byte* to = static_cast<std::byte*>(a.out) + uint64_t(row) * bytes;
#pragma unroll 1
  for (uint32_t at = lane * sizeof(uint4); at < bytes; at += kWarp * sizeof(uint4)) {
    Sum sum;
    sum_rows<false>(terms, at, bytes, sum);
    store16(to + at, sum.rounded());
  }
}

__global__ void __launch_bounds__(kThreads)
    many_sum_kernel(const __grid_constant__ Device g, const __grid_constant__ ManySumArgs a) {
  const uint32_t rows = min(uint32_t(a.prefix[(g.num_ranks - 1) * g.num_ranks + g.rank]), a.rows);
  const uint32_t warps = kMaxWarps * gridDim.x;
  if (blockIdx.x == 0 && threadIdx.x == 0) start_bulk_times(g, Op::kCombine);
  Terms terms = own_terms();
#pragma unroll 1
  for (uint32_t row = blockIdx.x * kMaxWarps + threadIdx.x / kWarp; row < rows; row += warps)
    sum_row(g, a, row, terms);
}

}  // namespace

cudaError_t many_sum(const BulkLaunch& launch, const Device& device, const ManySumArgs& args) {
  if (args.rows == 0) return cudaSuccess;
  const uint32_t wanted = (args.rows + kMaxWarps - 1) / kMaxWarps, most = 8 * launch.num_sms;
  return start_bulk_kernel({launch.stream, wanted < most ? wanted : most}, many_sum_kernel, kThreads, 0,
                           device, args);
}

}  // namespace ep::cuda

// Plain stores to a peer: the rate that bulk_dispatch() and bulk_combine() are measured against.
#include "exchange/nvlink/bulk_copy.cuh"

namespace ep::cuda {
namespace {

constexpr uint32_t kThreads = 1024;

struct StoreArgs {
  std::byte* to;
  uint64_t bytes;
};

__global__ void __launch_bounds__(kThreads, 1)
    bulk_stores_kernel(const __grid_constant__ Device g, const __grid_constant__ StoreArgs a) {
  const uint32_t value = g.rank;
  const uint64_t words = a.bytes / sizeof(uint4), step = uint64_t(gridDim.x) * blockDim.x;
#pragma unroll 8
  for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += step)
    store16(a.to + i * sizeof(uint4), {value, value, value, value});
}

}  // namespace

cudaError_t bulk_stores(const BulkLaunch& launch, const Device& device, uint32_t peer, uint64_t bytes) {
  const StoreArgs args{device.regions[peer] + device.bulk.heap, bytes};
  return start_bulk_kernel(launch, bulk_stores_kernel, kThreads, 0, device, args);
}

}  // namespace ep::cuda

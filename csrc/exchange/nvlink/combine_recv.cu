// The kernel of combine's receive half.
#include "exchange/nvlink/combine_kernel.cuh"

namespace ep::cuda {
namespace {

template <Wire kWire, bool kNarrow, bool kNorms = false>
__global__ void __launch_bounds__(kMaxThreads, combine_blocks_per_sm(kWire, kNorms))
    combine_kernel(const __grid_constant__ Device g, const __grid_constant__ CombineSendArgs send,
                   const __grid_constant__ CombineRecvArgs recv, std::byte* handle, uint32_t senders) {
  combine_block<kWire, kNarrow, Halves::kRecv, kNorms>(g, send, recv, handle, senders);
}

}  // namespace

cudaError_t launch_combine_recv(const Launch& launch, const Device& device, const CombineSendArgs& send,
                                const CombineRecvArgs& recv, std::byte* handle) {
  auto* kernel = combine_kernel<Wire::kBf16, false>;
  if (send.wire == Wire::kFp8)
    kernel = combine_kernel<Wire::kFp8, false>;
  else if (send.wire == Wire::kLog10)
    kernel = combine_kernel<Wire::kLog10, false>;
  else if (launch.narrow)
    kernel = combine_kernel<Wire::kBf16, true>;
  return start_combine(kernel, Halves::kRecv, false, launch, device, send, recv, handle);
}

}  // namespace ep::cuda

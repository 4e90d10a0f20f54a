// The kernel of dispatch's send half.
#include "exchange/nvlink/dispatch_kernel.cuh"

namespace ep::cuda {
namespace {

template <bool kFp8, bool kNarrow>
__global__ void __launch_bounds__(kMaxThreads, dispatch_blocks_per_sm(kFp8))
    dispatch_kernel(const __grid_constant__ Device g, const __grid_constant__ DispatchSendArgs send,
                    const __grid_constant__ DispatchRecvArgs recv, std::byte* handle, uint32_t senders) {
  dispatch_block<kFp8, kNarrow, Halves::kSend>(g, send, recv, handle, senders);
}

}  // namespace

cudaError_t launch_dispatch_send(const Launch& launch, const Device& device, const DispatchSendArgs& send,
                                 const DispatchRecvArgs& recv, std::byte* handle) {
  auto* kernel = dispatch_kernel<false, false>;
  if (is_fp8(device.payload))
    kernel = dispatch_kernel<true, false>;
  else if (launch.narrow)
    kernel = dispatch_kernel<false, true>;
  return start_dispatch(kernel, Halves::kSend, launch, device, send, recv, handle);
}

}  // namespace ep::cuda

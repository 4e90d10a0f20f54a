// The kernel of a whole combine, both halves in one launch.
#include "exchange/nvlink/combine_kernel.cuh"

namespace ep::cuda {
namespace {

template <Wire kWire, bool kNarrow, bool kNorms = false>
__global__ void __launch_bounds__(kMaxThreads, combine_blocks_per_sm(kWire, kNorms))
    combine_kernel(const __grid_constant__ Device g, const __grid_constant__ CombineSendArgs send,
                   const __grid_constant__ CombineRecvArgs recv, std::byte* handle, uint32_t senders) {
  combine_block<kWire, kNarrow, Halves::kBoth, kNorms>(g, send, recv, handle, senders);
}

}  // namespace

static cudaError_t launch_combine_both(const Launch& launch, const Device& device,
                                       const CombineSendArgs& send, const CombineRecvArgs& recv,
                                       std::byte* handle) {
  auto* kernel = combine_kernel<Wire::kBf16, false>;
  if (send.wire == Wire::kFp8)
    kernel = combine_kernel<Wire::kFp8, false>;
  else if (send.wire == Wire::kLog10)
    kernel = combine_kernel<Wire::kLog10, false>;
  else if (launch.narrow)
    kernel = combine_kernel<Wire::kBf16, true>;
  return start_combine(kernel, Halves::kBoth, false, launch, device, send, recv, handle);
}

cudaError_t combine(const Launch& launch, Halves halves, const Device& device, const CombineSendArgs& send,
                    const CombineRecvArgs& recv, std::byte* handle) {
  if (recv.norm.weight != nullptr) {
    if (send.wire != Wire::kBf16 || launch.narrow || halves != Halves::kBoth) return cudaErrorInvalidValue;
    return start_combine(combine_kernel<Wire::kBf16, false, true>, halves, true, launch, device, send, recv,
                         handle);
  }
  if (halves == Halves::kBoth) return launch_combine_both(launch, device, send, recv, handle);
  if (halves == Halves::kSend) return launch_combine_send(launch, device, send, recv, handle);
  return launch_combine_recv(launch, device, send, recv, handle);
}

}  // namespace ep::cuda

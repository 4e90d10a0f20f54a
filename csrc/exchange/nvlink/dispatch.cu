// The kernel of a whole dispatch, both halves in one launch, and the kernels that free banks.
#include "exchange/nvlink/dispatch_kernel.cuh"

namespace ep::cuda {
namespace {

template <bool kFp8, bool kNarrow>
__global__ void __launch_bounds__(kMaxThreads, dispatch_blocks_per_sm(kFp8))
    dispatch_kernel(const __grid_constant__ Device g, const __grid_constant__ DispatchSendArgs send,
                    const __grid_constant__ DispatchRecvArgs recv, std::byte* handle, uint32_t senders) {
  dispatch_block<kFp8, kNarrow, Halves::kBoth>(g, send, recv, handle, senders);
}

// Frees the bank of a dispatch whose view read it in place. Block = (token, source).
__global__ void release_kernel(const __grid_constant__ Device g, std::byte* handle) {
  const auto* h = reinterpret_cast<const DeviceHandle*>(handle);
  const uint32_t source = blockIdx.x % g.num_ranks, token = blockIdx.x / g.num_ranks,
                 bank = g.bank_of(h->epoch);
  if (h->arrived >> source & 1 && token < h->source_tokens[source]) empty_slot(g, bank, source, token);
  __syncthreads();
  if (threadIdx.x == 0) count_read(g, Op::kDispatch, bank);
}

__global__ void publish_kernel(const __grid_constant__ Device g) {
  __shared__ Opened o;
  open(g, Op::kDispatch, &g.state->control.base, o);
  __syncwarp();
  publish_reads(g, o);
}

}  // namespace

static cudaError_t launch_dispatch_both(const Launch& launch, const Device& device,
                                        const DispatchSendArgs& send, const DispatchRecvArgs& recv,
                                        std::byte* handle) {
  auto* kernel = dispatch_kernel<false, false>;
  if (is_fp8(device.payload))
    kernel = dispatch_kernel<true, false>;
  else if (launch.narrow)
    kernel = dispatch_kernel<false, true>;
  return start_dispatch(kernel, Halves::kBoth, launch, device, send, recv, handle);
}

cudaError_t dispatch(const Launch& launch, Halves halves, const Device& device, const DispatchSendArgs& send,
                     const DispatchRecvArgs& recv, std::byte* handle) {
  if (halves == Halves::kBoth) return launch_dispatch_both(launch, device, send, recv, handle);
  if (halves == Halves::kSend) return launch_dispatch_send(launch, device, send, recv, handle);
  return launch_dispatch_recv(launch, device, send, recv, handle);
}

cudaError_t release(cudaStream_t stream, const Device& device, std::byte* handle) {
  const uint32_t blocks = device.layout.max_tokens * device.num_ranks;
  return start_kernel({stream, 0, 0, false, false}, release_kernel, blocks, 4 * kWarp, 0, device, handle);
}

cudaError_t publish(cudaStream_t stream, const Device& device) {
  return start_kernel({stream, 0, 0, false, false}, publish_kernel, 1, kWarp, 0, device);
}

}  // namespace ep::cuda

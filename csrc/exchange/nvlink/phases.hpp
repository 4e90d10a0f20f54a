// The operations on the GPU. Each call enqueues one kernel on a stream and returns: one half, or both halves
// in one kernel if there is nothing to do in between.
#pragma once

#include <cuda_runtime.h>

#include "exchange/nvlink/launch_grid.hpp"
#include "exchange/nvlink/state.hpp"

namespace ep::cuda {

// What a launch may use. Blocks of a send take a multiprocessor each, so num_sms bounds what it disturbs.
struct Launch {
  cudaStream_t stream;
  uint32_t num_sms;
  uint32_t tokens;  // that a rank sends at most, as far as is known: blocks for them; more are served too
  bool narrow;      // rows or the caller's tensors are not at multiples of 16 bytes
  bool overlaps;    // kernels may be set up while the one before them ends: Hopper and later
};

// `handle`: DeviceHandle::bytes() of device memory that lives until the combine has been received.
cudaError_t dispatch(const Launch& launch, Halves halves, const Device& device, const DispatchSendArgs& send,
                     const DispatchRecvArgs& recv, std::byte* handle);
cudaError_t combine(const Launch& launch, Halves halves, const Device& device, const CombineSendArgs& send,
                    const CombineRecvArgs& recv, std::byte* handle);

// Gives the bank of an in-place view back to the senders.
cudaError_t release(cudaStream_t stream, const Device& device, std::byte* handle);

// Tells the senders which banks were read, where no further kernel of the group may follow for a while.
cudaError_t publish(cudaStream_t stream, const Device& device);

// Starts a kernel that may be set up while the one before it in the stream ends.
template <class... Params, class... Args>
cudaError_t start_kernel(const Launch& launch, void (*kernel)(Params...), uint32_t blocks, uint32_t threads,
                         size_t shared, const Args&... args) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = launch.stream;
  config.attrs = &overlap;
  config.numAttrs = launch.overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

}  // namespace ep::cuda

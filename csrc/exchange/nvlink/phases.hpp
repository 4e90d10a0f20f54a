// The operations on the GPU. Each call enqueues one kernel on a stream and returns: one half, or both halves
// in one kernel if there is nothing to do in between.
#pragma once

#include <cuda_runtime.h>

#include "exchange/nvlink/launch_grid.hpp"
#include "exchange/nvlink/state.hpp"

namespace ep::cuda {

// Resources of a launch. Blocks of a send each occupy a multiprocessor, so num_sms limits how many they take.
struct Launch {
  cudaStream_t stream;
  uint32_t num_sms;
  uint32_t tokens;  // expected maximum per rank, sizes the grid; more tokens work too
  bool narrow;      // rows or the caller's tensors are not at multiples of 16 bytes
  bool overlaps;    // kernels may be set up while the one before them ends: Hopper and later
};

// `handle`: DeviceHandle::bytes() of device memory that lives until the combine has been received.
cudaError_t dispatch(const Launch& launch, Halves halves, const Device& device, const DispatchSendArgs& send,
                     const DispatchRecvArgs& recv, std::byte* handle);
cudaError_t combine(const Launch& launch, Halves halves, const Device& device, const CombineSendArgs& send,
                    const CombineRecvArgs& recv, std::byte* handle);

// Frees the bank of an in-place view.
cudaError_t release(cudaStream_t stream, const Device& device, std::byte* handle);

// Publishes which banks were read. Call it if no other kernel of the group may follow for a while.
cudaError_t publish(cudaStream_t stream, const Device& device);

// Starts a kernel that may be set up while the previous one in the stream ends.
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

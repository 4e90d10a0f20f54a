// The operations on the GPU: each call enqueues one kernel on a stream and returns. Halves apart, or both in
// one kernel where nothing is to be done between them.
#pragma once

#include <cuda_runtime.h>

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

enum class Halves : uint32_t { kSend = 1, kRecv = 2, kBoth = 3 };

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

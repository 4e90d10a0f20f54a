// The body of dispatch's kernels: the send half, the receive half, or both in one launch.
//
// dispatch_send.cu, dispatch_recv.cu and dispatch.cu each wrap it in a `dispatch_kernel`. These differ only
// in their halves, so a profiler that groups kernels by name, as DeepEP's does, finds one dispatch kernel per
// payload.
#pragma once

#include "exchange/nvlink/bookkeeping.cuh"
#include "exchange/nvlink/dispatch_recv.cuh"
#include "exchange/nvlink/dispatch_send.cuh"
#include "exchange/nvlink/launch_grid.hpp"
#include "exchange/nvlink/phases.hpp"

namespace ep::cuda {

constexpr uint32_t dispatch_blocks_per_sm(bool fp8) { return fp8 ? kBlocksPerSm : 3; }

// For the order of blocks see DispatchGrid.
template <bool kFp8, bool kNarrow, Halves kHalves>
__device__ __forceinline__ void dispatch_block(const Device& g, const DispatchSendArgs& send,
                                               const DispatchRecvArgs& recv, std::byte* handle,
                                               uint32_t senders) {
  uint32_t* shared = dynamic_shared();
  constexpr bool kSends = sends(kHalves), kReceives = receives(kHalves);
  constexpr Slot kSlot = kSends ? Slot::kDispatchSend : Slot::kDispatchRecv;
  constexpr uint32_t kHeaders = kSends ? 1 : 0;  // blocks
  const auto* h = reinterpret_cast<const DeviceHandle*>(handle);
  if (kReceives && recv.next_reads_ahead) let_next_kernel_start();
  await_previous_kernel();

  const uint32_t block = blockIdx.x, before = 1 + kHeaders + senders;
  __shared__ Opened o;
  Done done;
  if (block == 0) {
    do_bookkeeping(g, kSlot, kSends ? nullptr : &h->epoch, o, kSends && kReceives);
  } else if (kSends && block == 1) {
    done = send_headers(g, send, handle, o, shared);
  } else if (kSends && block < before) {
    done = dispatch_send<kFp8, kNarrow>(g, send, o, block - 2, senders, shared);
    if (kReceives && threadIdx.x == 0) raise(g.scratch(kSlot, o.epoch).sent_ns, clock_ns());
  } else if (kReceives) {
    done = dispatch_recv<kNarrow>(g, recv, handle, o, kSlot, kSends ? nullptr : &h->epoch, block - before,
                                  gridDim.x - before, reinterpret_cast<int32_t*>(shared));
  }
  end_block(g, kSlot, o, kSends, kReceives && recv.view != View::kIndex, done);
}

// Launches a kernel that wraps dispatch_block.
template <class Kernel>
cudaError_t start_dispatch(Kernel* kernel, Halves halves, const Launch& launch, const Device& g,
                           const DispatchSendArgs& send, const DispatchRecvArgs& recv, std::byte* handle) {
  const DispatchSizes sizes{send.tokens,   launch.tokens,   g.num_ranks,
                            g.num_experts, g.local_experts, g.hidden};
  const DispatchGrid grid = grid_for(halves, sizes, launch.num_sms);
  DispatchSendArgs sent = send;
  sent.split = grid.split;
  return start_kernel(launch, kernel, grid.blocks, grid.threads, grid.shared_bytes, g, sent, recv, handle,
                      grid.senders);
}

// One function per kernel file.
cudaError_t launch_dispatch_send(const Launch& launch, const Device& device, const DispatchSendArgs& send,
                                 const DispatchRecvArgs& recv, std::byte* handle);
cudaError_t launch_dispatch_recv(const Launch& launch, const Device& device, const DispatchSendArgs& send,
                                 const DispatchRecvArgs& recv, std::byte* handle);

}  // namespace ep::cuda

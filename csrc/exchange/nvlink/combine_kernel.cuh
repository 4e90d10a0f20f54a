// The body of combine's kernels: the send half, the receive half, or both in one launch.
//
// combine_send.cu, combine_recv.cu and combine.cu each wrap it in a `combine_kernel`. These differ only in
// their halves, so a profiler that groups kernels by name, as DeepEP's does, finds one combine kernel per
// wire format.
#pragma once

#include "exchange/nvlink/bookkeeping.cuh"
#include "exchange/nvlink/combine_recv.cuh"
#include "exchange/nvlink/combine_send.cuh"
#include "exchange/nvlink/launch_grid.hpp"
#include "exchange/nvlink/phases.hpp"

namespace ep::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr uint32_t kLog10Blocks = 3;  // needs more registers
#else
constexpr uint32_t kLog10Blocks = kBlocksPerSm;
#endif

constexpr uint32_t combine_blocks_per_sm(Wire wire, bool norms) {
  if (norms) return kNormThreads / kMaxThreads;
  return wire == Wire::kLog10 ? kLog10Blocks : kBlocksPerSm;
}

// For the order of blocks see CombineGrid.
template <Wire kWire, bool kNarrow, Halves kHalves, bool kNorms>
__device__ __forceinline__ void combine_block(const Device& g, const CombineSendArgs& send,
                                              const CombineRecvArgs& recv, std::byte* handle,
                                              uint32_t senders) {
  constexpr bool kSends = sends(kHalves), kReceives = receives(kHalves);
  constexpr Slot kSlot = kSends ? Slot::kCombineSend : Slot::kCombineRecv;
  const auto* h = reinterpret_cast<const DeviceHandle*>(handle);
  if (kReceives && kWire == Wire::kBf16 && recv.next_reads_ahead) let_next_kernel_start();
  await_previous_kernel();

  const uint32_t block = blockIdx.x;
  __shared__ Opened o;
  Done done;
  if (block == 0) {
    do_bookkeeping(g, kSlot, kSends ? nullptr : &h->combine_epoch, o, kSends && kReceives);
  } else if (kSends && block <= senders) {
    done = combine_send<kWire, kNarrow>(g, send, handle, o, block - 1, senders);
    if (kReceives && threadIdx.x == 0) raise(g.scratch(kSlot, o.epoch).sent_ns, clock_ns());
  } else if (kReceives) {
    done = combine_recv<kWire, kNarrow, kNorms>(g, recv, handle, o, kSends, recv.split, block - 1 - senders,
                                                gridDim.x - 1 - senders);
  }
  end_block(g, kSlot, o, kSends, kReceives, done);
  if (kSends && send.frees_dispatch && threadIdx.x == 0) count_read(g, Op::kDispatch, g.bank_of(h->epoch));
}

// Launches a kernel that wraps combine_block.
template <class Kernel>
cudaError_t start_combine(Kernel* kernel, Halves halves, bool norms, const Launch& launch, const Device& g,
                          const CombineSendArgs& send, const CombineRecvArgs& recv, std::byte* handle) {
  const CombineSizes sizes{launch.tokens, g.num_ranks, uint32_t(g.layout.output_bytes), norms};
  const CombineGrid grid = grid_for(halves, sizes, launch.num_sms);
  CombineSendArgs sent = send;
  sent.split = grid.send_split;
  CombineRecvArgs received = recv;
  received.split = grid.recv_split;
  received.norm.share = 1.0f / float(g.hidden);
  return start_kernel(launch, kernel, grid.blocks, grid.threads, 0, g, sent, received, handle, grid.senders);
}

// One function per kernel file.
cudaError_t launch_combine_send(const Launch& launch, const Device& device, const CombineSendArgs& send,
                                const CombineRecvArgs& recv, std::byte* handle);
cudaError_t launch_combine_recv(const Launch& launch, const Device& device, const CombineSendArgs& send,
                                const CombineRecvArgs& recv, std::byte* handle);

}  // namespace ep::cuda

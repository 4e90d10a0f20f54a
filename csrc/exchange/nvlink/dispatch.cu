// The kernels of dispatch: send, receive, and both in one launch.
#include <algorithm>

#include "exchange/nvlink/dispatch_recv.cuh"
#include "exchange/nvlink/dispatch_send.cuh"
#include "exchange/nvlink/housekeeping.cuh"
#include "exchange/nvlink/phases.hpp"

namespace ep::cuda {
namespace {

constexpr uint32_t kMaxThreads = 224, kBlocksPerSm = 4;  // at 7168 channels two words of a row to a thread

// Blocks: one that keeps house, headers, senders, receivers.
template <bool kFp8, bool kNarrow, Halves kHalves>
__global__ void __launch_bounds__(kMaxThreads, kFp8 ? kBlocksPerSm : 3)
    dispatch_kernel(const __grid_constant__ Device g, const __grid_constant__ DispatchSendArgs send,
                    const __grid_constant__ DispatchRecvArgs recv, std::byte* handle, uint32_t senders) {
  uint32_t* shared = dynamic_shared();
  constexpr bool kSends = uint32_t(kHalves) & uint32_t(Halves::kSend);
  constexpr bool kReceives = uint32_t(kHalves) & uint32_t(Halves::kRecv);
  constexpr Slot kSlot = kSends ? Slot::kDispatchSend : Slot::kDispatchRecv;
  constexpr uint32_t kHeaders = kSends ? 1 : 0;  // blocks
  const auto* h = reinterpret_cast<const DeviceHandle*>(handle);
  if (kReceives && recv.next_reads_ahead) let_next_kernel_start();
  await_previous_kernel();

  const uint32_t block = blockIdx.x, before = 1 + kHeaders + senders;
  __shared__ Opened o;
  Done done;
  if (block == 0) {
    keep_house(g, kSlot, kSends ? nullptr : &h->epoch, o, kSends && kReceives);
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

// Gives the bank of a dispatch back whose view read it in place. Block = (token, source).
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

// A thread for each 16 channels of a part of a row.
uint32_t threads_for(const Device& g) {
  const uint32_t wanted = g.hidden / 32;
  return std::clamp((wanted + kWarp - 1) / kWarp * kWarp, 4 * kWarp, kMaxThreads);
}

template <bool kFp8, bool kNarrow, Halves kHalves>
cudaError_t start(const Launch& launch, const Device& g, const DispatchSendArgs& send,
                  const DispatchRecvArgs& recv, std::byte* handle) {
  constexpr bool kSends = uint32_t(kHalves) & uint32_t(Halves::kSend);
  constexpr bool kReceives = uint32_t(kHalves) & uint32_t(Halves::kRecv);
  const uint32_t room = launch.num_sms * kBlocksPerSm;
  DispatchSendArgs by_parts = send;
  by_parts.split =
      send.tokens * 2 + 2 <= launch.num_sms ? 1 : 0;  // while a multiprocessor has one block of it
  const uint32_t senders = kSends ? std::clamp(send.tokens << by_parts.split, 1u, room) : 0;
  const uint32_t items = launch.tokens * g.num_ranks;
  const uint32_t receivers = kReceives ? 1 + std::clamp(items, 1u, room) : 0;
  const size_t sending = g.num_experts * sizeof(uint32_t);
  const size_t receiving =
      (g.local_experts + 1) * sizeof(int32_t) + g.num_ranks * g.local_experts * sizeof(uint16_t);
  const size_t shared = kReceives ? std::max(sending, receiving) : sending;
  return start_kernel(launch, dispatch_kernel<kFp8, kNarrow, kHalves>,
                      1 + (kSends ? 1 : 0) + senders + receivers, threads_for(g), shared, g, by_parts, recv,
                      handle, senders);
}

template <bool kFp8, bool kNarrow>
cudaError_t start(Halves halves, const Launch& launch, const Device& g, const DispatchSendArgs& send,
                  const DispatchRecvArgs& recv, std::byte* handle) {
  if (halves == Halves::kBoth) return start<kFp8, kNarrow, Halves::kBoth>(launch, g, send, recv, handle);
  if (halves == Halves::kSend) return start<kFp8, kNarrow, Halves::kSend>(launch, g, send, recv, handle);
  return start<kFp8, kNarrow, Halves::kRecv>(launch, g, send, recv, handle);
}

}  // namespace

cudaError_t dispatch(const Launch& launch, Halves halves, const Device& device, const DispatchSendArgs& send,
                     const DispatchRecvArgs& recv, std::byte* handle) {
  if (is_fp8(device.payload)) return start<true, false>(halves, launch, device, send, recv, handle);
  if (!launch.narrow) return start<false, false>(halves, launch, device, send, recv, handle);
  return start<false, true>(halves, launch, device, send, recv, handle);
}

cudaError_t release(cudaStream_t stream, const Device& device, std::byte* handle) {
  const uint32_t blocks = device.layout.max_tokens * device.num_ranks;
  return start_kernel({stream, 0, 0, false, false}, release_kernel, blocks, 4 * kWarp, 0, device, handle);
}

cudaError_t publish(cudaStream_t stream, const Device& device) {
  return start_kernel({stream, 0, 0, false, false}, publish_kernel, 1, kWarp, 0, device);
}

}  // namespace ep::cuda

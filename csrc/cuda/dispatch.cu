// The kernels of dispatch: send, receive, and both in one launch.
#include <algorithm>

#include "cuda/dispatch_recv.cuh"
#include "cuda/dispatch_send.cuh"
#include "cuda/phases.hpp"

namespace ep::cuda {
namespace {

constexpr uint32_t kMaxThreads = 224, kBlocksPerSm = 4;  // at 7168 channels two words of a row to a thread

template <bool kFp8, uint32_t kBytes, Halves kHalves>
__global__ void __launch_bounds__(kMaxThreads, kBlocksPerSm)
    dispatch_kernel(const __grid_constant__ Device g, const __grid_constant__ DispatchSendArgs send,
                    const __grid_constant__ DispatchRecvArgs recv, std::byte* handle, uint32_t senders) {
  extern __shared__ uint32_t shared[];
  constexpr bool kSends = uint32_t(kHalves) & uint32_t(Halves::kSend);
  constexpr bool kReceives = uint32_t(kHalves) & uint32_t(Halves::kRecv);
  Control& control = g.state->control;
  auto* h = reinterpret_cast<DeviceHandle*>(handle);
  Scratch& scratch = g.state->scratch[uint32_t(kSends ? Slot::kDispatchSend : Slot::kDispatchRecv)];
  await_previous_kernel();
  const Opened o = open(g, kSends ? &control.next[uint32_t(Op::kDispatch)] : &h->epoch, kSends);
  if (blockIdx.x == 0 && threadIdx.x == 0) scratch.start_ns = clock_ns();

  if (kSends && blockIdx.x < senders) {
    if (o.alive) dispatch_send<kFp8, kBytes>(g, send, handle, o, blockIdx.x, senders, shared);
    if (kReceives && threadIdx.x == 0)
      atomicMax(reinterpret_cast<unsigned long long*>(&scratch.sent_ns),
                static_cast<unsigned long long>(clock_ns()));
  } else if (kReceives && o.alive) {
    dispatch_recv<kBytes>(g, recv, handle, o, blockIdx.x - senders, gridDim.x - senders,
                          reinterpret_cast<int32_t*>(shared));
  }

  if (!last_block(scratch)) return;
  if (kSends && threadIdx.x == 0) control.next[uint32_t(Op::kDispatch)] = o.epoch;  // every block has read it
  const uint64_t start = load_relaxed(&scratch.start_ns), end = clock_ns();
  uint64_t wait = 0;
  if (kReceives && o.alive && recv.view != View::kIndex) consume(g, Op::kDispatch, o.epoch, o.peers);
  if (kReceives) wait = settle_waits(g, Op::kDispatch, g.state->scratch[uint32_t(Slot::kDispatchRecv)]);
  if (threadIdx.x != 0) return;
  if (kSends) {
    const uint64_t sent = kReceives ? load_relaxed(&scratch.sent_ns) : end;
    record(g, Op::kDispatch, Part::kSend, sent - start);
    scratch.sent_ns = 0;
  }
  if (kReceives) {
    record(g, Op::kDispatch, Part::kWait, wait);
    record(g, Op::kDispatch, kSends ? Part::kTotal : Part::kExpand, end - start);
    Scratch& received = g.state->scratch[uint32_t(Slot::kDispatchRecv)];
    add(g.state->totals.rows, atomicExch(&received.rows, 0u));
  }
}

__global__ void release_kernel(const __grid_constant__ Device g, std::byte* handle) {
  auto* h = reinterpret_cast<DeviceHandle*>(handle);
  const bool held = h->held;
  __syncwarp();
  if (!held) return;
  consume(g, Op::kDispatch, h->epoch, uint32_t(g.all() & ~g.state->control.masked));
  if (threadIdx.x == 0) h->held = 0;
}

// A thread for each 16 channels of a part of a row.
uint32_t threads_for(const Device& g) {
  const uint32_t wanted = g.hidden / 16 / DeviceLayout::kParts;
  return std::clamp((wanted + kWarp - 1) / kWarp * kWarp, 4 * kWarp, kMaxThreads);
}

template <bool kFp8, uint32_t kBytes, Halves kHalves>
cudaError_t start(const Launch& launch, const Device& g, const DispatchSendArgs& send,
                  const DispatchRecvArgs& recv, std::byte* handle) {
  constexpr bool kSends = uint32_t(kHalves) & uint32_t(Halves::kSend);
  constexpr bool kReceives = uint32_t(kHalves) & uint32_t(Halves::kRecv);
  const uint32_t threads = threads_for(g), room = launch.num_sms * kBlocksPerSm;
  // A multiprocessor for each block, the headers' too: behind rows, headers would come as late as they do.
  const uint32_t parts =
      send.tokens * DeviceLayout::kParts + g.num_ranks <= launch.num_sms ? DeviceLayout::kParts : 1;
  const uint32_t senders = kSends ? g.num_ranks + std::clamp(send.tokens * parts, 1u, room) : 0;
  const uint32_t items = g.layout.max_tokens * g.num_ranks;
  const uint32_t receivers = kReceives ? 1 + std::clamp(items, 1u, room) : 0;
  const uint32_t experts = *std::max_element(g.experts_of, g.experts_of + g.num_ranks);
  const size_t shared = (experts + 1 + (kReceives ? g.num_experts : 0)) * sizeof(uint32_t);
  DispatchSendArgs by_parts = send;
  by_parts.parts = parts;
  return start_kernel(dispatch_kernel<kFp8, kBytes, kHalves>, senders + receivers, threads, shared,
                      launch.stream, g, by_parts, recv, handle, senders);
}

template <bool kFp8, uint32_t kBytes>
cudaError_t start(Halves halves, const Launch& launch, const Device& g, const DispatchSendArgs& send,
                  const DispatchRecvArgs& recv, std::byte* handle) {
  if (halves == Halves::kBoth) return start<kFp8, kBytes, Halves::kBoth>(launch, g, send, recv, handle);
  if (halves == Halves::kSend) return start<kFp8, kBytes, Halves::kSend>(launch, g, send, recv, handle);
  return start<kFp8, kBytes, Halves::kRecv>(launch, g, send, recv, handle);
}

}  // namespace

cudaError_t dispatch(const Launch& launch, Halves halves, const Device& device, const DispatchSendArgs& send,
                     const DispatchRecvArgs& recv, std::byte* handle) {
  if (is_fp8(device.payload)) return start<true, 16>(halves, launch, device, send, recv, handle);
  if (!launch.narrow) return start<false, 16>(halves, launch, device, send, recv, handle);
  return start<false, 2>(halves, launch, device, send, recv, handle);
}

cudaError_t release(cudaStream_t stream, const Device& device, std::byte* handle) {
  release_kernel<<<1, kWarp, 0, stream>>>(device, handle);
  return cudaGetLastError();
}

}  // namespace ep::cuda

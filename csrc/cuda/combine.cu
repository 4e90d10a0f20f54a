// The kernels of combine: send, receive, and both in one launch.
#include <algorithm>

#include "cuda/combine_recv.cuh"
#include "cuda/combine_send.cuh"
#include "cuda/phases.hpp"

namespace ep::cuda {
namespace {

constexpr uint32_t kMaxThreads = 224, kBlocksPerSm = 4;

template <uint32_t kBytes, Halves kHalves>
__global__ void __launch_bounds__(kMaxThreads, 4)
    combine_kernel(const __grid_constant__ Device g, const __grid_constant__ CombineSendArgs send,
                   const __grid_constant__ CombineRecvArgs recv, std::byte* handle, uint32_t senders) {
  constexpr bool kSends = uint32_t(kHalves) & uint32_t(Halves::kSend);
  constexpr bool kReceives = uint32_t(kHalves) & uint32_t(Halves::kRecv);
  Control& control = g.state->control;
  auto* h = reinterpret_cast<DeviceHandle*>(handle);
  Scratch& scratch = g.state->scratch[uint32_t(kSends ? Slot::kCombineSend : Slot::kCombineRecv)];
  await_previous_kernel();
  const Opened o = open(g, kSends ? &control.next[uint32_t(Op::kCombine)] : &h->combine_epoch, kSends);
  if (blockIdx.x == 0 && threadIdx.x == 0) scratch.start_ns = clock_ns();

  if (kSends && blockIdx.x < senders) {
    if (o.alive) combine_send<kBytes>(g, send, handle, o, blockIdx.x, senders);
    if (kReceives && threadIdx.x == 0)
      atomicMax(reinterpret_cast<unsigned long long*>(&scratch.sent_ns),
                static_cast<unsigned long long>(clock_ns()));
  } else if (kReceives && o.alive) {
    combine_recv<kBytes>(g, recv, handle, o, blockIdx.x - senders, gridDim.x - senders);
  }

  if (!last_block(scratch)) return;
  if (kSends && threadIdx.x == 0) control.next[uint32_t(Op::kCombine)] = o.epoch;  // every block has read it
  const uint64_t start = load_relaxed(&scratch.start_ns), end = clock_ns();
  uint64_t wait = 0;
  if (kReceives && o.alive) consume(g, Op::kCombine, o.epoch, o.peers);
  if (kSends) {
    const bool held = h->held;
    __syncwarp();
    if (held && o.alive) {
      consume(g, Op::kDispatch, h->epoch, o.peers);
      if (threadIdx.x == 0) h->held = 0;
    }
  }
  if (kReceives) wait = settle_waits(g, Op::kCombine, g.state->scratch[uint32_t(Slot::kCombineRecv)]);
  if (threadIdx.x != 0) return;
  if (kSends) {
    const uint64_t sent = kReceives ? load_relaxed(&scratch.sent_ns) : end;
    record(g, Op::kCombine, Part::kSend, sent - start);
    scratch.sent_ns = 0;
  }
  if (kReceives) {
    record(g, Op::kCombine, Part::kWait, wait);
    record(g, Op::kCombine, kSends ? Part::kTotal : Part::kReduce, end - start);
  }
}

template <uint32_t kBytes, Halves kHalves>
cudaError_t start(const Launch& launch, const Device& g, const CombineSendArgs& send,
                  const CombineRecvArgs& recv, std::byte* handle) {
  constexpr bool kSends = uint32_t(kHalves) & uint32_t(Halves::kSend);
  constexpr bool kReceives = uint32_t(kHalves) & uint32_t(Halves::kRecv);
  const uint32_t wanted =
      uint32_t(g.layout.combine_bytes / 16) / DeviceLayout::kParts / 2;  // two words a thread
  const uint32_t threads = std::clamp((wanted + kWarp - 1) / kWarp * kWarp, 4 * kWarp, kMaxThreads);
  const uint32_t room = launch.num_sms * kBlocksPerSm, tokens = g.layout.max_tokens;
  // All blocks at once where they fit: one that waits for its stores keeps no other from starting.
  const uint32_t rows = tokens * g.num_ranks;
  CombineSendArgs by_parts = send;
  by_parts.parts = rows * DeviceLayout::kParts <= room ? DeviceLayout::kParts : 1;
  const uint32_t senders = kSends ? 1 + std::clamp(rows * by_parts.parts, 1u, 2 * room) : 0;
  const uint32_t receivers = kReceives ? 1 + std::clamp(tokens * DeviceLayout::kParts, 1u, room) : 0;
  return start_kernel(combine_kernel<kBytes, kHalves>, senders + receivers, threads, 0, launch.stream, g,
                      by_parts, recv, handle, senders);
}

template <uint32_t kBytes>
cudaError_t start(Halves halves, const Launch& launch, const Device& g, const CombineSendArgs& send,
                  const CombineRecvArgs& recv, std::byte* handle) {
  if (halves == Halves::kBoth) return start<kBytes, Halves::kBoth>(launch, g, send, recv, handle);
  if (halves == Halves::kSend) return start<kBytes, Halves::kSend>(launch, g, send, recv, handle);
  return start<kBytes, Halves::kRecv>(launch, g, send, recv, handle);
}

}  // namespace

cudaError_t combine(const Launch& launch, Halves halves, const Device& device, const CombineSendArgs& send,
                    const CombineRecvArgs& recv, std::byte* handle) {
  if (launch.narrow) return start<2>(halves, launch, device, send, recv, handle);
  return start<16>(halves, launch, device, send, recv, handle);
}

}  // namespace ep::cuda

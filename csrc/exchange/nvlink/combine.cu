// The kernels of combine: send, receive, and both in one launch.
#include <algorithm>

#include "exchange/nvlink/combine_recv.cuh"
#include "exchange/nvlink/combine_send.cuh"
#include "exchange/nvlink/housekeeping.cuh"
#include "exchange/nvlink/phases.hpp"

namespace ep::cuda {
namespace {

constexpr uint32_t kMaxThreads = 224, kBlocksPerSm = 4, kMaxSplit = 2;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr uint32_t kLog10Blocks = 3;  // more registers
#else
constexpr uint32_t kLog10Blocks = kBlocksPerSm;
#endif
// Of a combine that norms, on a multiprocessor: while each has at most 128 registers, today 125; with more
// fewer blocks are there at once than are counted with, which costs time alone.
constexpr uint32_t kNormThreads = 512;

// Blocks: one that keeps house, senders (the first writes headers), receivers (the first awaits them).
template <Wire kWire, bool kNarrow, Halves kHalves, bool kNorms>
__global__ void __launch_bounds__(kMaxThreads, kNorms                  ? kNormThreads / kMaxThreads
                                               : kWire == Wire::kLog10 ? kLog10Blocks
                                                                       : kBlocksPerSm)
    combine_kernel(const __grid_constant__ Device g, const __grid_constant__ CombineSendArgs send,
                   const __grid_constant__ CombineRecvArgs recv, std::byte* handle, uint32_t senders) {
  constexpr bool kSends = uint32_t(kHalves) & uint32_t(Halves::kSend);
  constexpr bool kReceives = uint32_t(kHalves) & uint32_t(Halves::kRecv);
  constexpr Slot kSlot = kSends ? Slot::kCombineSend : Slot::kCombineRecv;
  const auto* h = reinterpret_cast<const DeviceHandle*>(handle);
  if (kReceives && kWire == Wire::kBf16 && recv.next_reads_ahead) let_next_kernel_start();
  await_previous_kernel();

  const uint32_t block = blockIdx.x;
  __shared__ Opened o;
  Done done;
  if (block == 0) {
    keep_house(g, kSlot, kSends ? nullptr : &h->combine_epoch, o, kSends && kReceives);
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

template <Wire kWire, bool kNarrow, Halves kHalves, bool kNorms = false>
cudaError_t start(const Launch& launch, const Device& g, const CombineSendArgs& send,
                  const CombineRecvArgs& recv, std::byte* handle) {
  constexpr bool kSends = uint32_t(kHalves) & uint32_t(Halves::kSend);
  constexpr bool kReceives = uint32_t(kHalves) & uint32_t(Halves::kRecv);
  const uint32_t wanted = uint32_t(g.layout.answer_bytes / 16) / 4;  // at 7168 channels four words a thread
  const uint32_t threads = std::clamp((wanted + kWarp - 1) / kWarp * kWarp, 4 * kWarp, kMaxThreads);
  const uint32_t resident = kNorms ? std::min(kNormThreads / threads, kBlocksPerSm) : kBlocksPerSm;
  const uint32_t room = launch.num_sms * resident, tokens = launch.tokens;
  // All blocks at once where they fit: one that waits for its stores keeps no other from starting. A row is
  // split further while every part has a multiprocessor of its own.
  const uint32_t rows = tokens * g.num_ranks;
  CombineSendArgs sent = send;
  sent.split = rows * 2 <= room ? 1 : 0;
  while (sent.split < kMaxSplit && rows << (sent.split + 1) <= launch.num_sms) ++sent.split;
  CombineRecvArgs received = recv;
  received.norm.share = 1.0f / float(g.hidden);
  received.split = kNorms ? 0 : tokens << kMaxSplit <= launch.num_sms ? kMaxSplit : 1;
  const uint32_t senders = kSends ? 1 + std::clamp(rows << sent.split, 1u, 2 * room) : 0;
  const uint32_t receivers = kReceives ? 1 + std::clamp(tokens << received.split, 1u, room) : 0;
  return start_kernel(launch, combine_kernel<kWire, kNarrow, kHalves, kNorms>, 1 + senders + receivers,
                      threads, 0, g, sent, received, handle, senders);
}

template <Wire kWire, bool kNarrow>
cudaError_t start(Halves halves, const Launch& launch, const Device& g, const CombineSendArgs& send,
                  const CombineRecvArgs& recv, std::byte* handle) {
  if (halves == Halves::kBoth) return start<kWire, kNarrow, Halves::kBoth>(launch, g, send, recv, handle);
  if (halves == Halves::kSend) return start<kWire, kNarrow, Halves::kSend>(launch, g, send, recv, handle);
  return start<kWire, kNarrow, Halves::kRecv>(launch, g, send, recv, handle);
}

}  // namespace

cudaError_t combine(const Launch& launch, Halves halves, const Device& device, const CombineSendArgs& send,
                    const CombineRecvArgs& recv, std::byte* handle) {
  if (recv.norm.weight != nullptr) {
    if (send.wire != Wire::kBf16 || launch.narrow || halves != Halves::kBoth) return cudaErrorInvalidValue;
    return start<Wire::kBf16, false, Halves::kBoth, true>(launch, device, send, recv, handle);
  }
  if (send.wire == Wire::kFp8) return start<Wire::kFp8, false>(halves, launch, device, send, recv, handle);
  if (send.wire == Wire::kLog10)
    return start<Wire::kLog10, false>(halves, launch, device, send, recv, handle);
  if (launch.narrow) return start<Wire::kBf16, true>(halves, launch, device, send, recv, handle);
  return start<Wire::kBf16, false>(halves, launch, device, send, recv, handle);
}

}  // namespace ep::cuda

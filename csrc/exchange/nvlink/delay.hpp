// An injected delay, for measurements: what a rank receives becomes visible so long after it was sent, as
// over a slow network, and no sender waits. The kernels that move rows do not know of it.
//
// A kernel behind each operation sends every peer the time at which its rows were written. Where the rows are
// needed, a kernel waits until each peer's time plus the delay has passed. Clocks of GPUs differ, and each
// rank measures by how much. The cells are those of Head for which the exchange has no other use on GPUs:
//
//   stamps   [epoch % kMaxBanks][op][source]  u64 epoch, u64 when its rows were sent, by the source's clock
//   asked    [asking rank]                    u64 number of the question
//   answers  [answering rank]                 u64 number of the question, u64 the clock of that rank
#pragma once

#include <cuda_runtime.h>

#include "exchange/nvlink/launch_grid.hpp"
#include "exchange/nvlink/state.hpp"

namespace ep::cuda {

// In device memory, because captured kernels read it when they are replayed.
struct DelayState {
  uint64_t delay_ns;            // 0 = nobody waits
  int64_t ahead_ns[kMaxPeers];  // by how much a peer's clock is ahead of this rank's
};

// One operation of a handle. halves: kSend stamps what was sent, kRecv waits for the stamps of the peers.
struct Delayed {
  Op op;
  Halves halves;
  bool next_reads_ahead;  // as with DispatchRecvArgs
  const DeviceHandle* handle;
};

EP_HOST_DEVICE constexpr uint64_t stamp_at(Op op, uint64_t epoch, uint32_t source) {
  return Head::header(Op::kDispatch, uint32_t(epoch) % kMaxBanks, uint32_t(op) * kMaxPeers + source);
}
EP_HOST_DEVICE constexpr uint64_t asked_at(uint32_t rank) { return Head::join(0, rank); }
EP_HOST_DEVICE constexpr uint64_t answer_at(uint32_t rank) { return Head::join(1, rank); }

// overlaps: see Launch.
cudaError_t delay(cudaStream_t stream, bool overlaps, const Device& device, const DelayState* state,
                  const Delayed& delayed);

// Measures DelayState::ahead_ns. All unmasked ranks run it at the same time, with asked and answers all zero.
cudaError_t compare_clocks(cudaStream_t stream, const Device& device, DelayState* state);

}  // namespace ep::cuda

// An injected delay, for measurements: what a rank receives becomes visible so long after it was sent, as
// over a slow network, and no sender waits. The kernels that move rows do not know of it.
//
// A kernel behind each operation sends every peer the time at which its rows were written. A kernel where the
// rows are needed waits until each peer's time plus the delay has passed. Clocks of GPUs differ, and each
// rank measures by how much.
#pragma once

#include <cuda_runtime.h>

#include "exchange/nvlink/phases.hpp"
#include "exchange/nvlink/state.hpp"

namespace ep::cuda {

// In device memory, because captured kernels read it when they are replayed.
struct DelayState {
  uint64_t delay_ns;
  int64_t ahead_ns[kMaxPeers];  // by how much a peer's clock is ahead of this rank's
};

// Passed by value to the kernels of the delay.
struct DelayCells {
  DelayLayout layout;
  DelayState* state = nullptr;  // null = no delay
};

// One operation of a handle. halves: kSend stamps what was sent, kRecv waits for the stamps of the peers.
struct Delayed {
  Op op;
  Halves halves;
  bool next_reads_ahead;  // as with DispatchRecvArgs
  const DeviceHandle* handle;
};

// overlaps: see Launch.
cudaError_t delay(cudaStream_t stream, bool overlaps, const Device& device, const DelayCells& cells,
                  const Delayed& delayed);

// Measures DelayState::ahead_ns. All unmasked ranks run it at the same time, with asked and answers all zero.
cudaError_t compare_clocks(cudaStream_t stream, const Device& device, const DelayCells& cells);

}  // namespace ep::cuda

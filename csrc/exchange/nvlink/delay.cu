// The kernels of an injected delay.
#include "exchange/nvlink/delay.hpp"
#include "exchange/nvlink/phases.hpp"
#include "exchange/nvlink/wait.cuh"

namespace ep::cuda {
namespace {

constexpr uint32_t kQuestions = 64;  // the quickest answer counts

// When this rank had written the rows of an operation; now, where its send was a kernel of its own.
__device__ __forceinline__ uint64_t sent_at(const Device& g, Op op, uint64_t epoch) {
  const Slot slot = op == Op::kDispatch ? Slot::kDispatchSend : Slot::kCombineSend;
  const uint64_t sent = load_relaxed(&g.scratch(slot, epoch).sent_ns);
  return sent != 0 ? sent : clock_ns();
}

__device__ __forceinline__ void stamp(const Device& g, Op op, uint64_t epoch, uint32_t peer) {
  std::byte* cell = g.regions[peer] + stamp_at(op, epoch, g.rank);
  store_relaxed(cell + sizeof(uint64_t), sent_at(g, op, epoch));
  store_release(cell, epoch);
}

// Spins until what a peer has sent is visible, or until the peer is masked or the group has failed.
__device__ __forceinline__ void await_visible(const Device& g, const DelayState& state, Op op, uint64_t epoch,
                                              uint32_t peer) {
  const uint64_t delay_ns = load_relaxed(&state.delay_ns);
  if (delay_ns == 0) return;
  const Wanted wanted{op, Phase::kRecvExpand, peer, epoch};
  const std::byte* cell = g.own() + stamp_at(op, epoch, peer);
  uint64_t seen;
  if (!await_word<Match::kAtLeast64>(g, cell, wanted, &seen)) return;
  const uint64_t sent = load_relaxed(cell + sizeof(uint64_t)) - load_relaxed(&state.ahead_ns[peer]);
  const uint64_t visible = sent + delay_ns, start = clock_ns();
#pragma unroll 1
  for (uint32_t spins = 0; int64_t(clock_ns() - visible) < 0; ++spins) {
    if (spins % kSpins != kSpins - 1) continue;
    const Look look = look_around(g, peer, start);
    if (look == Look::kGoOn) continue;
    if (look != Look::kMasked) report(g, op, wanted.phase, epoch, look, peer, uint32_t(seen));
    return;
  }
}

// One warp, a lane per peer.
__global__ void delay_kernel(const __grid_constant__ Device g, const DelayState* state,
                             const __grid_constant__ Delayed delayed) {
  await_previous_kernel();
  if (delayed.next_reads_ahead) let_next_kernel_start();
  const uint32_t peer = threadIdx.x;
  if (peer >= g.num_ranks || peer == g.rank || has_failed(g)) return;  // a failed send has no epoch
  const DeviceHandle& h = *delayed.handle;
  const uint64_t epoch = delayed.op == Op::kDispatch ? h.epoch : h.combine_epoch;
  if (sends(delayed.halves) && !(masked_now(g) >> peer & 1)) stamp(g, delayed.op, epoch, peer);
  if (receives(delayed.halves) && !(masked_now(g) >> peer & 1))
    await_visible(g, *state, delayed.op, epoch, peer);
}

__device__ __forceinline__ void ask(const Device& g, DelayState& state, uint32_t peer) {
  const std::byte* answer = g.own() + answer_at(peer);
  uint64_t quickest = UINT64_MAX, ahead = 0, seen;
#pragma unroll 1
  for (uint64_t question = 1; question <= kQuestions; ++question) {
    const uint64_t begin = clock_ns();
    store_release(g.regions[peer] + asked_at(g.rank), question);
    if (!await_word<Match::kAtLeast64>(g, answer, {Op::kReset, Phase::kJoin, peer, question}, &seen)) return;
    const uint64_t took = clock_ns() - begin;
    if (took >= quickest) continue;
    quickest = took;
    ahead = load_relaxed(answer + sizeof(uint64_t)) - (begin + took / 2);
  }
  store_relaxed(&state.ahead_ns[peer], ahead);
}

__device__ __forceinline__ void answer(const Device& g, uint32_t peer) {
  const std::byte* asked = g.own() + asked_at(peer);
  std::byte* cell = g.regions[peer] + answer_at(g.rank);
  uint64_t seen;
#pragma unroll 1
  for (uint64_t question = 1; question <= kQuestions; ++question) {
    if (!await_word<Match::kAtLeast64>(g, asked, {Op::kReset, Phase::kJoin, peer, question}, &seen)) return;
    store_relaxed(cell + sizeof(uint64_t), clock_ns());
    store_release(cell, question);
  }
}

// Block = peer; one thread asks, one of another warp answers.
__global__ void compare_clocks_kernel(const __grid_constant__ Device g, DelayState* state) {
  const uint32_t peer = blockIdx.x;
  if (peer == g.rank || masked_now(g) >> peer & 1) return;
  if (threadIdx.x == 0) ask(g, *state, peer);
  if (threadIdx.x == kWarp) answer(g, peer);
}

}  // namespace

cudaError_t delay(cudaStream_t stream, bool overlaps, const Device& device, const DelayState* state,
                  const Delayed& delayed) {
  const bool behind_operation = sends(delayed.halves);  // else maybe behind an event of another stream
  const Launch launch{stream, 0, 0, false, overlaps && behind_operation};
  return start_kernel(launch, delay_kernel, 1, kWarp, 0, device, state, delayed);
}

cudaError_t compare_clocks(cudaStream_t stream, const Device& device, DelayState* state) {
  const Launch launch{stream, 0, 0, false, false};
  return start_kernel(launch, compare_clocks_kernel, device.num_ranks, 2 * kWarp, 0, device, state);
}

}  // namespace ep::cuda

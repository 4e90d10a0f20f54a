// Multi-head latent attention (MLA) of one token per sequence. Each of a block's two warpgroups takes up to
// 32 heads of one (sequence, part of the context) at a time, in tiles of 64 positions from a ring. A separate
// warpgroup fills the ring ahead, also with tiles of the next item. A tile's box of 64 channels returns to
// the ring as soon as the last product that reads it has ended.
//
//   up to 32 heads   each warpgroup has its own ring: either its own items (a team of 1) or every n-th tile
//                    of an item that its team shares. A team is two warpgroups of a block, or up to sixteen
//                    of a cluster, which join their sums through shared memory
//   more             both warpgroups read the same ring, each for 32 of 64 heads
//
// Parts of a context leave unnormalised sums, which another kernel joins (kernels/triton/paged_decode.py,
// with the same arithmetic: softmax by exp2, running maximum, weights rounded to bfloat16 but not their sum).
#include <algorithm>

#include "kernels/hopper/common/launch.hpp"
#include "kernels/hopper/mla/write_output.cuh"

namespace ep::mla {
namespace {

using Few = HeadPolicy<kFewHeads, false, 11>;
using Some = HeadPolicy<kSomeHeads, false, 9>;
using Many = HeadPolicy<kSomeHeads, true, 18>;

// Processes all items of a warpgroup. Returns the last one, which is the only one if there is a team.
template <class F>
__device__ inline Item attend(Shared<F>& s, const Params& p, uint32_t worker, uint32_t thread) {
  const uint32_t warp = thread / 32, lane = thread % 32;
  Agenda<F> agenda(p, worker);
  Reader<F> at{s, F::kShared ? 0 : worker, {}};
  Softmax<F> softmax;
  Item it{};
  await_previous_kernel();
  for (uint32_t parity = 0; agenda.more(); parity ^= 1) {
    it = agenda.next();
    if (thread == 0) ask_queries(s, p, it, worker);
    softmax.begin();
    await_phase(&s.asked[worker], parity);
    for (uint32_t tile = it.first; tile < it.last; tile += it.step)
      softmax.add(at, worker, min(it.length - tile * kTile, kTile), p.rows, p.scale, warp, lane);
    softmax.finish(s, worker, warp, lane);
    if (!F::kShared && p.team > 1)
      leave_state(s, softmax, worker, thread);
    else if (p.splits > 1)
      leave_sums(p, it, softmax, thread);
    else
      write_output(s, p, it, softmax, worker, thread);
    publish_to_async();  // the next queries overwrite these
    meet_group(worker);
  }
  return it;
}

template <class F>
__device__ inline void init(Shared<F>& s) {
  for (uint32_t ring = 0; ring < F::kRings; ++ring)
    for (uint32_t i = 0; i < F::kRing; ++i) {
      init_barrier(&s.full[ring][i], 1);
      init_barrier(&s.empty[ring][i], kWarps * F::kReaders);
    }
  for (uint64_t& each : s.asked) init_barrier(&each, 1);
  publish_barriers();
}

template <class F>
__global__ void __launch_bounds__(kThreads, 1) attend_kernel(const __grid_constant__ Params p) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte memory[];  // the swizzle pattern starts at these multiples
  auto& s = *reinterpret_cast<Shared<F>*>(memory);
  const uint32_t warp = warp_number();
  const uint32_t worker = warp / kWarps, thread = threadIdx.x % (kWarps * 32);
  if (threadIdx.x == 0) fetch_map(&p.q), fetch_map(&p.cache), init(s);
  let_next_kernel_start();  // the next kernel must wait until this one ends before it reads `out`
  __syncthreads();
  Item it{};
  if (worker < kWorkers) {
    take_registers<kRegistersToAttend>();
    it = attend(s, p, worker, thread);
  } else {
    leave_registers<kRegistersToFill>();
    fill_ring(s, p, warp % F::kRings, warp % kWarps / F::kRings, threadIdx.x % 32);
  }
  if (F::kShared || p.team == 1) return;
  __syncwarp();
  meet_cluster();
  if (worker < kWorkers) join_team(s, p, it, worker, thread);
  __syncwarp();
  meet_cluster();  // no block exits before the others have read its sums
#else
  __trap();  // Mla rejects other GPUs
#endif
}

template <class F>
cudaError_t start_form(cudaStream_t stream, uint32_t blocks, const Params& params) {
  constexpr size_t kBytes = sizeof(Shared<F>);
  static_assert(kBytes <= 227 << 10, "a block of Hopper has no more");
  const uint32_t items = params.work.count * params.groups * params.splits;
  Grid grid{std::min(items, blocks), kThreads, kBytes};  // every block has an item
  if (params.team > 1) {
    grid.cluster = std::max(params.team / kWorkers, 1u);
    grid.blocks = items * grid.cluster;
  }
  return launch(stream, attend_kernel<F>, grid, kBytes, params);
}

}  // namespace

cudaError_t start(cudaStream_t stream, uint32_t blocks, const Params& params) {
  if (params.heads <= kFewHeads) return start_form<Few>(stream, blocks, params);
  if (params.heads <= kSomeHeads) return start_form<Some>(stream, blocks, params);
  return start_form<Many>(stream, blocks, params);
}

}  // namespace ep::mla

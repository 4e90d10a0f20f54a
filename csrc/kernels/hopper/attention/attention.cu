// Attention of one token per sequence. A team of one to eight of a block's warps takes one item at a time:
// (share of a context, KV head). Each warp takes every n-th tile of 16 positions and has its own
// ring of tiles. It requests its next tile, also that of its next item, as soon as it has used one. Warps
// synchronise only at the start and end of an item, when other teams use the memory bandwidth.
//
// The token's own key and value come from the projections. Every item normalises and rotates its queries. The
// item with the last position also writes key and value to the cache and into its tile. Attention waits for
// that, so a warp requests its first tiles during this work. Shares and tables belong to the step, not to
// the preceding kernel, and are read before waiting for it. The arithmetic is that of
// kernels/triton/paged_decode.py: softmax by exp2, running maximum.
#include <algorithm>

#include "kernels/hopper/attention/attention.hpp"
#include "kernels/hopper/attention/new_token.cuh"
#include "kernels/hopper/attention/results.cuh"
#include "kernels/hopper/attention/work_items.cuh"
#include "kernels/hopper/common/launch.hpp"

namespace ep::attention {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

template <uint32_t kSize>
__device__ inline void attend(const Params& p, const Shared<kSize>& shared, uint32_t warp, uint32_t lane) {
  const float scale = p.rule.scale * kLog2E;
  const Team<kSize> team(warp);
  std::byte* const places = shared.tiles + warp * kRing * kTileBytes;
  std::byte* const rows = shared.rows + team.number * Shared<kSize>::kRows;
  uint64_t* const full = shared.full + warp * kRing;
  Agenda<kSize> agenda(p, team, lane);
  Tiles<kSize> tiles(p, team, agenda, places, full, lane);
  if (lane == 0) {
    for (uint32_t i = 0; i < kRing; ++i) init_barrier(&full[i], 1);
    publish_barriers();
  }
  __syncwarp();
  Place place;
  if (agenda.count == 0) await_previous_kernel();  // the next kernel relies on it
  for (uint32_t n = 0; n < agenda.count; ++n) {
    const Item item = agenda.item(n);
    prepare(p, item, team, rows, lane, [&] {
      for (uint32_t stage = 0; n == 0 && stage < kRing; ++stage) tiles.ask(stage);
    });
    Queries queries;
    queries.load(rows, kPitch, lane);
    Softmax softmax;
    for (uint32_t tile = item.first + team.member; tile < item.last; tile += kSize, place.next(kRing)) {
      await_phase(&full[place.stage], place.parity);
      std::byte* at = places + place.stage * kTileBytes;
      const uint32_t seen = min(item.length - tile * kTile, kTile);
      const bool newest = item.newest && tile + 1 == item.last;
      if (newest) complete(at, rows, seen - 1, lane);
      softmax.add(shared_address(at), queries, seen, scale, lane);
      if (newest) publish_to_async();  // makes ordinary stores visible before later copies
      __syncwarp();
      tiles.ask(place.stage);
    }
    softmax.finish();
    join_team(shared.joined, team, softmax, lane);
    if (item.of == 1) {
      if (team.member == 0) write(p, item, softmax, lane);
    } else if (leave_share(p, shared, item, team, softmax, lane)) {
      join_shares(p, item, team, lane);
    }
  }
}

template <uint32_t kSize>
__global__ void __launch_bounds__(kWarps * 32, 1) attend_kernel(const __grid_constant__ Params p) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte memory[];  // the swizzle pattern starts at these multiples
  if (threadIdx.x == 0) fetch_map(&p.k), fetch_map(&p.v);
  let_next_kernel_start();  // the next kernel must wait until this one ends before it reads `out`
  attend(p, Shared<kSize>(memory), warp_number(), threadIdx.x % 32);
#else
  __trap();  // Attention rejects other GPUs
#endif
}

template <uint32_t kSize>
cudaError_t start(cudaStream_t stream, uint32_t blocks, const Params& params) {
  constexpr size_t kBytes = Shared<kSize>::kBytes;
  const uint32_t items = params.work.shares.most * params.cache.kv_heads;  // at most
  return launch(stream, attend_kernel<kSize>, {std::min(items, blocks), kWarps * 32, kBytes}, kBytes, params);
}

}  // namespace

cudaError_t start(cudaStream_t stream, uint32_t team, uint32_t blocks, const Params& params) {
  if (team == 1) return start<1>(stream, blocks, params);
  if (team == 2) return start<2>(stream, blocks, params);
  if (team == 4) return start<4>(stream, blocks, params);
  return start<8>(stream, blocks, params);
}

}  // namespace ep::attention

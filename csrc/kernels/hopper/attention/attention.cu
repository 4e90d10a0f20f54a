// Attention of one token per sequence. A team of one to eight of a block's warps takes one item at a time:
// (sequence, KV head, part of the context). Each warp takes every n-th tile of 16 positions and has its own
// ring of tiles. It requests its next tile, also that of its next item, as soon as it has used one. Warps
// synchronise only at the start and end of an item, when other teams use the memory bandwidth.
//
// The token's own key and value come from the projections. Every item normalises and rotates its queries. The
// item with the last position also writes key and value to the cache and into its tile. Attention waits for
// that, so a warp requests its first tiles during this work. Lengths and tables belong to the step, not to
// the preceding kernel, and are read before waiting for it. Parts of a context leave unnormalised sums, which
// another kernel joins (kernels/triton/paged_decode.py, with the same arithmetic: softmax by exp2, running
// maximum).
#include <cuda_bf16.h>

#include <algorithm>

#include "kernels/hopper/attention/attention.hpp"
#include "kernels/hopper/attention/new_token.cuh"
#include "kernels/hopper/attention/tile_products.cuh"
#include "kernels/hopper/attention/work_items.cuh"
#include "kernels/hopper/common/launch.hpp"

namespace ep::attention {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

// Joins the results of a team in its first warp. Half of the warps give theirs to the other half, repeatedly.
// In the second round a warp writes where it has read itself.
template <uint32_t kSize>
__device__ inline void join(SoftmaxWords* joined, const Team<kSize>& team, Softmax& mine, uint32_t lane) {
  SoftmaxWords* words = joined + team.number * (kSize / 2);
#pragma unroll
  for (uint32_t half = kSize / 2; half != 0; half /= 2) {
    const auto of = [&](uint32_t giver) -> SoftmaxWords& {
      return words[half == kSize / 2 ? giver - half : giver];
    };
    if (team.member >= half && team.member < 2 * half) of(team.member).keep(mine, lane);
    team.meet();
    if (team.member < half) of(team.member + half).add_to(mine, lane);
  }
}

// Writes the result. Called by the team's first warp. A thread has channel lane / 4 of every eight, for two
// heads.
__device__ inline void leave(const Params& p, const Item& item, const Softmax& mine, uint32_t lane) {
  const size_t row = size_t(item.sequence) * p.heads + item.head * p.cache.group;
  if (p.splits == 1) {
    float inverse[2];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) inverse[h] = mine.total[h] == 0 ? 0.0f : 1.0f / mine.total[h];
    auto* out = static_cast<__nv_bfloat16*>(p.work.out) + (row + lane / 4) * kDim + lane % 4 * 2;
#pragma unroll
    for (uint32_t c = 0; c < kDim / 8; ++c) {  // transposed: two channels of head lane / 4
      const float* sums = mine.sums[c / 2] + c % 2 * 2;
      const uint32_t both = transpose(pack(sums[0] * inverse[0], sums[1] * inverse[1]));
      if (lane / 4 < p.cache.group) *reinterpret_cast<uint32_t*>(out + c * 8) = both;
    }
    return;
  }
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    const uint32_t member = lane % 4 * 2 + h;
    if (member >= p.cache.group) continue;
    const size_t part = (row + member) * p.splits + item.split;
#pragma unroll
    for (uint32_t c = 0; c < kDim / 8; ++c)
      p.work.sums[part * kDim + c * 8 + lane / 4] = mine.sums[c / 2][c % 2 * 2 + h];
    if (lane < 4) *reinterpret_cast<float2*>(p.work.stats + part * 2) = float2{mine.top[h], mine.total[h]};
  }
}

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
  for (uint32_t n = 0; n < agenda.count; ++n) {
    const Item item = prepare(p, agenda, n, team, rows, lane, [&] {
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
    join(shared.joined, team, softmax, lane);
    if (team.member == 0) leave(p, item, softmax, lane);
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
  // Every block has an item, so every block waits for the preceding kernel.
  const uint32_t items = params.work.count * params.cache.kv_heads * params.splits;
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

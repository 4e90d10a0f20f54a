// Attention of one token per sequence. A block's warps share the tiles of 16 positions of one (sequence, KV
// head, part of the context) at a time; one more warp asks for tiles, of later items too, as places in the
// ring become free, so the memory has work while a block begins and ends an item.
//
// Tiles are asked for before the kernel ahead has ended: all positions but the token's own were written by
// earlier steps. The token's own key and value come from the projections: every item norms and turns its
// queries, and the one with the last position also writes the key and the value to the cache and into its
// tile. Parts of a context leave unnormalised sums for a kernel that joins them
// (model/triton/paged_decode.py, whose numbers these are: softmax by exp2, running maximum).
#include <cuda_bf16.h>

#include <algorithm>

#include "attention/attention.hpp"
#include "attention/items.cuh"
#include "attention/tile.cuh"
#include "attention/token.cuh"

namespace ep::attention {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

// Adds the warps' sums up and stores them. A thread has four channels of a head.
__device__ inline void leave(const Params& p, const Item& item, const Shared& shared, Softmax& mine,
                             uint32_t warp, uint32_t lane) {
  mine.finish();
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    const uint32_t head = warp * kMostGroup + lane % 4 * 2 + h;
    if (lane < 4) shared.top[head] = mine.top[h], shared.total[head] = mine.total[h];
#pragma unroll
    for (uint32_t c = 0; c < kDim / 16; ++c) {
      float* to = shared.sums + head * kSumsPitch + c * 16 + lane / 4;
      to[0] = mine.sums[c][h], to[8] = mine.sums[c][h + 2];
    }
  }
  meet();
  for (uint32_t i = threadIdx.x; i < p.cache.group * (kDim / 4); i += kWarps * 32) {
    const uint32_t member = i / (kDim / 4), channel = i % (kDim / 4) * 4;
    float top = -INFINITY, total = 0;
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) top = fmaxf(top, shared.top[w * kMostGroup + member]);
    const float shift = top == -INFINITY ? 0 : top;  // nothing seen: no inf - inf
    Four sum{};
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) {
      const uint32_t head = w * kMostGroup + member;
      const float weight = exp2f(shared.top[head] - shift);
      const float4 part = *reinterpret_cast<const float4*>(shared.sums + head * kSumsPitch + channel);
      total = fmaf(shared.total[head], weight, total);
      sum.at[0] = fmaf(part.x, weight, sum.at[0]), sum.at[1] = fmaf(part.y, weight, sum.at[1]);
      sum.at[2] = fmaf(part.z, weight, sum.at[2]), sum.at[3] = fmaf(part.w, weight, sum.at[3]);
    }
    const size_t row = size_t(item.sequence) * p.heads + item.head * p.cache.group + member;
    if (p.splits == 1) {
      const float inverse = total == 0 ? 0.0f : 1.0f / total;
#pragma unroll
      for (float& each : sum.at) each *= inverse;
      *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.work.out) + row * kDim + channel) =
          sum.rounded();
    } else {
      const size_t part = row * p.splits + item.split;
      *reinterpret_cast<float4*>(p.work.sums + part * kDim + channel) =
          float4{sum.at[0], sum.at[1], sum.at[2], sum.at[3]};
      if (channel == 0) *reinterpret_cast<float2*>(p.work.stats + part * 2) = float2{top, total};
    }
  }
}

[[maybe_unused]] __device__ inline void attend(const Params& p, const Shared& shared, uint32_t warp,
                                               uint32_t lane) {
  const float scale = p.rule.scale * kLog2E;
  Agenda agenda(p, lane);
  Place place;  // a warp has every kWarps-th tile of the block, so always the same places of the ring
  place.advance(warp, p.stages);
  uint32_t next = warp;  // its next tile, counted from the item's first
  for (uint32_t n = 0; n < agenda.count; ++n) {
    const Item item = agenda.item(n);
    prepare(p, item, shared.rows, warp, lane);
    Queries queries;
    queries.load(shared.rows, kPitch, lane);
    Softmax softmax;
    for (; next < item.last - item.first; next += kWarps, place.advance(kWarps, p.stages)) {
      await_phase(&shared.full[place.stage], place.parity);
      std::byte* at = shared.tiles + place.stage * kTileBytes;
      const uint32_t tile = item.first + next, seen = min(item.length - tile * kTile, kTile);
      const bool newest = item.newest && tile + 1 == item.last;
      if (newest) complete(at, shared.rows, seen - 1, lane);
      softmax.add(shared_address(at), queries, seen, scale, lane);
      if (newest && n + 1 < agenda.count) publish_to_async();  // copies follow
      __syncwarp();
      if (lane == 0) arrive(&shared.empty[place.stage]);
    }
    next -= item.last - item.first;
    leave(p, item, shared, softmax, warp, lane);
  }
}

__global__ void __launch_bounds__((kWarps + 1) * 32, 2) attend_kernel(const __grid_constant__ Params p) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte memory[];  // a pattern of the swizzle begins at a multiple
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Shared shared(memory, p.stages);
  if (threadIdx.x == kWarps * 32) shared.begin(p.stages);
  if (p.lets_next_start) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  __syncthreads();
  if (warp == kWarps)
    ask(p, shared, lane);
  else
    attend(p, shared, warp, lane);
#else
  __trap();  // Attention refuses other GPUs
#endif
}

}  // namespace

cudaError_t start(cudaStream_t stream, uint32_t blocks, const Params& params) {
  const size_t bytes = Shared::bytes(params.stages);
  // With each launch, as it holds for the current device alone; launches of a step are captured once.
  if (const auto error =
          cudaFuncSetAttribute(attend_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)))
    return error;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  const uint32_t items = params.work.count * params.cache.kv_heads * params.splits;
  config.gridDim = dim3(std::min(items, blocks)), config.blockDim = (kWarps + 1) * 32;
  config.dynamicSmemBytes = bytes, config.stream = stream;
  config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, attend_kernel, params);
}

}  // namespace ep::attention

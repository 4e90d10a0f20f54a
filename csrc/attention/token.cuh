// The token's own query, key and value: from the projections to what attention reads and the cache holds.
#pragma once

#include <cuda_bf16.h>

#include "attention/items.cuh"

namespace ep::attention {

// Four neighbouring channels of a row of the projections, a thread's share of a head.
struct Four {
  float at[4];

  __device__ static Four of(const Work& w, uint32_t sequence, size_t channel) {
    Four mine;
    const size_t from = sequence * w.pitch + channel;
    if (w.parts == 0) return of(static_cast<const __nv_bfloat16*>(w.qkv) + from);
    const float* sums = static_cast<const float*>(w.qkv) + from;
    float4 all = *reinterpret_cast<const float4*>(sums);
    for (uint32_t i = 1; i < w.parts; ++i) {
      const float4 more = *reinterpret_cast<const float4*>(sums + i * w.part);
      all.x += more.x, all.y += more.y, all.z += more.z, all.w += more.w;
    }
    mine = {{all.x, all.y, all.z, all.w}};
#pragma unroll
    for (float& each : mine.at) each = __bfloat162float(__float2bfloat16_rn(each));
    return mine;
  }

  __device__ static Four of(const __nv_bfloat16* from) {
    const uint2 both = *reinterpret_cast<const uint2*>(from);
    const float2 a = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&both.x));
    const float2 b = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&both.y));
    return {{a.x, a.y, b.x, b.y}};
  }

  __device__ void norm(const Four& weight, float eps) {
    float squares = at[0] * at[0] + at[1] * at[1] + at[2] * at[2] + at[3] * at[3];
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
    const float scale = 1.0f / sqrtf(squares / kDim + eps);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) at[i] = at[i] * scale * weight.at[i];
  }

  __device__ void turn(const float4& by) {  // cos and sin of either pair
    const Four was = *this;
    at[0] = was.at[0] * by.x - was.at[1] * by.y, at[1] = was.at[0] * by.y + was.at[1] * by.x;
    at[2] = was.at[2] * by.z - was.at[3] * by.w, at[3] = was.at[2] * by.w + was.at[3] * by.z;
  }

  __device__ uint2 rounded() const { return {pack(at[0], at[1]), pack(at[2], at[3])}; }
};

// The queries, and where the item has the newest position its key and value, as attention reads them. All of
// a warp's rows are asked for at once.
__device__ inline void prepare(const Params& p, const Item& item, std::byte* rows, uint32_t warp,
                               uint32_t lane) {
  constexpr uint32_t kRows = (kMostGroup + 2 + kWarps - 1) / kWarps;
  const uint32_t group = p.cache.group, kv_heads = p.cache.kv_heads, channel = lane * 4;
  const float4 turns =
      reinterpret_cast<const float4*>(p.rule.turns)[size_t(item.position) * (kDim / 4) + lane];
  const auto wanted = [&](uint32_t row) {
    return row < kMostGroup ? row < group : row <= kValue && item.newest;
  };
  // Heads of the projections: all queries', then the keys', then the values'.
  const auto from = [&](uint32_t row) {
    const uint32_t head =
        row < kMostGroup ? item.head * group + row : p.heads + (row - kKey) * kv_heads + item.head;
    return size_t(head) * kDim + channel;
  };
  Four mine[kRows]{}, weights[kRows]{};
#pragma unroll
  for (uint32_t i = 0; i < kRows; ++i) {
    const uint32_t row = warp + i * kWarps;
    if (p.rule.norm != nullptr && row != kValue && wanted(row))
      weights[i] = Four::of(static_cast<const __nv_bfloat16*>(p.rule.norm) + from(row));
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll
  for (uint32_t i = 0; i < kRows; ++i)
    if (wanted(warp + i * kWarps)) mine[i] = Four::of(p.work, item.sequence, from(warp + i * kWarps));
#pragma unroll
  for (uint32_t i = 0; i < kRows; ++i) {
    const uint32_t row = warp + i * kWarps;
    if (row > kValue) break;
    if (row != kValue && wanted(row)) {
      if (p.rule.norm != nullptr) mine[i].norm(weights[i], p.rule.eps);
      mine[i].turn(turns);
    }
    const uint2 rounded = mine[i].rounded();
    reinterpret_cast<uint2*>(rows + row * kPitch)[lane] = rounded;
    if (row < kMostGroup || !item.newest || item.slot < 0) continue;
    void* cache = row == kKey ? p.cache.k : p.cache.v;
    reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(cache) +
                             (size_t(item.slot) * kv_heads + item.head) * kDim)[lane] = rounded;
  }
  meet();
}

// Puts the newest key and value into their tile, and zeros for values behind them: nothing times NaN is NaN.
__device__ inline void complete(std::byte* tile, const std::byte* rows, uint32_t newest, uint32_t lane) {
  const uint32_t of = lane / 16, piece = lane % 16;  // half the warp has the key, half the value
  std::byte* half = tile + piece / 8 * kHalf;
  *reinterpret_cast<uint4*>(half + of * 2 * kHalf + swizzled(newest, piece % 8)) =
      reinterpret_cast<const uint4*>(rows + (kKey + of) * kPitch)[piece];
  for (uint32_t row = newest + 1 + of; row < kTile; row += 2)
    *reinterpret_cast<uint4*>(half + 2 * kHalf + swizzled(row, piece % 8)) = uint4{};
  __syncwarp();
}

}  // namespace ep::attention

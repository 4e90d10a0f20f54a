// Computes the token's own query, key and value from the projections, for attention and for the cache.
#pragma once

#include <cuda_bf16.h>

#include "kernels/hopper/attention/work_items.cuh"

namespace ep::attention {

// Four neighbouring channels of a row of the projections: a thread's share of a head.
struct Four {
  float at[4];

  __device__ static Four of(uint2 both) {
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

  __device__ void turn(const float4& by) {  // by: cos and sin of both pairs
    const Four was = *this;
    at[0] = was.at[0] * by.x - was.at[1] * by.y, at[1] = was.at[0] * by.y + was.at[1] * by.x;
    at[2] = was.at[2] * by.z - was.at[3] * by.w, at[3] = was.at[2] * by.w + was.at[3] * by.z;
  }

  __device__ void add(const float4& more) {
    at[0] += more.x, at[1] += more.y, at[2] += more.z, at[3] += more.w;
  }

  __device__ void round() {
#pragma unroll
    for (float& each : at) each = __bfloat162float(__float2bfloat16_rn(each));
  }

  __device__ uint2 rounded() const { return {pack(at[0], at[1]), pack(at[2], at[3])}; }
};

// Loads several rows of the projections, all requested before the first is used. from: offset of the thread's
// elements in a sequence's row. Calls meanwhile() while the loads are in flight.
template <uint32_t kRows, class Meanwhile>
__device__ inline void fetch(const Work& w, uint32_t sequence, const size_t (&from)[kRows],
                             const bool (&wanted)[kRows], Four (&rows)[kRows], const Meanwhile& meanwhile) {
  const size_t begin = size_t(sequence) * w.pitch;
  if (w.parts == 0) {
    uint2 words[kRows]{};
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i)
      if (wanted[i])
        words[i] =
            *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(w.qkv) + begin + from[i]);
    meanwhile();
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) rows[i] = Four::of(words[i]);
    return;
  }
  constexpr uint32_t kTogether = kRows <= 3 ? 3 : 1;  // parts loaded at once
#pragma unroll 1
  for (uint32_t first = 0; first < w.parts; first += kTogether) {
    float4 parts[kRows][kTogether]{};
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i)
#pragma unroll
      for (uint32_t part = 0; part < kTogether; ++part)
        if (wanted[i] && first + part < w.parts)
          parts[i][part] = *reinterpret_cast<const float4*>(static_cast<const float*>(w.qkv) + begin +
                                                            from[i] + (first + part) * w.part);
    if (first == 0) meanwhile();
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i)
#pragma unroll
      for (uint32_t part = 0; part < kTogether; ++part) rows[i].add(parts[i][part]);
  }
#pragma unroll
  for (Four& row : rows) row.round();
}

// Prepares the queries and, if the item has the newest position, its key and value. Each warp of the team
// prepares some. meanwhile() is called while their loads are in flight.
template <uint32_t kSize, class Meanwhile>
__device__ inline void prepare(const Params& p, const Item& item, const Team<kSize>& team, std::byte* rows,
                               uint32_t lane, const Meanwhile& meanwhile) {
  constexpr uint32_t kRows = (kValue + kSize) / kSize;  // per warp, at most
  const uint32_t group = p.cache.group, kv_heads = p.cache.kv_heads, channel = lane * 4;
  Four mine[kRows]{};
  uint2 weights[kRows]{};
  size_t from[kRows];
  bool wanted[kRows];
#pragma unroll
  for (uint32_t i = 0; i < kRows; ++i) {
    const uint32_t row = team.member + i * kSize;
    // Order of heads in the projections: all queries, then keys, then values.
    const uint32_t head =
        row < kMostGroup ? item.head * group + row : p.heads + (row - kKey) * kv_heads + item.head;
    from[i] = size_t(head) * kDim + channel;
    wanted[i] = row < kMostGroup ? row < group : row <= kValue;
    if (p.rule.norm != nullptr && row != kValue && wanted[i])
      weights[i] = *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(p.rule.norm) + from[i]);
  }
  const float4 turns = static_cast<const float4*>(p.rule.turns)[size_t(item.position()) * (kDim / 4) + lane];
  await_previous_kernel();
  fetch(p.work, item.sequence, from, wanted, mine, meanwhile);
#pragma unroll
  for (uint32_t i = 0; i < kRows; ++i) {
    const uint32_t row = team.member + i * kSize;
    if (row > kValue) break;
    if (row != kValue && wanted[i]) {
      if (p.rule.norm != nullptr) mine[i].norm(Four::of(weights[i]), p.rule.eps);
      mine[i].turn(turns);
    }
    const uint2 rounded = mine[i].rounded();
    reinterpret_cast<uint2*>(rows + row * kPitch)[lane] = rounded;
    if (row < kMostGroup || !item.newest || item.slot < 0) continue;
    void* cache = row == kKey ? p.cache.k : p.cache.v;
    reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(cache) +
                             (size_t(item.slot) * kv_heads + item.head) * kDim)[lane] = rounded;
  }
  team.meet();
}

// Writes the newest key and value into their tile, and zeros for values behind them, because 0 * NaN is NaN.
__device__ inline void complete(std::byte* tile, const std::byte* rows, uint32_t newest, uint32_t lane) {
  const uint32_t of = lane / 16, piece = lane % 16;  // half of the warp copies the key, half the value
  std::byte* half = tile + piece / 8 * kHalf;
  *reinterpret_cast<uint4*>(half + of * 2 * kHalf + swizzled(newest, piece % 8)) =
      reinterpret_cast<const uint4*>(rows + (kKey + of) * kPitch)[piece];
  for (uint32_t row = newest + 1 + of; row < kTile; row += 2)
    *reinterpret_cast<uint4*>(half + 2 * kHalf + swizzled(row, piece % 8)) = uint4{};
  __syncwarp();
}

}  // namespace ep::attention

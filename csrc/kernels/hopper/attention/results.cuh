// What becomes of an item's sums: its warps' are joined, and written, or left for the team that finishes the
// last share of a context. It joins them in the order of shares, so results do not depend on which is last.
#pragma once

#include <cuda_bf16.h>

#include "kernels/hopper/attention/tile_products.cuh"
#include "kernels/hopper/attention/work_items.cuh"

namespace ep::attention {

// Joins the results of a team in its first warp. Half of the warps give theirs to the other half, repeatedly.
// In the second round a warp writes where it has read itself.
template <uint32_t kSize>
__device__ inline void join_team(SoftmaxWords* joined, const Team<kSize>& team, Softmax& mine,
                                 uint32_t lane) {
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

// The first query head of an item, among those of all sequences.
__device__ inline size_t first_head(const Params& p, const Item& item) {
  return size_t(item.sequence) * p.heads + item.head * p.cache.group;
}

// Writes the result of a whole context. Called by the team's first warp. A thread has channel lane / 4 of
// every eight, for two heads.
__device__ inline void write(const Params& p, const Item& item, const Softmax& mine, uint32_t lane) {
  float inverse[2];
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) inverse[h] = mine.total[h] == 0 ? 0.0f : 1.0f / mine.total[h];
  auto* out =
      static_cast<__nv_bfloat16*>(p.work.out) + (first_head(p, item) + lane / 4) * kDim + lane % 4 * 2;
#pragma unroll
  for (uint32_t c = 0; c < kDim / 8; ++c) {  // transposed: two channels of head lane / 4
    const float* sums = mine.sums[c / 2] + c % 2 * 2;
    const uint32_t both = transpose(pack(sums[0] * inverse[0], sums[1] * inverse[1]));
    if (lane / 4 < p.cache.group) *reinterpret_cast<uint32_t*>(out + c * 8) = both;
  }
}

template <class Combine>
__device__ inline float over_warp(float mine, const Combine& combine) {
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) mine = combine(mine, __shfl_xor_sync(~0u, mine, step));
  return mine;
}

// Leaves the sums of a share. Called by the whole team. Returns: whether it was the last one of its context.
template <uint32_t kSize>
__device__ inline bool leave_share(const Params& p, const Shared<kSize>& shared, const Item& item,
                                   const Team<kSize>& team, const Softmax& mine, uint32_t lane) {
  if (team.member == 0) {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t member = lane % 4 * 2 + h;
      if (member >= p.cache.group) continue;
      const size_t row = size_t(item.index) * p.cache.group + member;
#pragma unroll
      for (uint32_t c = 0; c < kDim / 8; ++c)
        p.work.sums[row * kDim + c * 8 + lane / 4] = mine.sums[c / 2][c % 2 * 2 + h];
      if (lane < 4) reinterpret_cast<float2*>(p.work.stats)[row] = float2{mine.top[h], mine.total[h]};
    }
    __threadfence();
    __syncwarp();
    if (lane == 0) {
      uint32_t* counter = p.work.shares.finished + item.index - item.number * p.cache.kv_heads;
      const uint32_t before = atomicAdd(counter, 1);
      if (before + 1 == item.of) *counter = 0;  // for the next launch
      shared.finished[team.number] = before;
      __threadfence();
    }
  }
  team.meet();
  return shared.finished[team.number] + 1 == item.of;
}

// Joins the shares of a context and writes the result. Each warp of the team takes some of the heads, several
// at a time, so that their loads are in flight together. A thread has the maximum and total of one share in
// 32, and four channels of the sums.
template <uint32_t kSize>
__device__ inline void join_shares(const Params& p, const Item& item, const Team<kSize>& team,
                                   uint32_t lane) {
  constexpr uint32_t kAtOnce = kSize >= 4 ? kMostGroup / kSize : 4, kAhead = 16 / kAtOnce;
  const uint32_t group = p.cache.group, step = p.cache.kv_heads * group;  // rows from share to share
  const size_t first = size_t(item.index - item.number * p.cache.kv_heads) * group;
  const auto* stats = reinterpret_cast<const float2*>(p.work.stats) + first;
  const auto* sums = reinterpret_cast<const float4*>(p.work.sums) + first * (kDim / 4) + lane;
  for (uint32_t begin = team.member * kAtOnce; begin < group; begin += kSize * kAtOnce) {
    float4 joined[kAtOnce]{};
    float top[kAtOnce], total[kAtOnce]{}, weight[kAtOnce];
#pragma unroll
    for (float& each : top) each = -INFINITY;
    for (uint32_t base = 0; base < item.of; base += 32) {
      const uint32_t count = min(item.of - base, 32u);
      float4 ahead[kAhead][kAtOnce];
      const auto load = [&](uint32_t from) {
#pragma unroll
        for (uint32_t n = 0; n < kAhead; ++n)
#pragma unroll
          for (uint32_t h = 0; h < kAtOnce; ++h)
            if (from + n < count && begin + h < group)
              ahead[n][h] = __ldcg(sums + (size_t(base + from + n) * step + begin + h) * (kDim / 4));
      };
      load(0);
#pragma unroll
      for (uint32_t h = 0; h < kAtOnce; ++h) {
        float2 own{-INFINITY, 0};
        if (lane < count && begin + h < group) own = __ldcg(stats + size_t(base + lane) * step + begin + h);
        const float higher = fmaxf(top[h], over_warp(own.x, [](float a, float b) { return fmaxf(a, b); }));
        const float shift = higher == -INFINITY ? 0 : higher;  // avoids inf - inf
        const float fade = exp2f(top[h] - shift);
        weight[h] = exp2f(own.x - shift);
        total[h] = total[h] * fade + over_warp(own.y * weight[h], [](float a, float b) { return a + b; });
        joined[h].x *= fade, joined[h].y *= fade, joined[h].z *= fade, joined[h].w *= fade;
        top[h] = higher;
      }
#pragma unroll 1
      for (uint32_t from = 0; from < count; from += kAhead) {
        if (from != 0) load(from);
#pragma unroll
        for (uint32_t n = 0; n < kAhead; ++n)
#pragma unroll
          for (uint32_t h = 0; h < kAtOnce; ++h) {
            const float by = __shfl_sync(~0u, weight[h], (from + n) % 32);
            if (from + n >= count || begin + h >= group) continue;
            joined[h].x = fmaf(ahead[n][h].x, by, joined[h].x);
            joined[h].y = fmaf(ahead[n][h].y, by, joined[h].y);
            joined[h].z = fmaf(ahead[n][h].z, by, joined[h].z);
            joined[h].w = fmaf(ahead[n][h].w, by, joined[h].w);
          }
      }
    }
#pragma unroll
    for (uint32_t h = 0; h < kAtOnce; ++h) {
      if (begin + h >= group) break;
      const float inverse = total[h] == 0 ? 0.0f : 1.0f / total[h];
      auto* out = static_cast<__nv_bfloat16*>(p.work.out) + (first_head(p, item) + begin + h) * kDim;
      reinterpret_cast<uint2*>(out)[lane] = {pack(joined[h].x * inverse, joined[h].y * inverse),
                                             pack(joined[h].z * inverse, joined[h].w * inverse)};
    }
  }
}

}  // namespace ep::attention

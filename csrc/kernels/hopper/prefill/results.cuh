// Where a warpgroup's results go: rows of the output, or sums of a part in scratch memory.
#pragma once

#include "kernels/hopper/prefill/softmax.cuh"

namespace ep::prefill {

inline constexpr uint32_t kQuads = kSums / 4;  // of a thread's sums: two channels of both its rows each
static_assert(kPartFloats == 128 * 4 * (kQuads + 1));

// What a warpgroup leaves of a part: kQuads quads of sums of each of 128 threads, then maxima and totals.
__device__ inline float4* part_at(const Params& p, uint32_t unit, uint32_t group) {
  return reinterpret_cast<float4*>(p.parts + (uint64_t(unit) * kWarpgroups + group) * kPartFloats);
}

// The row of the tile that is a thread's row h.
__device__ inline uint32_t row_in_tile(uint32_t group, uint32_t thread, uint32_t h) {
  return group * 64 + thread / 32 * 16 + thread % 32 / 4 + h * 8;
}

// Of the scores, as Params::scale, with that of the keys.
__device__ inline float scale_of(const Params& p, const Rows& rows) {
  return p.work.k_scale == nullptr ? p.scale : p.scale * p.work.k_scale[rows.head];
}

// Where a row of the tile is written. Null: it belongs to no token.
__device__ inline __nv_bfloat16* row_of(const Params& p, const Rows& rows, uint32_t row) {
  const uint32_t token = row / p.group, member = row % p.group;
  if (token >= min(rows.tokens, p.tile_tokens)) return nullptr;
  const uint64_t at = uint64_t(rows.row + token) * p.work.row_heads + rows.head * p.group + member;
  return static_cast<__nv_bfloat16*>(p.work.out) + at * kDim;
}

// What a row's sums are multiplied by. total: of this thread's positions; its neighbours have the others.
__device__ inline float factor_of(const Params& p, const Rows& rows, float total) {
  total += __shfl_xor_sync(~0u, total, 1);
  total += __shfl_xor_sync(~0u, total, 2);
  const float scale = p.work.v_scale == nullptr ? 1.0f : p.work.v_scale[rows.head];
  return total == 0 ? 0.0f : scale / total;
}

}  // namespace ep::prefill

// Joins the parts of contexts that several blocks have processed, in the order of the parts. A kernel of its
// own, because all multiprocessors can share this work then: a block has one eighth of a warpgroup's
// channels.
#include <algorithm>

#include "kernels/hopper/common/launch.hpp"
#include "kernels/hopper/prefill/results.cuh"

namespace ep::prefill {
namespace {

constexpr uint32_t kBlocksOfTile = kQuads * kWarpgroups;  // of rows
constexpr uint32_t kAtOnce = 16;                          // parts that a thread loads together
constexpr uint64_t kTilesAtOnce = 32;

// Joins a quad of each thread's channels.
__device__ inline void join(const Params& p, const Rows& rows, uint32_t group, uint32_t quad) {
  const uint32_t thread = threadIdx.x;
  const float scale = scale_of(p, rows);
  float top[2] = {-INFINITY, -INFINITY}, total[2]{}, sums[4]{};
#pragma unroll 1
  for (uint32_t base = 0; base < rows.parts; base += kAtOnce) {
    float4 left[kAtOnce], more[kAtOnce];  // left: maxima and totals
#pragma unroll
    for (uint32_t n = 0; n < kAtOnce; ++n) {
      left[n] = {-INFINITY, -INFINITY, 0, 0}, more[n] = {};
      if (base + n >= rows.parts) continue;
      const float4* part = part_at(p, rows.unit + base + n, group) + thread;
      left[n] = part[kQuads * 128], more[n] = part[quad * 128];
    }
    float higher[2] = {top[0], top[1]};
#pragma unroll
    for (const float4& each : left)
      higher[0] = fmaxf(higher[0], each.x), higher[1] = fmaxf(higher[1], each.y);
    // A row that has seen nothing has no maximum: avoid inf - inf.
    const float shift[2] = {higher[0] == -INFINITY ? 0 : higher[0], higher[1] == -INFINITY ? 0 : higher[1]};
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const float fade = exp2_fast((top[h] - shift[h]) * scale);
      total[h] *= fade, sums[2 * h] *= fade, sums[2 * h + 1] *= fade, top[h] = higher[h];
    }
#pragma unroll
    for (uint32_t n = 0; n < kAtOnce; ++n) {
      const float by[2] = {exp2_fast((left[n].x - shift[0]) * scale),
                           exp2_fast((left[n].y - shift[1]) * scale)};
      total[0] = fmaf(left[n].z, by[0], total[0]), total[1] = fmaf(left[n].w, by[1], total[1]);
      sums[0] = fmaf(more[n].x, by[0], sums[0]), sums[1] = fmaf(more[n].y, by[0], sums[1]);
      sums[2] = fmaf(more[n].z, by[1], sums[2]), sums[3] = fmaf(more[n].w, by[1], sums[3]);
    }
  }
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    __nv_bfloat16* out = row_of(p, rows, row_in_tile(group, thread, h));
    const float factor = factor_of(p, rows, total[h]);
    if (out != nullptr)
      *reinterpret_cast<__nv_bfloat162*>(out + quad * 8 + thread % 4 * 2) =
          __floats2bfloat162_rn(sums[2 * h] * factor, sums[2 * h + 1] * factor);
  }
}

__global__ void __launch_bounds__(128) join_kernel(const __grid_constant__ Params p) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  await_previous_kernel();
  let_next_kernel_start();  // the next kernel must wait until this one ends before it reads `out`
  const Plan plan(p, threadIdx.x % 32);
  if (plan.split() == 1) return;
  const uint32_t quad = blockIdx.x % kQuads, group = blockIdx.x / kQuads % kWarpgroups;
  for (uint32_t number = blockIdx.x / kBlocksOfTile; number < plan.total();
       number += gridDim.x / kBlocksOfTile) {
    Rows rows;
    plan.find(number, rows);
    if (rows.parts > 1) join(p, rows, group, quad);
  }
#else
  __trap();  // Prefill rejects other GPUs
#endif
}

}  // namespace

cudaError_t start_join(cudaStream_t stream, uint64_t tiles, const Params& params) {
  const uint32_t blocks = uint32_t(std::min(tiles, kTilesAtOnce)) * kBlocksOfTile;
  return hopper::launch(stream, join_kernel, {blocks, 128, 0}, 0, params);
}

}  // namespace ep::prefill

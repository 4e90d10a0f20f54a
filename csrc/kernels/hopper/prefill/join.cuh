// Joins the parts of contexts that several blocks have processed, in the order of the parts. Blocks that have
// no more items do this, while others still process theirs: they share out the tiles of rows, and the
// channels of a tile.
#pragma once

#include "kernels/hopper/prefill/results.cuh"

namespace ep::prefill {

// What a warpgroup counts in scratch memory for its rows of a tile. Both are 0 between launches.
struct Progress {
  uint32_t left;    // parts in scratch memory
  uint32_t joined;  // shares of the tile
};

__device__ inline Progress* progress_of(const Params& p, const Rows& rows, uint32_t group) {
  return reinterpret_cast<Progress*>(p.counters + 2) + rows.unit * kWarpgroups + group;
}

// Says that a part is in scratch memory. All 128 threads call it.
__device__ inline void count_part(const Params& p, const Rows& rows, uint32_t group, uint32_t thread) {
  meet(group);
  if (thread != 0) return;
  __threadfence();  // covers what the others stored before they met
  atomicAdd(&progress_of(p, rows, group)->left, 1);
}

// Has no deadline: the parts are those of blocks of this launch, none of which waits before its own are done.
__device__ inline void await_parts(const Params& p, const Rows& rows, uint32_t group, uint32_t thread) {
  if (thread == 0) {
    const uint32_t* count = &progress_of(p, rows, group)->left;
    while (load_acquire(count) < rows.parts) {
    }
  }
  meet(group);
}

// Joins some of a thread's rows. kParts: at most.
template <uint32_t kParts>
class Join {
 public:
  // Reads maxima and totals.
  __device__ Join(const Params& p, const Rows& rows, uint32_t group, uint32_t thread)
      : from_(part_at(p, rows.unit, group) + thread), parts_(rows.parts), channel_(thread % 4 * 2) {
    const float scale = scale_of(p, rows);
    float4 ends[kParts];
#pragma unroll
    for (uint32_t n = 0; n < kParts; ++n)
      ends[n] = n < parts_ ? load(n, kQuads) : float4{-INFINITY, -INFINITY, 0, 0};
    float top[2] = {-INFINITY, -INFINITY}, total[2]{};
#pragma unroll
    for (const float4& each : ends) top[0] = fmaxf(top[0], each.x), top[1] = fmaxf(top[1], each.y);
    // A row that has seen nothing has no maximum: avoid inf - inf.
    for (float& each : top) each = each == -INFINITY ? 0 : each;
#pragma unroll
    for (uint32_t n = 0; n < kParts; ++n) {
      by_[n] = {exp2_fast((ends[n].x - top[0]) * scale), exp2_fast((ends[n].y - top[1]) * scale)};
      total[0] = fmaf(ends[n].z, by_[n].x, total[0]), total[1] = fmaf(ends[n].w, by_[n].y, total[1]);
    }
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      out_[h] = row_of(p, rows, row_in_tile(group, thread, h));
      factor_[h] = factor_of(p, rows, total[h]);
    }
  }

  // Sums and writes these quads of channels.
  __device__ void write(uint32_t quad, uint32_t until) const {
#pragma unroll 1
    for (; quad < until; quad += kTogether) {
      float4 sums[kTogether]{};
#pragma unroll
      for (uint32_t first = 0; first < kParts; first += kAtOnce) {
        if (first < parts_) add(quad, until, first, sums);
      }
#pragma unroll
      for (uint32_t q = 0; q < kTogether; ++q) {
        if (quad + q >= until) break;
        store(out_[0], quad + q, sums[q].x * factor_[0], sums[q].y * factor_[0]);
        store(out_[1], quad + q, sums[q].z * factor_[1], sums[q].w * factor_[1]);
      }
    }
  }

 private:
  static constexpr uint32_t kAtOnce = kParts < 16 ? kParts : 16, kTogether = 16 / kAtOnce;  // loads together

  __device__ float4 load(uint32_t part, uint32_t quad) const {
    return __ldcg(from_ + (uint64_t(part) * kWarpgroups * kPartFloats / 4 + quad * 128));
  }

  __device__ void add(uint32_t quad, uint32_t until, uint32_t first, float4 (&sums)[kTogether]) const {
    float4 loaded[kTogether][kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kTogether * kAtOnce; ++i) {
      const uint32_t q = i / kAtOnce, n = i % kAtOnce;
      loaded[q][n] = first + n < parts_ && quad + q < until ? load(first + n, quad + q) : float4{};
    }
#pragma unroll
    for (uint32_t i = 0; i < kTogether * kAtOnce; ++i) {
      const uint32_t q = i / kAtOnce, n = i % kAtOnce;
      const float4 each = loaded[q][n];
      const float2 by = by_[first + n];
      sums[q] = {fmaf(each.x, by.x, sums[q].x), fmaf(each.y, by.x, sums[q].y), fmaf(each.z, by.y, sums[q].z),
                 fmaf(each.w, by.y, sums[q].w)};
    }
  }

  __device__ void store(__nv_bfloat16* row, uint32_t quad, float left, float right) const {
    if (row != nullptr)
      *reinterpret_cast<__nv_bfloat162*>(row + quad * 8 + channel_) = __floats2bfloat162_rn(left, right);
  }

  const float4* from_;
  uint32_t parts_, channel_;
  float2 by_[kParts];  // what the sums of each part are multiplied by, and then all
  float factor_[2];
  __nv_bfloat16* out_[2];
};

// Joins this block's shares of all tiles; a warpgroup has the same rows of each as before.
__device__ inline void join_tiles(const Params& p, uint32_t group, uint32_t thread) {
  const Plan plan(p, thread % 32);
  uint32_t shares = 1;  // of a tile: as many as blocks can take at once
  while (shares < kQuads && plan.total() * shares * 2 <= gridDim.x) shares *= 2;
  const uint32_t width = kQuads / shares;
  for (uint32_t at = blockIdx.x; at < plan.total() * shares; at += gridDim.x) {
    Rows rows;
    plan.find(at / shares, rows);
    if (rows.parts == 1) continue;
    await_parts(p, rows, group, thread);
    const uint32_t quad = at % shares * width;
    if (rows.parts <= 4)
      Join<4>(p, rows, group, thread).write(quad, quad + width);
    else
      Join<kMostParts>(p, rows, group, thread).write(quad, quad + width);
    Progress* progress = progress_of(p, rows, group);
    if (thread == 0 && atomicInc(&progress->joined, shares - 1) == shares - 1) progress->left = 0;
  }
}

}  // namespace ep::prefill

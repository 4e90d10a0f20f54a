// What a warp computes on one tile of 16 positions: tensor core products with keys and channels as the wide
// side and up to eight query heads as the narrow one. The copy engine stores a tile in shared memory as k,
// then v, each as two halves of 64 channels, 128 bytes per row, in the 128-byte swizzle.
//
// Fragments of mma.m16n8k16: thread t has rows t / 4 (+ 8) and columns 2 (t % 4) (+ 1) of a sum.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/hopper/attention/attention.hpp"
#include "kernels/hopper/common/instructions.cuh"

namespace ep::attention {

inline constexpr uint32_t kHalf = kTile * hopper::kSwizzledRow;  // bytes of 64 channels of a tile
static_assert(kTileBytes == 4 * kHalf);

struct Fragment {
  uint32_t part[4];
};

inline constexpr char kAsStored[] = "", kTransposed[] = ".trans";

// Loads four matrices of 8 x 8. address: one of their 32 rows, a different one in each thread.
template <const auto& kOrder>
__device__ inline Fragment load_matrices(uint32_t address) {
  Fragment a;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4%5.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a.part[0]), "=r"(a.part[1]), "=r"(a.part[2]), "=r"(a.part[3])
               : "r"(address), "C"(kOrder)
               : "memory");
  return a;
}

__device__ inline uint32_t transpose(uint32_t matrix) {
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(matrix));
  return turned;
}

__device__ inline void multiply(float (&d)[4], const Fragment& a, const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.part[0]), "r"(a.part[1]), "r"(a.part[2]), "r"(a.part[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// The address of 16 bytes in a half.
__device__ inline uint32_t swizzled(uint32_t row, uint32_t piece) {
  return row * hopper::kSwizzledRow + ((piece ^ (row & 7)) << 4);
}

// The queries of a KV head, [heads, channels], as the narrow side of products over channels.
struct Queries {
  uint32_t part[kDim / 16][2];

  // rows: in shared memory, `pitch` bytes apart.
  __device__ void load(const std::byte* rows, uint32_t pitch, uint32_t lane) {
    const std::byte* at = rows + lane / 4 * pitch + lane % 4 * 4;
#pragma unroll
    for (uint32_t k = 0; k < kDim / 16; ++k) {
      part[k][0] = *reinterpret_cast<const uint32_t*>(at + k * 32);
      part[k][1] = *reinterpret_cast<const uint32_t*>(at + k * 32 + 16);
    }
  }
};

// The softmax state of a warp over the positions so far. A thread has two heads, 2 (t % 4) (+ 1).
struct Softmax {
  float top[2] = {-INFINITY, -INFINITY}, total[2] = {};  // total: for this thread's positions only
  float sums[kDim / 16][4] = {};                         // channels by heads

  // address: of the tile. seen: number of its valid positions, at least one. scale: converts to units of
  // log2.
  __device__ void add(uint32_t address, const Queries& q, uint32_t seen, float scale, uint32_t lane) {
    float p[4];  // of positions lane / 4 (+ 8) for both heads
    score(p, address, q, lane);
    float fade[2];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      p[h] = lane / 4 < seen ? p[h] * scale : -INFINITY;  // positions behind the end may hold anything
      p[h + 2] = lane / 4 + 8 < seen ? p[h + 2] * scale : -INFINITY;
      const float higher = fmaxf(top[h], highest(fmaxf(p[h], p[h + 2])));
      fade[h] = exp2f(top[h] - higher);
      top[h] = higher;
      p[h] = exp2f(p[h] - higher), p[h + 2] = exp2f(p[h + 2] - higher);
      total[h] = fmaf(total[h], fade[h], p[h] + p[h + 2]);
    }
    if (__any_sync(~0u, fade[0] != 1.0f || fade[1] != 1.0f)) {
#pragma unroll
      for (auto& sum : sums) sum[0] *= fade[0], sum[1] *= fade[1], sum[2] *= fade[0], sum[3] *= fade[1];
    }
    const uint32_t weights[2] = {transpose(pack(p[0], p[1])), transpose(pack(p[2], p[3]))};
    const uint32_t values = address + 2 * kHalf, row = lane % 8 + lane / 16 * 8;
#pragma unroll
    for (uint32_t c = 0; c < kDim / 16; ++c)
      multiply(sums[c],
               load_matrices<kTransposed>(values + c / 4 * kHalf + swizzled(row, c % 4 * 2 + lane / 8 % 2)),
               weights);
  }

  // Adds up the totals of the whole warp.
  __device__ void finish() {
#pragma unroll
    for (float& each : total)
#pragma unroll
      for (uint32_t step = 4; step < 32; step *= 2) each += __shfl_xor_sync(~0u, each, step);
  }

 private:
  // Two chains of products: with one, each product would wait for the previous one.
  __device__ static void score(float (&p)[4], uint32_t address, const Queries& q, uint32_t lane) {
    float odd[4] = {};
    const uint32_t row = lane % 16;
#pragma unroll
    for (float& each : p) each = 0;
#pragma unroll
    for (uint32_t k = 0; k < kDim / 16; k += 2) {
      const uint32_t half = address + k / 4 * kHalf, piece = k % 4 * 2 + lane / 16;
      multiply(p, load_matrices<kAsStored>(half + swizzled(row, piece)), q.part[k]);
      multiply(odd, load_matrices<kAsStored>(half + swizzled(row, piece + 2)), q.part[k + 1]);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) p[i] += odd[i];
  }

  __device__ static float highest(float mine) {
#pragma unroll
    for (uint32_t step = 4; step < 32; step *= 2) mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, step));
    return mine;
  }
};

// A warp's Softmax in shared memory, for another warp to read.
struct SoftmaxWords {
  float4 sums[kDim / 16][32], rest[32];  // by lane; rest: maxima and totals

  __device__ void keep(const Softmax& from, uint32_t lane) {
#pragma unroll
    for (uint32_t c = 0; c < kDim / 16; ++c)
      sums[c][lane] = {from.sums[c][0], from.sums[c][1], from.sums[c][2], from.sums[c][3]};
    rest[lane] = {from.top[0], from.top[1], from.total[0], from.total[1]};
  }

  __device__ void add_to(Softmax& to, uint32_t lane) const {
    const float top[2] = {rest[lane].x, rest[lane].y}, total[2] = {rest[lane].z, rest[lane].w};
    float own[2], other[2];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const float higher = fmaxf(to.top[h], top[h]);
      const float shift = higher == -INFINITY ? 0 : higher;  // no position so far: avoid inf - inf
      own[h] = exp2f(to.top[h] - shift), other[h] = exp2f(top[h] - shift);
      to.top[h] = higher;
      to.total[h] = fmaf(total[h], other[h], to.total[h] * own[h]);
    }
#pragma unroll
    for (uint32_t c = 0; c < kDim / 16; ++c) {
      const float4 more = sums[c][lane];
      to.sums[c][0] = fmaf(more.x, other[0], to.sums[c][0] * own[0]);
      to.sums[c][1] = fmaf(more.y, other[1], to.sums[c][1] * own[1]);
      to.sums[c][2] = fmaf(more.z, other[0], to.sums[c][2] * own[0]);
      to.sums[c][3] = fmaf(more.w, other[1], to.sums[c][3] * own[1]);
    }
  }
};

}  // namespace ep::attention

// A warpgroup's scores, running softmax and sums of values, in registers.
#pragma once

#include <cuda_bf16.h>

#include "kernels/hopper/common/products.cuh"
#include "kernels/hopper/prefill/tiles.cuh"

namespace ep::prefill {

inline constexpr uint32_t kScores = kPositions / 2, kSums = kDim / 2;  // of a thread: two rows

// Values of a tile as the second operand: channels are its rows, but positions are contiguous rows of memory.
__device__ inline uint64_t values_operand(uint32_t address) {
  constexpr uint64_t kNextChannels = uint64_t(kSliceBytes >> 4) << 16, kOwn = ~(0x3fffull << 16);
  return (operand(address) & kOwn) | kNextChannels;
}

// Score 4 j + 2 h + c belongs to the thread's row h and position 8 j + 2 * (lane % 4) + c of the tile.
struct Softmax {
  float scores[kScores], sums[kSums];
  uint32_t weights[kScores / 2];  // pairs of bfloat16, as add_values() takes them
  float top[2], total[2];         // of the thread's rows; total: of this thread's positions only
  float fade[2];                  // what the last step() multiplies the sums by

  __device__ void begin() {
#pragma unroll
    for (uint32_t i = 0; i < kSums; ++i) sums[i] = 0;
    top[0] = top[1] = -INFINITY, total[0] = total[1] = 0;
  }

  // Leaves out positions from seen[h] on, counted from the tile's first.
  __device__ void mask(const int32_t (&seen)[2], uint32_t lane) {
#pragma unroll
    for (uint32_t i = 0; i < kScores; ++i) {
      const int32_t position = int32_t(i / 4 * 8 + lane % 4 * 2 + i % 2);
      if (position >= seen[i / 2 % 2]) scores[i] = -INFINITY;
    }
  }

  // Scores become weights that are not rounded yet. Several maxima and sums at a time: each is a chain of
  // dependent instructions, and few other warps could fill its gaps.
  __device__ void step(float scale) {
    constexpr uint32_t kChains = 4;
    float shift[2];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      float most[kChains];
#pragma unroll
      for (uint32_t i = 0; i < kScores / 2; ++i) {
        const float score = scores[i / 2 * 4 + 2 * h + i % 2];
        most[i % kChains] = i < kChains ? score : fmaxf(most[i % kChains], score);
      }
      shift[h] = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    }
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      float most = fmaxf(top[h], shift[h]);
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      shift[h] = most == -INFINITY ? 0.0f : most * scale;
      fade[h] = exp2_fast(__fmaf_rn(top[h], scale, -shift[h]));
      top[h] = most;
    }
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      float sum[kChains];
#pragma unroll
      for (uint32_t i = 0; i < kScores / 2; ++i) {
        float& score = scores[i / 2 * 4 + 2 * h + i % 2];
        score = exp2_fast(__fmaf_rn(score, scale, -shift[h]));
        sum[i % kChains] = i < kChains ? score : sum[i % kChains] + score;
      }
      total[h] = __fmaf_rn(total[h], fade[h], (sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
  }

  __device__ void round_weights() {
#pragma unroll
    for (uint32_t i = 0; i < kScores / 2; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(scores[2 * i], scores[2 * i + 1]);
      weights[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }

  __device__ void fade_sums() {
#pragma unroll
    for (uint32_t i = 0; i < kSums; ++i) sums[i] *= fade[i / 2 % 2];
  }
};

}  // namespace ep::prefill

// The weighted sum of rows, as both halves of combine need it: float32 from +0, multiply then add, in order,
// rounded once. Knows neither ranks nor layouts.
#pragma once

#include "cuda/memory.cuh"
#include "ep/quant.hpp"

namespace ep::cuda {

// In shared memory: which rows a block sums, in order.
struct Terms {
  const std::byte* row[kMaxTopK];
  float weight[kMaxTopK];
  uint32_t k[kMaxTopK];  // which choice it is, where that matters
  uint32_t count, failed;
};

__device__ __forceinline__ float low_half(uint32_t word) { return float_of(word << 16); }
__device__ __forceinline__ float high_half(uint32_t word) { return float_of(word & 0xffff0000u); }

// Two floats to bf16, nearest even; the first in the low half.
__device__ __forceinline__ uint32_t to_bf16x2(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

constexpr uint32_t kInFlight = 4;  // rows loaded before the first is used

__device__ __forceinline__ uint4 sum_terms16(const Terms& terms, uint32_t at) {
  float sum[8] = {};
#pragma unroll 1
  for (uint32_t i = 0; i < terms.count; i += kInFlight) {
    uint4 v[kInFlight];
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j)
      if (i + j < terms.count) v[j] = load16(terms.row[i + j] + at);
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (i + j >= terms.count) break;
      const float w = terms.weight[i + j];
      const uint32_t words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
      for (uint32_t p = 0; p < 4; ++p) {
        sum[2 * p] = __fadd_rn(sum[2 * p], __fmul_rn(w, low_half(words[p])));
        sum[2 * p + 1] = __fadd_rn(sum[2 * p + 1], __fmul_rn(w, high_half(words[p])));
      }
    }
  }
  return {to_bf16x2(sum[0], sum[1]), to_bf16x2(sum[2], sum[3]), to_bf16x2(sum[4], sum[5]),
          to_bf16x2(sum[6], sum[7])};
}

// Bytes [begin, end) of the sum.
template <uint32_t kBytes>
__device__ __forceinline__ void sum_to(const Terms& terms, std::byte* to, uint32_t begin, uint32_t end) {
#pragma unroll 1
  for (uint32_t at = begin + threadIdx.x * kBytes; at < end; at += blockDim.x * kBytes) {
    if constexpr (kBytes == 16) {
      store16(to + at, sum_terms16(terms, at));
    } else {
      float sum = 0.0f;
      for (uint32_t i = 0; i < terms.count; ++i)
        sum = __fadd_rn(sum, __fmul_rn(terms.weight[i], bf16_to_float(Word<2>::load(terms.row[i] + at))));
      Word<2>::store(to + at, float_to_bf16(sum));
    }
  }
}

// Where part `part` of `parts` of a row of `bytes` begins; part == parts: its end.
__device__ __forceinline__ uint32_t part_at(uint32_t bytes, uint32_t part, uint32_t parts) {
  return part == parts ? bytes : part * (bytes / parts / 64 * 64);
}

}  // namespace ep::cuda

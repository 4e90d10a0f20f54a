// What a layer ends with, in the block that has summed a token's answers: the sum goes to the residual
// stream, and the RMS norm of that is what the next layer reads.
//
//   residual = round(residual + round(sum [+ shared]))      bf16, as it is stored
//   out      = round(residual / sqrt(mean(residual^2) + eps) * weight)
//
// One block to a token; each thread has its own words of the row from start to end. What it added last stays
// in registers, the rest of a wide row is read again: shared memory is the next kernel's, which is set up
// beside this one. All arithmetic is float32, no multiply is fused with an add.
#pragma once

#include "cuda/sum.cuh"

namespace ep::cuda {

// 2 or 8 channels of a + b, rounded. Minus zero stays where both are.
__device__ __forceinline__ uint32_t added(uint32_t a, uint32_t b) {
  return to_bf16x2(__fadd_rn(low_half(a), low_half(b)), __fadd_rn(high_half(a), high_half(b)));
}
__device__ __forceinline__ uint4 added(const uint4& a, const uint4& b) {
  return {added(a.x, b.x), added(a.y, b.y), added(a.z, b.z), added(a.w, b.w)};
}

__device__ __forceinline__ float squares(uint32_t v) {
  return __fadd_rn(__fmul_rn(low_half(v), low_half(v)), __fmul_rn(high_half(v), high_half(v)));
}
__device__ __forceinline__ float squares(const uint4& v) {
  return __fadd_rn(__fadd_rn(squares(v.x), squares(v.y)), __fadd_rn(squares(v.z), squares(v.w)));
}

__device__ __forceinline__ uint32_t normed(uint32_t v, uint32_t weight, float scale) {
  return to_bf16x2(__fmul_rn(__fmul_rn(low_half(v), scale), low_half(weight)),
                   __fmul_rn(__fmul_rn(high_half(v), scale), high_half(weight)));
}
__device__ __forceinline__ uint4 normed(const uint4& v, const uint4& weight, float scale) {
  return {normed(v.x, weight.x, scale), normed(v.y, weight.y, scale), normed(v.z, weight.z, scale),
          normed(v.w, weight.w, scale)};
}

// A token's row, of which a thread has kWords words of 16 bytes at a time: `at`, and `step` beyond.
struct EndOfLayer {
  const AddNorm& a;
  uint32_t token, bytes;
  uint4 stream[kWords], weights[kWords];  // of the words that were added last

  __device__ __forceinline__ uint64_t begin() const { return uint64_t(token) * bytes; }
  static __device__ __forceinline__ uint32_t step() { return blockDim.x * 16; }
  __device__ __forceinline__ std::byte* residual(uint32_t at) const {
    return static_cast<std::byte*>(a.residual) + begin() + at;
  }
  __device__ __forceinline__ const std::byte* weight(uint32_t at) const {
    return static_cast<const std::byte*>(a.weight) + at;
  }

  // What is read once rows have come is on its way while they are awaited.
  __device__ __forceinline__ void expect() const {
#pragma unroll 1
    for (uint32_t at = threadIdx.x * 16; at < bytes; at += step()) {
      expect_line(residual(at));
      expect_line(weight(at));
    }
  }

  // Adds a token's sum at two words; the squares of what is stored.
  __device__ __forceinline__ float add(uint32_t at, const Sum (&sum)[kWords]) {
    uint4 branch[kWords];
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      branch[w] = sum[w].rounded();
      stream[w] = weights[w] = {};  // none of before is held while rows are awaited
      if (at + w * step() >= bytes) continue;
      stream[w] = load16_again(residual(at + w * step()));
      weights[w] = load16_again(weight(at + w * step()));
    }
    float mine = 0.0f;
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      if (at + w * step() >= bytes) continue;
      if (a.shared != nullptr)
        branch[w] =
            added(branch[w], load16(static_cast<const std::byte*>(a.shared) + begin() + at + w * step()));
      stream[w] = added(branch[w], stream[w]);
      store16(residual(at + w * step()), stream[w]);
      mine = __fadd_rn(mine, squares(stream[w]));
    }
    return mine;
  }

  // The stream, normed.
  __device__ __forceinline__ void store(void* out, float scale) const {
#pragma unroll 1
    for (uint32_t at = threadIdx.x * 16; at < bytes; at += kWords * step()) {
      const bool last = bytes - at <= kWords * step();
#pragma unroll
      for (uint32_t w = 0; w < kWords; ++w) {
        const uint32_t i = at + w * step();
        if (i >= bytes) continue;
        const uint4 v = last ? stream[w] : load16_again(residual(i));
        store16(static_cast<std::byte*>(out) + begin() + i,
                normed(v, last ? weights[w] : load16_again(weight(i)), scale));
      }
    }
  }
};

// The sum of all threads, in an order that the number of threads decides; `any`: of any thread. turn: how
// often the block did this before. The whole block calls it.
__device__ __forceinline__ float sum_of_block(float mine, uint32_t turn, bool& any) {
  __shared__ float of_warps[2][kMaxWarps];  // the next turn writes the other half: one barrier is enough
#pragma unroll
  for (uint32_t by = kWarp / 2; by != 0; by /= 2) mine = __fadd_rn(mine, __shfl_xor_sync(kFull, mine, by));
  float* sums = of_warps[turn & 1];
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = mine;
  any = __syncthreads_or(any);
  float all = 0.0f;
#pragma unroll 1
  for (uint32_t w = 0; w < blockDim.x / kWarp; ++w) all = __fadd_rn(all, sums[w]);
  return all;
}

}  // namespace ep::cuda

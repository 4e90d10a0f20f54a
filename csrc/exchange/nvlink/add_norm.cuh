// Ends a layer in the block that has summed a token's expert outputs: adds the sum to the residual stream and
// writes its RMS norm, which the next layer reads.
//
//   residual = round(residual + round(sum [+ shared]))      bf16, as it is stored
//   out      = round(residual / sqrt(mean(residual^2) + eps) * weight)
//
// One block per token. Each thread owns the same words of the row throughout. Addends and factors are loaded
// into registers before the sums arrive. The words added last stay in registers. The rest of a wide row is
// read again: shared memory belongs to the next kernel, which is set up beside this one. All arithmetic is
// float32; multiplies and adds are never fused.
#pragma once

#include "exchange/nvlink/weighted_sum.cuh"

namespace ep::cuda {

constexpr uint32_t kNormRows = 4;  // rows for which a thread awaits kWords words at once

// a + b in 2 or 8 channels, rounded. The sum of two minus zeros is minus zero.
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

// A token's row. A thread holds kWords words of 16 bytes at a time, the first at `at`, the next `step` bytes
// further. Words behind the end are zero.
struct EndOfLayer {
  const AddNorm& a;
  uint32_t token, bytes, last;            // last: where the words of the last ask() begin
  uint4 stream[kWords], weights[kWords];  // the words of the last ask()

  __device__ __forceinline__ uint64_t begin() const { return uint64_t(token) * bytes; }
  static __device__ __forceinline__ uint32_t step() { return blockDim.x * 16; }
  __device__ __forceinline__ std::byte* residual(uint32_t at) const {
    return static_cast<std::byte*>(a.residual) + begin() + at;
  }
  __device__ __forceinline__ const std::byte* weight(uint32_t at) const {
    return static_cast<const std::byte*>(a.weight) + at;
  }

  // Loads what is needed once the rows have arrived, so that the loads overlap the wait. They go to
  // registers, because every acquire by another block invalidates the first-level cache.
  __device__ __forceinline__ void ask(uint32_t at) {
    last = at;
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      stream[w] = weights[w] = {};
      if (at + w * step() >= bytes) continue;
      stream[w] = load16(residual(at + w * step()));
      weights[w] = load16_again(weight(at + w * step()));
    }
  }

  // Adds a token's sum to the words of the last ask(). Returns the squares of what it stored, summed.
  __device__ __forceinline__ float add(const Sum (&sum)[kWords]) {
    const uint32_t at = last;
    uint4 branch[kWords];
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) branch[w] = sum[w].rounded();
    if (a.shared != nullptr) {
      const std::byte* shared = static_cast<const std::byte*>(a.shared) + begin() + at;
      uint4 more[kWords];
#pragma unroll
      for (uint32_t w = 0; w < kWords; ++w)
        more[w] = at + w * step() < bytes ? load16(shared + w * step()) : uint4{};
#pragma unroll
      for (uint32_t w = 0; w < kWords; ++w) branch[w] = added(branch[w], more[w]);
    }
    float mine = 0.0f;
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      stream[w] = added(branch[w], stream[w]);
      if (at + w * step() < bytes) store16(residual(at + w * step()), stream[w]);
      mine = __fadd_rn(mine, squares(stream[w]));
    }
    return mine;
  }

  // Writes the normed stream. Words in registers come first.
  __device__ __forceinline__ void store(void* out, float scale) const {
    std::byte* to = static_cast<std::byte*>(out) + begin();
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w)
      if (last + w * step() < bytes) store16(to + last + w * step(), normed(stream[w], weights[w], scale));
#pragma unroll 1
    for (uint32_t at = threadIdx.x * 16; at < last; at += step())
      store16(to + at, normed(load16(residual(at)), load16_again(weight(at)), scale));
  }
};

// The sum over all threads. Its order depends only on the number of threads. `any`: becomes true if it is
// true in one thread. turn: number of earlier calls in this block. The whole block calls it.
__device__ __forceinline__ float sum_of_block(float mine, uint32_t turn, bool& any) {
  __shared__ float of_warps[2][kMaxWarps];  // turns alternate between the halves, so one barrier is enough
#pragma unroll
  for (uint32_t by = kWarp / 2; by != 0; by /= 2) mine = __fadd_rn(mine, __shfl_xor_sync(kFull, mine, by));
  float* sums = of_warps[turn & 1];
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = mine;
  any = __syncthreads_or(any);
  float all = 0.0f;
#pragma unroll
  for (uint32_t w = 0; w < kMaxWarps; ++w)
    if (w < blockDim.x / kWarp) all = __fadd_rn(all, sums[w]);
  return all;
}

}  // namespace ep::cuda

// What a layer ends with, in the block that has summed a token's answers: the sum goes to the residual
// stream, and the RMS norm of that is what the next layer reads.
//
//   residual = round(residual + round(sum [+ shared]))      bf16, as it is stored
//   out      = round(residual / sqrt(mean(residual^2) + eps) * weight)
//
// One block to a token; each thread has its own words of the row from start to end, in dynamic shared memory:
// the weight's row, then the stream's. All arithmetic is float32, no multiply is fused with an add.
#pragma once

#include "cuda/sum.cuh"

namespace ep::cuda {

struct Held {
  std::byte *weight, *stream;
};
__device__ __forceinline__ Held held_rows(uint32_t bytes) {
  auto* all = reinterpret_cast<std::byte*>(dynamic_shared());
  return {all, all + bytes};
}

// The thread's words of a row, on their way to shared memory until await_fetched().
__device__ __forceinline__ void fetch_row(std::byte* held, const void* row, uint32_t bytes) {
#pragma unroll 1
  for (uint32_t at = threadIdx.x * 16; at < bytes; at += blockDim.x * 16)
    fetch16(held + at, static_cast<const std::byte*>(row) + at);
}

// 8 channels of a + b, rounded. Minus zero stays where both are.
__device__ __forceinline__ uint32_t added(uint32_t a, uint32_t b) {
  return to_bf16x2(__fadd_rn(low_half(a), low_half(b)), __fadd_rn(high_half(a), high_half(b)));
}
__device__ __forceinline__ uint4 added(const uint4& a, const uint4& b) {
  return {added(a.x, b.x), added(a.y, b.y), added(a.z, b.z), added(a.w, b.w)};
}

__device__ __forceinline__ float squares(uint32_t two) {
  return __fadd_rn(__fmul_rn(low_half(two), low_half(two)), __fmul_rn(high_half(two), high_half(two)));
}

// Adds 16 bytes of a token's sum to the stream; the squares of what is stored. begin: of the token's row.
__device__ __forceinline__ float add_to_stream(const AddNorm& a, std::byte* held, uint64_t begin, uint32_t at,
                                               uint4 branch) {
  if (a.shared != nullptr)
    branch = added(branch, load16(static_cast<const std::byte*>(a.shared) + begin + at));
  auto* stream = reinterpret_cast<uint4*>(held + at);
  const uint4 stored = added(branch, *stream);
  *stream = stored;
  store16(static_cast<std::byte*>(a.residual) + begin + at, stored);
  return __fadd_rn(__fadd_rn(squares(stored.x), squares(stored.y)),
                   __fadd_rn(squares(stored.z), squares(stored.w)));
}

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

__device__ __forceinline__ uint32_t normed(uint32_t two, uint32_t weight, float scale) {
  return to_bf16x2(__fmul_rn(__fmul_rn(low_half(two), scale), low_half(weight)),
                   __fmul_rn(__fmul_rn(high_half(two), scale), high_half(weight)));
}

// The thread's words of the stream, normed, to `out`.
__device__ __forceinline__ void store_normed(const Held& held, float scale, std::byte* out, uint32_t bytes) {
#pragma unroll 1
  for (uint32_t at = threadIdx.x * 16; at < bytes; at += blockDim.x * 16) {
    const uint4 v = *reinterpret_cast<const uint4*>(held.stream + at);
    const uint4 w = *reinterpret_cast<const uint4*>(held.weight + at);
    store16(out + at, {normed(v.x, w.x, scale), normed(v.y, w.y, scale), normed(v.z, w.z, scale),
                       normed(v.w, w.w, scale)});
  }
}

}  // namespace ep::cuda

// bf16 to e4m3 with one scale per 128 channels, in registers, with the arithmetic of
// exchange/common/quant.hpp.
#pragma once

#include "exchange/common/quant.hpp"
#include "exchange/nvlink/peer_slots.cuh"

namespace ep::cuda {

__device__ __forceinline__ float low_half(uint32_t word) { return float_of(word << 16); }
__device__ __forceinline__ float high_half(uint32_t word) { return float_of(word & 0xffff0000u); }

constexpr uint32_t kNanCodes = 0x7f7f7f7f;

// GPUs before Ada have no instruction for this and use integer arithmetic.
__device__ __forceinline__ uint32_t to_e4m3x2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
#else
  return float_to_e4m3(low) | uint32_t(float_to_e4m3(high)) << 8;
#endif
}

__device__ __forceinline__ void from_e4m3x2(uint16_t both, float* low, float* high) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(both));
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
      : "=f"(*low), "=f"(*high)
      : "r"(halves));
#else
  *low = e4m3_to_float(uint8_t(both));
  *high = e4m3_to_float(uint8_t(both >> 8));
#endif
}

// The maximum over the 8 lanes of a group of 128 channels. These are every second lane: see pair_up().
__device__ __forceinline__ uint32_t max_of_group(uint32_t value) {
#pragma unroll
  for (uint32_t by = 8; by >= 2; by /= 2) value = max(value, __shfl_xor_sync(kFull, value, by));
  return value;
}

// A warp has loaded 32 units of 32 bytes as two runs of 512 bytes without gaps: lane n has 16 bytes of each.
// Neighbours exchange, so that each lane has one whole unit: even lanes get 0 to 15, odd ones 16 to 31.
__device__ __forceinline__ uint32_t paired_unit(uint32_t unit) {  // unit: of the lane's own number
  const uint32_t lane = threadIdx.x % kWarp;
  return unit - lane + lane % 2 * (kWarp / 2) + lane / 2;
}
template <class T>
__device__ __forceinline__ void pair_up(T& low, T& high) {
  const bool odd = threadIdx.x % 2 != 0;
  const T other = __shfl_xor_sync(kFull, odd ? low : high, 1);
  (odd ? low : high) = other;
}
__device__ __forceinline__ void pair_up(uint4& low, uint4& high) {
  pair_up(low.x, high.x);
  pair_up(low.y, high.y);
  pair_up(low.z, high.z);
  pair_up(low.w, high.w);
}

// 16 channels per lane, 8 lanes per group, as e4m3. The receiver multiplies by `scale`.
__device__ __forceinline__ uint4 quantise16(const uint4& a, const uint4& b, bool power_of_two, float* scale) {
  const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  uint32_t most = 0;
#pragma unroll
  for (uint32_t word : words) {
    most = max(most, word << 16 & 0x7fffffffu);
    most = max(most, word & 0x7fff0000u);
  }
  const Scale by = scale_of(max_of_group(most), power_of_two);
  *scale = by.stored;
  uint32_t out[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t p = words[2 * i], q = words[2 * i + 1];
    out[i] = to_e4m3x2(low_half(p) * by.multiply, high_half(p) * by.multiply) |
             to_e4m3x2(low_half(q) * by.multiply, high_half(q) * by.multiply) << 16;
  }
  return {out[0], out[1], out[2], out[3]};
}

}  // namespace ep::cuda

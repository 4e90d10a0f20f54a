// Numbers as the sum of two e4m3 codes, a high and a low one of four bits each: together the eight bits of
// bfloat16. A group of numbers shares a power-of-two scale. Numbers below 2^-9 of the group's largest keep
// fewer bits; no error exceeds 2^-17 of the largest.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace ep::experts {

// The scale of a group. It brings the largest magnitude, given as float bits without the sign, into 128 up to
// below 256. In that range, two codes hold all bits of most values. NaN if the group is not finite.
struct GroupScale {
  float scale, inverse;

  __device__ explicit GroupScale(uint32_t largest) {
    constexpr uint32_t kInfinite = 0x7f800000, kNan = 0x7fc00000;
    const uint32_t exponent = max(largest >> 23, 8u) - 7;  // any value works for zero and tiny numbers
    scale = __uint_as_float(largest < kInfinite ? exponent << 23 : kNan);
    inverse = __uint_as_float((254 - exponent) << 23);
  }
};

__device__ inline uint32_t magnitude(float value) { return __float_as_uint(value) & 0x7fffffff; }

// Two channels' codes, the first in the low byte.
struct CodePair {
  uint16_t high, low;

  // first, second: values, multiplied by the inverse of their scale.
  __device__ CodePair(float first, float second) {
    const float2 pair{first, second};
    high = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    const float2 held = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(high, __NV_E4M3)));
    low = __nv_cvt_float2_to_fp8x2({first - held.x, second - held.y}, __NV_SATFINITE, __NV_E4M3);
  }
};

}  // namespace ep::experts

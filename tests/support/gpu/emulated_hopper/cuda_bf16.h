// bfloat16 as the Hopper kernels use it: rounded to nearest, ties to even.
#pragma once

#include <cuda_runtime.h>

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

namespace emulated {
inline float widened(uint16_t bits) { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
inline __nv_bfloat16 rounded(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if (value != value) return {0x7fff};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
}  // namespace emulated

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {emulated::rounded(x), emulated::rounded(y)};
}

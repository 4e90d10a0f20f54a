// csrc/kernels/hopper/common/products.cuh on a CPU: each thread multiplies its own part of the sum, at once.
#pragma once

#include <cuda_bf16.h>

#include "kernels/hopper/common/instructions.cuh"

namespace ep::hopper {

inline float number_at(uint32_t address) {
  uint16_t bits;
  std::memcpy(&bits, swizzled(address), 2);
  return emulated::widened(bits);
}
inline uint32_t own_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

template <int kRows>
struct Product {
  template <int kSums>
  static void run(float (&d)[kSums], uint64_t a, uint64_t b, int add) {
    for (uint32_t h = 0; h < 2; ++h) {
      float left[16];
      for (uint32_t k = 0; k < 16; ++k)
        left[k] = number_at(address_of(a) + (own_row() + 8 * h) * kSwizzledRow + 2 * k);
      for (uint32_t i = 0; i < kRows / 4; ++i) {
        const uint32_t column = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        float sum = 0;
        for (uint32_t k = 0; k < 16; ++k)
          sum += left[k] * number_at(address_of(b) + column * kSwizzledRow + 2 * k);
        float& to = d[i / 2 * 4 + 2 * h + i % 2];
        to = add ? to + sum : sum;
      }
    }
  }
};

template <class Number, uint32_t kCount>
void pin(Number (&)[kCount]) {}

// b: slices of 64 columns lie so many 16-byte units apart as its bits 16 to 29 say.
inline void add_values(float (&d)[64], const uint32_t* a, uint64_t b) {
  const uint32_t slice = uint32_t(b >> 16 & 0x3fff) << 4;
  uint32_t pairs[2][8];
  for (uint32_t i = 0; i < 4; ++i)
    for (uint32_t q = 0; q < 4; ++q)
      pairs[i % 2][i / 2 * 4 + q] = __shfl_sync(~0u, a[i], threadIdx.x % 32 / 4 * 4 + q);
  for (uint32_t i = 0; i < 32; ++i) {
    const uint32_t column = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
    float sums[2]{};
    for (uint32_t k = 0; k < 16; ++k) {
      const float value = number_at(address_of(b) + column / 64 * slice + k * kSwizzledRow + column % 64 * 2);
      for (uint32_t h = 0; h < 2; ++h)
        sums[h] += emulated::widened(uint16_t(pairs[h][k / 2] >> k % 2 * 16)) * value;
    }
    for (uint32_t h = 0; h < 2; ++h) d[i / 2 * 4 + 2 * h + i % 2] += sums[h];
  }
}

}  // namespace ep::hopper

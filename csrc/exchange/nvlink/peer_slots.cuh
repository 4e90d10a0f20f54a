// Memory between GPUs as the kernels see it: rows, slots that a peer fills, words with an epoch.
#pragma once

#include "exchange/nvlink/access.cuh"
#include "exchange/nvlink/state.hpp"

namespace ep::cuda {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kMaxWarps = 7;  // of a block
constexpr uint32_t kFull = 0xffffffffu;
constexpr uint32_t kNothing = 0xffffffffu;  // value of every word of an empty slot

// -- slots: written by a peer, polled, made empty again ------------------------------------------------

__device__ __forceinline__ bool came(const uint4& v) { return max(max(v.x, v.y), max(v.z, v.w)) != kNothing; }
__device__ __forceinline__ bool came(const uint2& v) { return max(v.x, v.y) != kNothing; }
__device__ __forceinline__ bool came(uint32_t v) { return v != kNothing; }

// A word of the caller may be all ones: two NaNs. This changes a bit and keeps them NaN.
__device__ __forceinline__ uint32_t sendable(uint32_t v) { return v == kNothing ? kNothing - 1 : v; }
__device__ __forceinline__ uint4 sendable(const uint4& v) {
  return {sendable(v.x), sendable(v.y), sendable(v.z), sendable(v.w)};
}

// -- rows -------------------------------------------------------------------------------------------

__device__ __forceinline__ void empty16(void* slot) {
  store16(slot, {kNothing, kNothing, kNothing, kNothing});
}

// 16 bytes of a bf16 row that may start at any even address. Bytes behind its end are zero.
__device__ __noinline__ inline uint4 load_narrow(const std::byte* row, uint32_t at, uint32_t bytes) {
  uint32_t words[4] = {};
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i)
    if (at + 2 * i < bytes)
      words[i / 2] |= uint32_t(*reinterpret_cast<const volatile uint16_t*>(row + at + 2 * i)) << 16 * (i % 2);
  return {words[0], words[1], words[2], words[3]};
}
__device__ __noinline__ inline void store_narrow(std::byte* row, uint32_t at, uint32_t bytes, uint32_t x,
                                                 uint32_t y, uint32_t z, uint32_t w) {
  const uint32_t words[4] = {x, y, z, w};
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i)
    if (at + 2 * i < bytes)
      *reinterpret_cast<uint16_t*>(row + at + 2 * i) = uint16_t(words[i / 2] >> 16 * (i % 2));
}
template <bool kNarrow>
__device__ __forceinline__ uint4 load_row(const std::byte* row, uint32_t at, uint32_t bytes) {
  return kNarrow ? load_narrow(row, at, bytes) : load16(row + at);
}
template <bool kNarrow>
__device__ __forceinline__ void store_row(std::byte* row, uint32_t at, uint32_t bytes, const uint4& v) {
  kNarrow ? store_narrow(row, at, bytes, v.x, v.y, v.z, v.w) : store16(row + at, v);
}

}  // namespace ep::cuda

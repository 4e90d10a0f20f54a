// Memory between GPUs as the kernels see it: accesses of 4, 8 and 16 bytes to rows, to slots that a peer
// fills, and to words with an epoch. Knows no layout of rows and no waiting. Times in ns of %globaltimer.
#pragma once

#include "cuda/state.hpp"

namespace ep::cuda {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kFull = 0xffffffffu;
constexpr uint32_t kNothing = 0xffffffffu;  // every word of a slot that nothing has come to

__device__ __forceinline__ uint64_t clock_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// A kernel may be set up while the one before it ends; nothing is read before this returns.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Blocks that wait for this kernel take room: not before its own have had theirs.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// -- words ------------------------------------------------------------------------------------------

__device__ __forceinline__ uint64_t load_acquire(const void* cell) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(cell) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t load_relaxed(const void* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(void* cell, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(cell), "l"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(void* cell, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(cell), "l"(value) : "memory");
}
__device__ __forceinline__ void raise_relaxed(void* cell, uint64_t value) {
  asm volatile("red.relaxed.sys.global.max.u64 [%0], %1;" ::"l"(cell), "l"(value) : "memory");
}
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ void add(uint64_t& to, uint64_t by) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(&to), "l"(by) : "memory");
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void raise(uint64_t& to, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(&to), "l"(value) : "memory");
}

// -- slots: written by a peer, polled, made empty again ------------------------------------------------

// Each 32-bit word is an access of its own to the memory model, and says itself whether it has come.
__device__ __forceinline__ uint4 peek16(const void* slot) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(slot)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 peek8(const void* slot) {
  uint2 v;
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(slot) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t peek4(const void* slot) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(slot) : "memory");
  return v;
}
__device__ __forceinline__ bool came(const uint4& v) { return max(max(v.x, v.y), max(v.z, v.w)) != kNothing; }
__device__ __forceinline__ bool came(const uint2& v) { return max(v.x, v.y) != kNothing; }
__device__ __forceinline__ bool came(uint32_t v) { return v != kNothing; }

__device__ __forceinline__ void put16(void* slot, const uint4& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(slot), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void put8(void* slot, uint32_t low, uint32_t high) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(slot), "r"(low), "r"(high) : "memory");
}
__device__ __forceinline__ void put4(void* slot, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(slot), "r"(v) : "memory");
}

// What a caller gives may be all ones: two NaNs. They stay NaNs.
__device__ __forceinline__ uint32_t sendable(uint32_t v) { return v == kNothing ? kNothing - 1 : v; }
__device__ __forceinline__ uint4 sendable(const uint4& v) {
  return {sendable(v.x), sendable(v.y), sendable(v.z), sendable(v.w)};
}

// -- rows: read and written once, not worth a line of the first-level cache ----------------------------

__device__ __forceinline__ uint4 load16(const void* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void store16(void* to, const uint4& v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void empty16(void* slot) {
  store16(slot, {kNothing, kNothing, kNothing, kNothing});
}

// 16 bytes of a row of bf16 that starts at any even address and may end before: the rest is zero.
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

// Memory accesses by purpose, the clock, and the order of kernels. All PTX of the exchange is here, except
// conversions. Times are ns of %globaltimer.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace ep::cuda {

__device__ __forceinline__ uint64_t clock_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// Much longer than a block takes from its start to its first check of the masks, or between two checks. See
// agree() in await_headers.cuh.
constexpr uint64_t kGraceNs = 1'000'000;

// A kernel may be set up while the previous one ends. Read nothing before this function returns.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Blocks of the next kernel take room while they wait. Call this only after all blocks of this kernel have
// started.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 1 / sqrt(x), with an error of at most 2 ulp.
__device__ __forceinline__ float inverse_root(float x) {
  float y;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The dynamic shared memory of the launch, as 32-bit words.
__device__ __forceinline__ uint32_t* dynamic_shared() {
  extern __shared__ uint32_t words[];
  return words;
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
// Between warps of a block.
__device__ __forceinline__ void store_release_block(uint32_t* cell, uint32_t value) {
  asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(cell), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire_block(const uint32_t* cell) {
  uint32_t value;
  asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(value) : "l"(cell) : "memory");
  return value;
}
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ void add(uint64_t& to, uint64_t by) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(&to), "l"(by) : "memory");
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void raise(uint64_t& to, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(&to), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire_gpu(const void* word) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// -- slots: written by a peer, polled, made empty again ------------------------------------------------

// The memory model treats each 32-bit word as a separate access. Each word is its own ready flag.
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

// For rows that other blocks read too: keeps them in the first-level cache. Nobody may write them meanwhile.
__device__ __forceinline__ uint4 load16_again(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

// Added to a cell of any GPU. Only a fence_system() before it publishes what was written.
__device__ __forceinline__ void add_system(void* cell, uint64_t by) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(cell), "l"(by) : "memory");
}

}  // namespace ep::cuda

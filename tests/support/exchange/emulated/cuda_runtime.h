// As much of CUDA's language and runtime as csrc/exchange/nvlink uses, for a CPU: the threads of a block are
// fibers of one thread of the host, blocks are threads, a launch returns when its kernel has ended. Memory is
// the host's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct uint2 {
  uint32_t x, y;
};
struct uint3 {
  uint32_t x, y, z;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct dim3 {
  constexpr dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
  uint32_t x, y, z;
};
extern constinit thread_local uint3 threadIdx, blockIdx;
extern constinit thread_local dim3 blockDim, gridDim;

namespace emulated {
void give_way();                             // to the other threads of the block
void saw(const void* word, uint64_t value);  // in memory that others write
void launch(uint32_t blocks, uint32_t threads, const std::function<void()>& kernel);
const uint64_t* with_warp(uint64_t mine);  // what each lane of the warp has given
uint32_t* dynamic_shared();
constexpr int kSharedBytes = 192 * 1024;  // that kernels over NVLink find
constexpr int kMostSharedBytes = 227 * 1024;
extern uint64_t clock_ahead_ns;  // of the GPU, to the host
extern int multiprocessors;

template <class T, class F>
auto collect(T mine, F&& result) {
  return result(with_warp(uint64_t(mine)));
}
inline uint32_t lane() { return threadIdx.x % 32; }
}  // namespace emulated

// -- language ---------------------------------------------------------------------------------------

bool __syncthreads_or(bool mine);
inline void __syncthreads() { __syncthreads_or(false); }
inline void __syncwarp() {
  emulated::collect(0, [](const uint64_t*) { return 0; });
}
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence() { __threadfence_system(); }
template <class T>
T __ldcg(const T* at) {
  return *at;
}
template <class T>
T __shfl_sync(uint32_t, T mine, uint32_t from) {
  return emulated::collect(mine, [&](const uint64_t* all) { return T(all[from % 32]); });
}
template <class T>
T __shfl_up_sync(uint32_t, T mine, uint32_t by) {
  const uint32_t lane = emulated::lane();
  return emulated::collect(mine, [&](const uint64_t* all) { return T(all[lane >= by ? lane - by : lane]); });
}
template <class T>
T __shfl_xor_sync(uint32_t, T mine, uint32_t by) {
  return emulated::collect(__builtin_bit_cast(uint32_t, T(mine)) + uint64_t(0), [&](const uint64_t* all) {
    return __builtin_bit_cast(T, uint32_t(all[emulated::lane() ^ by]));
  });
}
template <>
inline uint64_t __shfl_xor_sync(uint32_t, uint64_t mine, uint32_t by) {
  return emulated::collect(mine, [&](const uint64_t* all) { return all[emulated::lane() ^ by]; });
}
inline uint32_t __ballot_sync(uint32_t, bool mine) {
  return emulated::collect(mine, [](const uint64_t* all) {
    uint32_t bits = 0;
    for (uint32_t i = 0; i < 32; ++i) bits |= uint32_t(all[i] != 0) << i;
    return bits;
  });
}
inline bool __any_sync(uint32_t mask, bool mine) { return __ballot_sync(mask, mine) != 0; }
inline bool __all_sync(uint32_t mask, bool mine) { return __ballot_sync(mask, mine) == 0xffffffffu; }
inline uint32_t __reduce_or_sync(uint32_t, uint32_t mine) {
  return emulated::collect(mine, [](const uint64_t* all) {
    uint32_t bits = 0;
    for (uint32_t i = 0; i < 32; ++i) bits |= uint32_t(all[i]);
    return bits;
  });
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t mine) {
  return emulated::collect(mine, [](const uint64_t* all) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < 32; ++i) sum += uint32_t(all[i]);
    return sum;
  });
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t mine) {
  return emulated::collect(mine, [](const uint64_t* all) {
    uint32_t most = 0;
    for (uint32_t i = 0; i < 32; ++i) most = std::max(most, uint32_t(all[i]));
    return most;
  });
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t mine) {
  return emulated::collect(mine, [](const uint64_t* all) {
    uint32_t least = ~0u;
    for (uint32_t i = 0; i < 32; ++i) least = std::min(least, uint32_t(all[i]));
    return least;
  });
}
inline uint32_t __match_any_sync(uint32_t, int32_t mine) {
  return emulated::collect(mine, [&](const uint64_t* all) {
    uint32_t bits = 0;
    for (uint32_t i = 0; i < 32; ++i) bits |= uint32_t(int32_t(all[i]) == mine) << i;
    return bits;
  });
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(int(x)); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
  return uint32_t((uint64_t(high) << 32 | low) >> by % 32);
}
inline float __uint_as_float(uint32_t x) { return __builtin_bit_cast(float, x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __log2f(float x) { return std::log2(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
template <class T, class U>
T atomicAdd(T* to, U by) {
  return __atomic_fetch_add(to, T(by), __ATOMIC_RELAXED);
}
template <class T>
T atomicOr(T* to, T bits) {
  return __atomic_fetch_or(to, bits, __ATOMIC_RELAXED);
}
inline uint32_t atomicInc(uint32_t* to, uint32_t most) {
  uint32_t old = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(to, &old, old >= most ? 0 : old + 1, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  return old;
}
inline unsigned long long atomicCAS(unsigned long long* word, unsigned long long old,
                                    unsigned long long now) {
  __atomic_compare_exchange_n(word, &old, now, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return old;
}

// -- runtime ----------------------------------------------------------------------------------------

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorMemoryAllocation, cudaErrorNotReady };
struct CUstream_st;
using cudaStream_t = CUstream_st*;
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension
};
constexpr unsigned cudaStreamNonBlocking = 1, cudaHostAllocMapped = 2, cudaHostAllocPortable = 1;
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  emulated::launch(config->gridDim.x, config->blockDim.x, [&] { kernel(args...); });
  return cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** to, size_t bytes);
cudaError_t cudaHostAlloc(void** to, size_t bytes, unsigned flags);
cudaError_t cudaFree(void* what);
cudaError_t cudaFreeHost(void* what);
cudaError_t cudaMemset(void* to, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaDeviceSynchronize();
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) { return "an error of the emulation"; }

// csrc/exchange/nvlink/access.cuh on a CPU. Whoever looks at memory that others write lets them run first.
#pragma once

#include <cuda_runtime.h>
#include <time.h>

#include <cmath>
#include <cstring>

namespace ep::cuda {

inline uint64_t clock_ns() {
  emulated::give_way();
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec) + emulated::clock_ahead_ns;
}
// A block is a thread here: with more threads than cores it may stand still for many time slices.
constexpr uint64_t kGraceNs = 300'000'000;

inline void await_previous_kernel() {}
inline void let_next_kernel_start() {}
inline float inverse_root(float x) { return float(1.0 / std::sqrt(double(x))); }
inline uint32_t* dynamic_shared() { return emulated::dynamic_shared(); }

template <class T>
T look(const void* at, int order) {
  emulated::give_way();
  const T value = __atomic_load_n(static_cast<const T*>(at), order);
  emulated::saw(at, value);
  return value;
}
inline uint64_t load_acquire(const void* cell) { return look<uint64_t>(cell, __ATOMIC_ACQUIRE); }
inline uint64_t load_acquire_gpu(const void* cell) { return look<uint64_t>(cell, __ATOMIC_ACQUIRE); }
inline uint64_t load_relaxed(const void* word) { return look<uint64_t>(word, __ATOMIC_RELAXED); }
inline void store_release(void* cell, uint64_t value) {
  __atomic_store_n(static_cast<uint64_t*>(cell), value, __ATOMIC_RELEASE);
}
inline void store_relaxed(void* cell, uint64_t value) {
  __atomic_store_n(static_cast<uint64_t*>(cell), value, __ATOMIC_RELAXED);
}
inline void raise_relaxed(void* cell, uint64_t value) {
  auto* word = static_cast<uint64_t*>(cell);
  uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (seen < value &&
         !__atomic_compare_exchange_n(word, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
inline void store_release_block(uint32_t* cell, uint32_t value) {
  __atomic_store_n(cell, value, __ATOMIC_RELEASE);
}
inline uint32_t load_acquire_block(const uint32_t* cell) { return look<uint32_t>(cell, __ATOMIC_ACQUIRE); }
inline void fence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void fence_gpu() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void add(uint64_t& to, uint64_t by) { __atomic_fetch_add(&to, by, __ATOMIC_RELAXED); }
inline void raise(uint64_t& to, uint64_t value) { raise_relaxed(&to, value); }

// Word by word: a slot may be seen with some of its words, as on a GPU.
inline uint32_t word_at(const void* slot, uint32_t i) {
  return __atomic_load_n(static_cast<const uint32_t*>(slot) + i, __ATOMIC_ACQUIRE);
}
inline uint32_t peek4(const void* slot) {
  emulated::give_way();
  const uint32_t word = word_at(slot, 0);
  emulated::saw(slot, word);
  return word;
}
inline uint2 peek8(const void* slot) { return {peek4(slot), word_at(slot, 1)}; }
inline uint4 peek16(const void* slot) {
  return {peek4(slot), word_at(slot, 1), word_at(slot, 2), word_at(slot, 3)};
}
inline void put4(void* slot, uint32_t v) {
  __atomic_store_n(static_cast<uint32_t*>(slot), v, __ATOMIC_RELEASE);
}
inline void put8(void* slot, uint32_t low, uint32_t high) {
  put4(slot, low);
  put4(static_cast<uint32_t*>(slot) + 1, high);
}
inline void put16(void* slot, const uint4& v) {
  put8(slot, v.x, v.y);
  put8(static_cast<uint32_t*>(slot) + 2, v.z, v.w);
}
inline uint4 load16(const void* from) {
  return {word_at(from, 0), word_at(from, 1), word_at(from, 2), word_at(from, 3)};
}
inline void store16(void* to, const uint4& v) { put16(to, v); }
inline uint4 load16_again(const void* from) { return load16(from); }

inline void add_system(void* cell, uint64_t by) {
  __atomic_fetch_add(static_cast<uint64_t*>(cell), by, __ATOMIC_RELEASE);
}

}  // namespace ep::cuda

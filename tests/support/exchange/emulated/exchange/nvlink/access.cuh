// csrc/exchange/nvlink/access.cuh on a CPU. Whoever looks at memory that others write lets them run first.
#pragma once

#include <cuda_runtime.h>
#include <time.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>

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
  return __atomic_load_n(static_cast<const T*>(at), order);
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
inline uint4 peek16(const void* slot) {
  emulated::give_way();
  return {word_at(slot, 0), word_at(slot, 1), word_at(slot, 2), word_at(slot, 3)};
}
inline uint2 peek8(const void* slot) {
  emulated::give_way();
  return {word_at(slot, 0), word_at(slot, 1)};
}
inline uint32_t peek4(const void* slot) {
  emulated::give_way();
  return word_at(slot, 0);
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

// The copy engine. One lane does a copy, as early or as late as the real one may: every second load waits for
// await_piece(), and a store for await_pieces_read(), or for await_pieces_written().
namespace engine {
struct Copy {
  void* to;
  const void* from;
  uint32_t bytes;
  uint64_t group;
  void run() const { std::memcpy(to, from, bytes); }
};
// Of the warps of a block.
struct Stores {
  std::deque<Copy> copies;
  uint64_t groups = 0;
};
inline thread_local Stores stores[32];
inline thread_local uint32_t loads = 0;

inline bool is_first_lane() { return threadIdx.x % 32 == 0; }
inline void end_groups_but(uint64_t pending) {
  if (!is_first_lane()) return;
  Stores& mine = stores[threadIdx.x / 32];
  for (; !mine.copies.empty() && mine.copies.front().group + pending < mine.groups; mine.copies.pop_front())
    mine.copies.front().run();
}
}  // namespace engine

// A barrier: the address of a copy that waits, and the phase.
inline void init_copy_barrier(uint64_t* barrier) {
  *barrier = 0;
  engine::stores[threadIdx.x / 32] = {};
}
inline void publish_copy_barriers() {}
inline void load_piece(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  if (!engine::is_first_lane()) return;
  if (*barrier > 1) std::abort();  // a stage is loaded twice
  auto* copy = new engine::Copy{to, from, bytes, 0};
  if (++engine::loads % 2 == 0) {
    copy->run();
    copy->bytes = 0;
  }
  *barrier |= uint64_t(copy);
}
inline void await_piece(uint64_t* barrier, uint32_t phase) {
  if (engine::is_first_lane()) {
    auto* copy = reinterpret_cast<engine::Copy*>(*barrier & ~1ull);
    if (copy == nullptr || (*barrier & 1) != phase) std::abort();  // it would never end, or at once
    copy->run();
    delete copy;
    *barrier = phase ^ 1;
  }
  __syncwarp();
}
inline void order_pieces_behind_words() { __syncwarp(); }
inline void publish_stage() { __syncwarp(); }
inline void store_piece(void* to, const void* from, uint32_t bytes) {
  if (!engine::is_first_lane()) return;
  engine::Stores& mine = engine::stores[threadIdx.x / 32];
  mine.copies.push_back({to, from, bytes, mine.groups});
}
inline void commit_pieces() {
  if (engine::is_first_lane()) ++engine::stores[threadIdx.x / 32].groups;
}
template <uint32_t kPending>
void await_pieces_read() {
  engine::end_groups_but(kPending);
}
template <uint32_t kPending>
void await_pieces_written() {
  engine::end_groups_but(kPending);
}

}  // namespace ep::cuda

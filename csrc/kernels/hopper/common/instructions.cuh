// Hopper's asynchronous instructions as functions: overlapping kernels, barriers in shared memory, the tensor
// copy engine, matrix products of a warpgroup. Only for sm_90a. Operands are in shared memory with 128 bytes
// per row, in the 128-byte swizzle.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace ep::hopper {

inline constexpr uint32_t kSwizzledRow = 128;                // bytes; eight rows are a 1,024-byte pattern
inline constexpr uint64_t kEvictFirst = 0x12f0000000000000;  // what createpolicy returns for evict_first

// Programmatic dependent launch: the next kernel of the stream may be set up once every block has called
// this. Its await_previous_kernel() returns when this kernel has ended and its stores are visible.
__device__ inline void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ inline void await_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Number of the warp in the block. The compiler knows that it is the same for all threads of the warp, so
// values derived from it need no register per thread.
__device__ inline uint32_t warp_number() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ inline void init_barrier(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine too. A barrier of all their users must follow.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives. The phase then ends only after this many bytes have been copied in as well.
__device__ inline void arrive_and_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity has ended. A barrier that was never used counts as past parity 1.
__device__ inline void await_phase(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Barriers of the block by number, 1 to 15: waits until so many threads, in whole warps, have called either.
__device__ inline void meet_at(uint32_t number, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ inline void pass_by(uint32_t number, uint32_t threads) {  // does not wait
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Of a word that other blocks change.
__device__ inline uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The block's dynamic shared memory, at a multiple of the swizzle's pattern.
__device__ inline std::byte* dynamic_shared() {
  extern __shared__ __align__(1024) std::byte memory[];
  return memory;
}

// A stage of a ring. parity: of the phase in which it is filled.
struct Place {
  uint32_t stage = 0, parity = 0;
  __device__ void next(uint32_t stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// Makes what this thread knows to be in shared memory, from ordinary stores and copy_piece(), visible to
// matrix products.
__device__ inline void publish_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Prefetches the descriptor `map` for the copy engine.
__device__ inline void fetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box of `map` at (column, row) to `to`. `barrier` expects its bytes. They are evicted from L2
// first, because weights are read once, or by several blocks at the same time.
__device__ inline void copy_box(void* to, const CUtensorMap* map, uint32_t column, uint32_t row,
                                uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(kEvictFirst)
      : "memory");
}

// The same for maps of more dimensions, the fastest first.
__device__ inline void copy_box(void* to, const CUtensorMap* map, const uint32_t (&at)[4],
                                uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)),
      "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(shared_address(barrier)), "l"(kEvictFirst)
      : "memory");
}

__device__ inline void copy_box(void* to, const CUtensorMap* map, const uint32_t (&at)[5],
                                uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(to)),
      "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(shared_address(barrier)),
      "l"(kEvictFirst)
      : "memory");
}

// The same as copy_box() for data that other blocks read later: it stays in L2 like anything else.
__device__ inline void copy_reused_box(void* to, const CUtensorMap* map, uint32_t column, uint32_t row,
                                       uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

__device__ inline void copy_reused_box(void* to, const CUtensorMap* map, const uint32_t (&at)[4],
                                       uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
      "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(shared_address(barrier))
      : "memory");
}

// Copies 16 bytes past L1. They arrive before the thread's next arrive_when_copied() completes. to: a
// shared_address().
__device__ inline void copy_piece(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Arrives once everything that this thread copied with copy_piece() has arrived.
__device__ inline void arrive_when_copied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Sets the registers of each thread, a multiple of 8. All threads of a warpgroup call it. A warpgroup that
// takes more waits until others of the block have released as many.
template <uint32_t kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <uint32_t kRegisters>
__device__ inline void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Descriptor of an operand whose rows are contiguous in the channels. `p`: its first row, plus an offset in
// channels.
__device__ inline uint64_t operand(uint32_t address) {
  constexpr uint64_t kNextRows = uint64_t(8 * kSwizzledRow >> 4) << 32, kSwizzle = 1ull << 62;
  return uint64_t(address >> 4 & 0x3fff) | 1ull << 16 | kNextRows | kSwizzle;
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

}  // namespace ep::hopper

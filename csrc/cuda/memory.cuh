// Memory between GPUs as the kernels see it: 16-byte accesses, cells, waits with a deadline, the end of a
// kernel. Knows no layout of rows. Times in ns of %globaltimer.
#pragma once

#include "cuda/state.hpp"

namespace ep::cuda {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kFull = 0xffffffffu;

__device__ __forceinline__ uint64_t clock_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__device__ __forceinline__ uint64_t load_acquire(const void* cell) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(cell) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(void* cell, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(cell), "l"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(void* cell, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(cell), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t load_relaxed(const void* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
// Monotonic counters of several writers: two receives may end in either order.
__device__ __forceinline__ void raise_release(void* cell, uint64_t value) {
  asm volatile("red.release.sys.global.max.u64 [%0], %1;" ::"l"(cell), "l"(value) : "memory");
}
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Rows are read and written once: not worth a line of the first-level cache.
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

// One access of a row: 16 bytes, or one bf16 where rows are not multiples of that.
template <uint32_t kBytes>
struct Word;
template <>
struct Word<16> {
  using Type = uint4;
  static __device__ __forceinline__ uint4 load(const std::byte* from) { return load16(from); }
  static __device__ __forceinline__ void store(std::byte* to, const uint4& v) { store16(to, v); }
};
template <>
struct Word<2> {
  using Type = uint16_t;
  static __device__ __forceinline__ uint16_t load(const std::byte* from) {
    return *reinterpret_cast<const volatile uint16_t*>(from);
  }
  static __device__ __forceinline__ void store(std::byte* to, uint16_t v) {
    *reinterpret_cast<uint16_t*>(to) = v;
  }
};

// -- failure ----------------------------------------------------------------------------------------

// The first failure of this rank: to the host, and to all peers as a sticky abort.
__device__ inline void fail(const Device& g, const Status& status) {
  if (atomicCAS(reinterpret_cast<unsigned long long*>(&g.state->control.failed), 0ull, 1ull) != 0) return;
  volatile Status* host = g.status;
  host->op = status.op;
  host->phase = status.phase;
  host->rank = status.rank;
  host->peer = status.peer;
  host->expected = status.expected;
  host->seen = status.seen;
  __threadfence_system();
  host->code = status.code;
  if (status.code == Code::kAborted) return;
  for (uint32_t r = 0; r < g.num_ranks; ++r) {
    if (g.state->control.masked >> r & 1) continue;
    volatile uint32_t* words = reinterpret_cast<uint32_t*>(g.regions[r] + Head::abort_status(g.rank));
    words[0] = uint32_t(status.code);
    words[1] = uint32_t(status.op);
    words[2] = uint32_t(status.phase);
    words[3] = status.rank;
    words[4] = status.peer;
    words[5] = status.expected;
    words[6] = status.seen;
    store_release(g.regions[r] + Head::kAbort, uint64_t(g.rank + 1) << 32 | 1);
  }
}

// Whether a wait must end at once; reports a peer's abort.
__device__ inline bool aborted(const Device& g) {
  if (load_relaxed(&g.state->control.failed) != 0) return true;
  const uint64_t cell = load_acquire(g.own() + Head::kAbort);
  if (cell == 0) return false;
  const uint32_t writer = uint32_t(cell >> 32) - 1;
  const auto* words = reinterpret_cast<const volatile uint32_t*>(g.own() + Head::abort_status(writer));
  fail(g, {Code::kAborted, Op(words[1]), Phase(words[2]), words[3], words[4], words[5], words[6]});
  return true;
}

// -- waiting ----------------------------------------------------------------------------------------

enum class Match : uint32_t { kHeader, kAtLeast, kExact64 };

struct Wanted {
  Op op;
  Phase phase;
  uint32_t peer;
  uint64_t epoch;
  Slot slot;  // whose scratch is charged with the wait
};

template <Match kMatch>
__device__ __forceinline__ int32_t compare(uint64_t cell, uint64_t epoch) {
  if constexpr (kMatch == Match::kExact64) return cell == epoch ? 0 : -1;
  return int32_t(uint32_t(cell) - uint32_t(epoch));
}

// A header that came after half the deadline: some block may have given the peer up, all must agree.
__device__ inline bool decide(const Device& g, const Wanted& w, bool arrived) {
  auto* word = reinterpret_cast<unsigned long long*>(&g.state->decisions[uint32_t(w.op)][w.peer]);
  unsigned long long seen = load_relaxed(word);
  while (seen >> 1 != w.epoch) {
    const unsigned long long before = atomicCAS(word, seen, w.epoch << 1 | uint32_t(arrived));
    if (before == seen) return arrived;
    seen = before;
  }
  return seen & 1;
}

// Spins until the cell shows the epoch and returns true; false where the peer is masked or the group failed.
template <Match kMatch>
__device__ inline bool await(const Device& g, const void* cell, const Wanted& w, uint64_t* value) {
  *value = load_acquire(cell);
  const int32_t first = compare<kMatch>(*value, w.epoch);
  if (first == 0 || (first > 0 && kMatch == Match::kAtLeast)) return true;
  const uint64_t start = clock_ns();
  for (uint32_t spins = 1;; ++spins) {
    *value = load_acquire(cell);
    const int32_t ahead = compare<kMatch>(*value, w.epoch);
    if (ahead == 0 || (ahead > 0 && kMatch == Match::kAtLeast)) break;
    if (ahead > 0) {
      fail(g, {Code::kViolation, w.op, w.phase, g.rank, w.peer, uint32_t(w.epoch), uint32_t(*value)});
      return false;
    }
    if (spins % 32 != 0) continue;
    if (load_relaxed(&g.state->control.masked) >> w.peer & 1) return false;
    if (aborted(g)) return false;
    if (clock_ns() - start < g.state->control.timeout_ns) continue;
    if (kMatch == Match::kHeader && decide(g, w, false)) continue;
    atomicAdd(reinterpret_cast<unsigned long long*>(&g.state->totals.timeouts), 1ull);
    if (g.state->control.mask_on_timeout && w.peer != g.rank) {
      atomicOr(reinterpret_cast<unsigned long long*>(&g.state->control.masked), 1ull << w.peer);
    } else {
      // A bank that this rank has not read either is its own mistake: nobody else can free it.
      bool own = w.phase == Phase::kSendBank;
      if (own) own = int32_t(uint32_t(load_acquire(g.own() + Head::consumed(w.op, g.rank))) - uint32_t(w.epoch)) < 0;
      fail(g, {own ? Code::kHook : Code::kTimeout, w.op, w.phase, g.rank, w.peer, uint32_t(w.epoch),
               uint32_t(*value)});
    }
    return false;
  }
  const uint64_t waited = clock_ns() - start;
  if (w.phase != Phase::kSendBank)
    atomicMax(reinterpret_cast<unsigned long long*>(&g.state->scratch[uint32_t(w.slot)].wait_ns[w.peer]),
              static_cast<unsigned long long>(waited));
  if (kMatch == Match::kHeader && waited > g.state->control.timeout_ns / 2) return decide(g, w, true);
  return true;
}

__device__ __forceinline__ bool bank_is_free(const Device& g, Op op, uint32_t peer, uint64_t epoch, Slot slot) {
  const uint32_t banks = g.layout.num_banks;
  if (epoch <= g.state->control.base + banks) return true;
  uint64_t seen;
  return await<Match::kAtLeast>(g, g.own() + Head::consumed(op, peer),
                                {op, Phase::kSendBank, peer, epoch - banks, slot}, &seen);
}

// Those of `peers` whose bank this block may write; none where the group failed. The whole block calls it.
__device__ __forceinline__ uint32_t free_peers(const Device& g, Op op, uint64_t epoch, uint32_t peers, Slot slot) {
  __shared__ uint32_t free_bits;
  if (threadIdx.x < kWarp) {
    const bool asked = peers >> threadIdx.x & 1;
    const bool free = asked && bank_is_free(g, op, threadIdx.x, epoch, slot);
    const bool failed = asked && !free && load_relaxed(&g.state->control.failed) != 0;
    const uint32_t bits = __ballot_sync(kFull, free);
    const bool any_failed = __any_sync(kFull, failed);
    if (threadIdx.x == 0) free_bits = any_failed ? 0 : bits;
  }
  __syncthreads();
  return free_bits;
}

// -- the end of a kernel ----------------------------------------------------------------------------

__device__ __forceinline__ void add(uint64_t& to, uint64_t by) {
  atomicAdd(reinterpret_cast<unsigned long long*>(&to), static_cast<unsigned long long>(by));
}

__device__ inline void record(const Device& g, Op op, Part part, uint64_t ns) {
  const uint32_t bucket = ns == 0 ? 0 : 63 - __clzll(ns);
  Totals& t = g.state->totals;
  add(t.times[uint32_t(op)][uint32_t(part)][bucket < kNumBuckets ? bucket : kNumBuckets - 1], 1);
  add(t.sums[uint32_t(op)][uint32_t(part)], ns);
}

// True in the first warp of the block that ends last; what all blocks wrote is visible to it then.
__device__ inline bool last_block(Scratch& scratch) {
  __syncthreads();
  if (threadIdx.x >= kWarp) return false;
  uint32_t before = 0;
  if (threadIdx.x == 0) {
    __threadfence();
    before = atomicInc(&scratch.done, gridDim.x - 1);
  }
  before = __shfl_sync(kFull, before, 0);
  if (before != gridDim.x - 1) return false;
  __threadfence();
  return true;
}

// Marks an epoch as read and tells all senders how far they may go. One warp.
__device__ inline void consume(const Device& g, Op op, uint64_t epoch) {
  Progress& progress = g.state->progress[uint32_t(op)];
  uint64_t read = 0;
  if (threadIdx.x == 0) {
    volatile uint64_t* finished = progress.finished;
    finished[g.bank_of(epoch)] = epoch;
    asm volatile("fence.sc.gpu;" ::: "memory");  // of two that end together, one sees both
    read = load_relaxed(&progress.consumed);
    while (finished[g.bank_of(read + 1)] == read + 1) ++read;
    atomicMax(reinterpret_cast<unsigned long long*>(&progress.consumed), static_cast<unsigned long long>(read));
  }
  read = __shfl_sync(kFull, read, 0);
  const uint32_t peer = threadIdx.x;
  if (peer < g.num_ranks && !(g.state->control.masked >> peer & 1))
    raise_release(g.regions[peer] + Head::consumed(op, g.rank), read);
}

// Adds one operation's waits to the totals and clears them. One warp. Returns the longest.
__device__ inline uint64_t settle_waits(const Device& g, Op op, Scratch& scratch) {
  uint64_t wait = 0;
  if (threadIdx.x < g.num_ranks) {
    wait = load_relaxed(&scratch.wait_ns[threadIdx.x]);
    scratch.wait_ns[threadIdx.x] = 0;
    add(g.state->totals.peer_wait_ns[uint32_t(op)][threadIdx.x], wait);
    atomicMax(reinterpret_cast<unsigned long long*>(
                  &g.state->totals.peer_wait_max_ns[uint32_t(op)][threadIdx.x]),
              static_cast<unsigned long long>(wait));
  }
  for (uint32_t lane = kWarp / 2; lane != 0; lane /= 2) {
    const uint64_t other = __shfl_xor_sync(kFull, wait, lane);
    wait = other > wait ? other : wait;
  }
  return wait;
}

}  // namespace ep::cuda

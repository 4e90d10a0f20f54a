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

__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// A kernel may be set up while the one before it ends; nothing is read before this returns.
__device__ __forceinline__ void await_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

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
__device__ __noinline__ inline void fail(const Device& g, Code code, Op op, Phase phase, uint32_t peer,
                                         uint32_t expected, uint32_t seen) {
  if (atomicCAS(reinterpret_cast<unsigned long long*>(&g.state->control.failed), 0ull, 1ull) != 0) return;
  volatile Status* host = g.status;
  host->op = op;
  host->phase = phase;
  host->rank = g.rank;
  host->peer = peer;
  host->expected = expected;
  host->seen = seen;
  __threadfence_system();
  host->code = code;
  for (uint32_t r = 0; r < g.num_ranks; ++r) {
    if (g.state->control.masked >> r & 1) continue;
    volatile uint32_t* words = reinterpret_cast<uint32_t*>(g.regions[r] + Head::abort_status(g.rank));
    words[0] = uint32_t(code);
    words[1] = uint32_t(op);
    words[2] = uint32_t(phase);
    words[3] = g.rank;
    words[4] = peer;
    words[5] = expected;
    words[6] = seen;
    store_release(g.regions[r] + Head::kAbort, uint64_t(g.rank + 1) << 32 | 1);
  }
}

// Tells the host what a peer has reported.
__device__ __noinline__ inline void report_abort(const Device& g, uint32_t writer) {
  if (atomicCAS(reinterpret_cast<unsigned long long*>(&g.state->control.failed), 0ull, 1ull) != 0) return;
  const auto* words = reinterpret_cast<const volatile uint32_t*>(g.own() + Head::abort_status(writer));
  volatile Status* host = g.status;
  host->op = Op(words[1]);
  host->phase = Phase(words[2]);
  host->rank = words[3];
  host->peer = words[4];
  host->expected = words[5];
  host->seen = words[6];
  __threadfence_system();
  host->code = Code::kAborted;
}

// Whether a wait must end at once; reports a peer's abort.
__device__ inline bool aborted(const Device& g) {
  if (load_relaxed(&g.state->control.failed) != 0) return true;
  const uint64_t cell = load_acquire(g.own() + Head::kAbort);
  if (cell == 0) return false;
  report_abort(g, uint32_t(cell >> 32) - 1);
  return true;
}

// -- the start of a kernel --------------------------------------------------------------------------

// What an operation needs to know first, read at once.
struct Opened {
  uint64_t epoch, base;
  uint32_t bank, peers;  // peers: bits of the unmasked ranks
  bool alive;
};

// `epoch`: where it lies, and how far behind this operation's own the word is.
__device__ __forceinline__ Opened open(const Device& g, const uint64_t* epoch, uint32_t behind) {
  const Control& control = g.state->control;
  const uint64_t word = load_relaxed(epoch), base = load_relaxed(&control.base);
  const uint64_t masked = load_relaxed(&control.masked), failed = load_relaxed(&control.failed);
  Opened o;
  o.epoch = word + behind;
  o.base = base;
  o.bank = g.bank_of(o.epoch);
  o.peers = uint32_t(g.all() & ~masked);
  o.alive = failed == 0;
  return o;
}

// -- waiting ----------------------------------------------------------------------------------------

enum class Match : uint32_t { kHeader, kExact64, kPresence };  // kPresence: epoch << 1 | a bit

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
  if constexpr (kMatch == Match::kPresence) return cell >> 1 == epoch ? 0 : -1;
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
  if (first == 0) return true;
  const uint64_t start = clock_ns();
  for (uint32_t spins = 1;; ++spins) {
    *value = load_acquire(cell);
    const int32_t ahead = compare<kMatch>(*value, w.epoch);
    if (ahead == 0) break;
    if (ahead > 0) {
      fail(g, Code::kViolation, w.op, w.phase, w.peer, uint32_t(w.epoch), uint32_t(*value));
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
      if (own) own = load_acquire(g.own() + g.cells.read_cell(w.op, g.bank_of(w.epoch), g.rank)) != w.epoch;
      fail(g, own ? Code::kHook : Code::kTimeout, w.op, w.phase, w.peer, uint32_t(w.epoch), uint32_t(*value));
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

// Whether the bank of an operation may be written at a peer: it was not used, or the peer has read it.
__device__ __forceinline__ bool bank_was_read(const Device& g, Op op, const Opened& o, uint32_t peer) {
  const uint32_t banks = g.layout.num_banks;
  return o.epoch <= o.base + banks ||
         load_acquire(g.own() + g.cells.read_cell(op, o.bank, peer)) == o.epoch - banks;
}

// Waits for it. False where the peer is masked or the group failed.
__device__ inline bool await_bank(const Device& g, Op op, const Opened& o, uint32_t peer, Slot slot) {
  if (bank_was_read(g, op, o, peer)) return true;
  uint64_t seen;
  return await<Match::kExact64>(g, g.own() + g.cells.read_cell(op, o.bank, peer),
                                {op, Phase::kSendBank, peer, o.epoch - g.layout.num_banks, slot}, &seen);
}

// Those of the peers whose bank this block may write; none where the group failed. The whole block calls it;
// every warp looks for itself, so that the usual case costs one load.
__device__ __forceinline__ uint32_t free_peers(const Device& g, Op op, const Opened& o, Slot slot) {
  __shared__ uint32_t free_bits;
  const uint32_t lane = threadIdx.x % kWarp;
  const bool asked = o.peers >> lane & 1;
  if (__syncthreads_and(!asked || bank_was_read(g, op, o, lane))) return o.peers;
  if (threadIdx.x < kWarp) {
    const bool free = asked && await_bank(g, op, o, lane, slot);
    const bool failed = asked && !free && load_relaxed(&g.state->control.failed) != 0;
    const uint32_t bits = __ballot_sync(kFull, free);
    const bool any_failed = __any_sync(kFull, failed);
    if (lane == 0) free_bits = any_failed ? 0 : bits;
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

// True in the first warp of the block that ends last. Orders reads only: whoever has passed the barrier has
// used what it loaded, and the next kernel sees the stores.
__device__ __forceinline__ bool last_block(Scratch& scratch) {
  __syncthreads();
  if (threadIdx.x >= kWarp) return false;
  uint32_t before = 0;
  if (threadIdx.x == 0) before = atomicInc(&scratch.done, gridDim.x - 1);
  return __shfl_sync(kFull, before, 0) == gridDim.x - 1;
}

// Tells all senders that the bank of an epoch was read here. One warp. Nothing that was written before has to
// be seen by them, and what was read has been used (last_block): no fence.
__device__ __forceinline__ void consume(const Device& g, Op op, uint64_t epoch, uint32_t peers) {
  if (peers >> threadIdx.x & 1)
    store_relaxed(g.regions[threadIdx.x] + g.cells.read_cell(op, g.bank_of(epoch), g.rank), epoch);
}

// Adds one operation's waits to the totals and clears them. One warp. Returns the longest.
__device__ inline uint64_t settle_waits(const Device& g, Op op, Scratch& scratch) {
  uint64_t wait = 0;
  if (threadIdx.x < g.num_ranks) {
    wait = atomicExch(reinterpret_cast<unsigned long long*>(&scratch.wait_ns[threadIdx.x]), 0ull);
    add(g.state->totals.peer_wait_ns[uint32_t(op)][threadIdx.x], wait);
    atomicMax(
        reinterpret_cast<unsigned long long*>(&g.state->totals.peer_wait_max_ns[uint32_t(op)][threadIdx.x]),
        static_cast<unsigned long long>(wait));
  }
  for (uint32_t lane = kWarp / 2; lane != 0; lane /= 2) {
    const uint64_t other = __shfl_xor_sync(kFull, wait, lane);
    wait = other > wait ? other : wait;
  }
  return wait;
}

}  // namespace ep::cuda

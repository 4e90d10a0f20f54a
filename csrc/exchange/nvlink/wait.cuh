// The start of a kernel, and its waits, each with a deadline. Failure, abort, masks and injected faults.
#pragma once

#include "exchange/nvlink/peer_slots.cuh"

namespace ep::cuda {

// -- failure ----------------------------------------------------------------------------------------

// Identifies the generation in an abort: a late one from an older generation ends nothing.
__device__ __forceinline__ uint32_t generation(const Device& g) {
  return uint32_t(g.state->control.base) + 1;
}

// Bits of the ranks that are masked now, by kernels or by the host.
__device__ __forceinline__ uint32_t masked_now(const Device& g) {
  const uint64_t both = load_relaxed(&g.state->control.masked);
  return low_word(both) | high_word(both);
}

// Records this rank's first failure: reports it to the host, and to all peers as a sticky abort.
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
#pragma unroll 1
  for (uint32_t r = 0; r < g.num_ranks; ++r) {
    if (masked_now(g) >> r & 1) continue;
    volatile uint32_t* words = reinterpret_cast<uint32_t*>(g.regions[r] + Head::abort_status(g.rank));
    words[0] = uint32_t(code);
    words[1] = uint32_t(op);
    words[2] = uint32_t(phase);
    words[3] = g.rank;
    words[4] = peer;
    words[5] = expected;
    words[6] = seen;
    store_release(g.regions[r] + Head::kAbort, uint64_t(g.rank + 1) << 32 | generation(g));
  }
}

// Reports to the host what a peer has reported.
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
  if (uint32_t(cell) != generation(g)) return false;
  report_abort(g, uint32_t(cell >> 32) - 1);
  return true;
}

__device__ __forceinline__ bool has_failed(const Device& g) {
  return load_relaxed(&g.state->control.failed) != 0;
}

// -- the start of a kernel --------------------------------------------------------------------------

// What an operation reads first. In shared memory.
struct Opened {
  uint64_t epoch, base;
  uint32_t bank, peers;  // peers: bits of the unmasked ranks
  bool alive, faulty;
  bool banks_free;  // sends: every peer has read the bank
  uint32_t fresh;   // bits of the ranks masked since the generation began, maybe after other blocks started
};

// Fills `o` with one access of one warp, because hundreds of blocks read the same words at once. The first
// warp calls it. `epoch`: for a receive, in its handle. A send (null) takes the next epoch, and reads the
// cells of all banks.
__device__ __forceinline__ void open(const Device& g, Op op, const uint64_t* epoch, Opened& o) {
  const uint32_t lane = threadIdx.x, ranks = g.num_ranks, banks = g.layout.num_banks;
  constexpr uint32_t kEpoch = kControlWords, kCells = kWarp / 2;
  const bool fits = ranks * banks <= kWarp - kCells, cell = epoch == nullptr && fits && lane >= kCells;
  const void* from = reinterpret_cast<const uint64_t*>(&g.state->control) + lane;
  if (lane == kEpoch) from = epoch != nullptr ? epoch : &g.tally(op).sends;
  if (cell) from = g.own() + g.layout.read_cell(op, 0, 0) + (lane - kCells) * sizeof(uint64_t);
  uint64_t word = 0;
  if (lane <= kEpoch || (cell && lane - kCells < ranks * banks)) word = load_acquire(from);

  const uint64_t ticket = __shfl_sync(kFull, word, kEpoch), base = __shfl_sync(kFull, word, kBase);
  const uint64_t masks = __shfl_sync(kFull, word, kMasked), faults = __shfl_sync(kFull, word, kNumFaults);
  const uint32_t masked = low_word(masks) | high_word(masks), peers = g.all() & ~masked;
  const uint64_t mine = epoch != nullptr ? ticket : (ticket >> kTicketShift) + 1;
  const uint32_t bank = g.bank_of(mine), i = lane - kCells, of_bank = g.token_of(i);  // i / ranks
  const bool asked = cell && of_bank == bank && peers >> (i - of_bank * ranks) & 1;
  // Also true if more was read: then others need nothing more from this kernel, and a late block has nothing
  // to send.
  const bool free = !asked || mine <= base + banks || word >= mine - banks;
  const bool all_free = __all_sync(kFull, free) && fits;
  const bool failed = __shfl_sync(kFull, word, kFailed) != 0;
  const bool faulty = low_word(faults) != 0;
  if (lane == 0) o = {mine, base, bank, peers, !failed, faulty, all_free, masked & ~high_word(faults)};
}

// -- waiting ----------------------------------------------------------------------------------------

struct Wanted {
  Op op;
  Phase phase;
  uint32_t peer;
  uint64_t epoch;
  uint64_t* waited = nullptr;  // becomes at least the ns of this wait
  int64_t* stats = nullptr;    // of the caller; the ns of this wait are added
  bool* slow = nullptr;        // set if the wait reached a look_around()
};

enum class Match : uint32_t { kHeader, kAtLeast64 };  // low half equals the epoch; all is at least it

// The outcome of a periodic check during a wait.
enum class Look : uint32_t { kGoOn, kMasked, kAborted, kLate };

__device__ __forceinline__ Look look_around(const Device& g, uint32_t peer, uint64_t start) {
  Control& control = g.state->control;
  if (masked_now(g) >> peer & 1) return Look::kMasked;
  if (load_relaxed(&control.failed) != 0) return Look::kAborted;
  if (uint32_t(load_relaxed(g.own() + Head::kAbort)) == generation(g)) return Look::kAborted;
  if (clock_ns() - start < control.timeout_ns) return Look::kGoOn;
  if (!control.mask_on_timeout || peer == g.rank) return Look::kLate;
  add(g.state->totals.timeouts, 1);
  atomicOr(&control.masked, 1u << peer);
  return Look::kMasked;
}

// A failure to report later, when a thread holds nothing else: a call in the middle of a row would cost
// registers.
struct Trouble {
  Look look = Look::kGoOn;
  uint32_t peer = 0, seen = 0;

  __device__ __forceinline__ bool any() const { return look != Look::kGoOn; }
};

__device__ __noinline__ inline void report(const Device& g, Op op, Phase phase, uint64_t epoch, Look look,
                                           uint32_t peer, uint32_t seen) {
  if (look == Look::kAborted) {
    aborted(g);
    return;
  }
  add(g.state->totals.timeouts, 1);
  // If this rank itself has not read the bank, that is its own mistake: no other rank can free it.
  bool own = phase == Phase::kSendBank;
  if (own) own = load_acquire(g.own() + g.layout.read_cell(op, g.bank_of(epoch), g.rank)) < epoch;
  fail(g, own ? Code::kHook : Code::kTimeout, op, phase, peer, uint32_t(epoch), seen);
}

__device__ __forceinline__ void report(const Device& g, const Wanted& w, const Trouble& trouble) {
  if (trouble.any()) report(g, w.op, w.phase, w.epoch, trouble.look, trouble.peer, trouble.seen);
}

constexpr uint32_t kSpins = 32;  // between two calls of look_around()

// -- words that carry their epoch ---------------------------------------------------------------------

// Spins until a word shows the epoch, then returns true. Returns false if the peer is masked or the group
// failed. A header needs no acquire, because it is complete in itself. The cell of a bank does: the reader's
// accesses precede it.
template <Match kMatch>
__device__ __forceinline__ bool await_word(const Device& g, const void* cell, const Wanted& w,
                                           uint64_t* value) {
  constexpr bool kHeader = kMatch == Match::kHeader;
  uint64_t start = 0;
#pragma unroll 1
  for (uint32_t spins = 0;; ++spins) {
    const uint64_t seen = *value = kHeader ? load_relaxed(cell) : load_acquire(cell);
    if (kHeader ? uint32_t(seen) == uint32_t(w.epoch) : seen >= w.epoch) break;
    if (kHeader && int32_t(uint32_t(seen) - uint32_t(w.epoch)) > 0) {
      fail(g, Code::kViolation, w.op, w.phase, w.peer, uint32_t(w.epoch), uint32_t(seen));
      return false;
    }
    if (spins == 0) start = clock_ns();
    if (spins % kSpins != kSpins - 1) continue;
    if (w.slow != nullptr) *w.slow = true;
    const Look look = look_around(g, w.peer, start);
    if (look == Look::kGoOn) continue;
    if (look != Look::kMasked) report(g, w.op, w.phase, w.epoch, look, w.peer, uint32_t(seen));
    return false;
  }
  if (start == 0) return true;
  const uint64_t waited = clock_ns() - start;
  if (w.waited != nullptr) raise(*w.waited, waited);
  if (w.stats != nullptr) add(*reinterpret_cast<uint64_t*>(w.stats), waited);
  return true;
}

// -- data that is its own ready flag ----------------------------------------------------------------------

__device__ __forceinline__ void peek(const void* slot, uint4* v) { *v = peek16(slot); }
__device__ __forceinline__ void peek(const void* slot, uint2* v) { *v = peek8(slot); }
__device__ __forceinline__ void peek(const void* slot, uint32_t* v) { *v = peek4(slot); }

// Bits per slot in a word that names the peer of each of kCount slots.
template <uint32_t kCount>
constexpr uint32_t kPeerBits = kCount <= 4 ? 8 : 4;

// Spins until the words of all `wanted` slots have arrived, with several loads in flight. Returns the bits of
// those that arrived. at(j): slot j. peers: the peer of each slot, kPeerBits each. waited: [R], updated for
// the last peer.
template <class T, uint32_t kCount, class At>
__device__ __forceinline__ uint32_t await_slots(const Device& g, uint32_t peers, uint32_t wanted,
                                                uint64_t* waited, At&& at, T (&v)[kCount], Trouble& trouble) {
  constexpr uint32_t kBits = kPeerBits<kCount>;
  static_assert(kCount * kBits <= 32 && kMaxPeers <= 1u << kBits);
  uint32_t missing = wanted, peer = 0;
  uint64_t start = 0;
#pragma unroll 1
  for (uint32_t spins = 0;; ++spins) {
#pragma unroll
    for (uint32_t j = 0; j < kCount; ++j)
      if (missing >> j & 1) peek(at(j), &v[j]);
#pragma unroll
    for (uint32_t j = 0; j < kCount; ++j)
      if (missing >> j & 1 && came(v[j])) missing &= ~(1u << j);
    if (missing == 0) break;
    if (spins == 0) start = clock_ns();
    peer = peers >> kBits * (__ffs(missing) - 1) & ((1u << kBits) - 1);
    if (spins % kSpins != kSpins - 1) continue;
    const Look look = look_around(g, peer, start);
    if (look == Look::kGoOn) continue;
    if (look != Look::kMasked) trouble = {look, peer, 0};
    break;
  }
  if (waited != nullptr && start != 0) raise(waited[peer], clock_ns() - start);
  return wanted & ~missing;
}

// -- banks ------------------------------------------------------------------------------------------

// Waits for the banks of all peers. Returns the bits of peers that may be written, or 0 if the group failed.
// The whole block calls it.
__device__ __noinline__ inline uint32_t await_banks(const Device& g, Op op, uint64_t epoch, uint64_t base,
                                                    uint32_t peers) {
  __shared__ uint32_t free_bits;
  const uint32_t lane = threadIdx.x % kWarp;
  if (threadIdx.x < kWarp) {
    const uint64_t wanted = epoch - g.layout.num_banks;
    bool free = peers >> lane & 1;
    if (free && epoch > base + g.layout.num_banks) {
      uint64_t seen;
      free = await_word<Match::kAtLeast64>(g, g.own() + g.layout.read_cell(op, g.bank_of(epoch), lane),
                                           {op, Phase::kSendBank, lane, wanted}, &seen);
    }
    const uint32_t bits = __ballot_sync(kFull, free);
    if (lane == 0) free_bits = has_failed(g) ? 0 : bits;
  }
  __syncthreads();
  return free_bits;
}

// -- what may be written ------------------------------------------------------------------------------

// Applies the injected delays of a phase, and returns the peers to drop. Only every second block is delayed
// for rows, so half of the rows, or of each row, are written before.
__device__ __noinline__ inline uint32_t suffer(const Device& g, Op op, Phase phase, uint64_t epoch) {
  uint32_t drops = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < g.state->control.num_faults; ++i) {
    const DeviceFault& fault = g.state->faults[i];
    if (fault.op != op || fault.phase != phase || (fault.epoch != 0 && fault.epoch != epoch)) continue;
    drops |= fault.drops;
    if (phase == Phase::kSendRows && blockIdx.x % 2 == 0) continue;
    const uint64_t start = clock_ns();
    while (clock_ns() - start < fault.delay_ns) {
    }
  }
  return drops;
}

// The peers that this block writes to in a phase of a send. The whole block calls it, after open. `paused`:
// the call took a while, and loading again is better than having kept data in registers.
__device__ __forceinline__ uint32_t writable(const Device& g, Op op, Phase phase, const Opened& o,
                                             bool* paused) {
  *paused = !o.banks_free || o.faulty;
  if (!*paused) return o.peers;
  const uint32_t peers = await_banks(g, op, o.epoch, o.base, o.peers);
  return o.faulty ? peers & ~suffer(g, op, phase, o.epoch) : peers;
}

}  // namespace ep::cuda

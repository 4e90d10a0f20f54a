// Waits for the headers of a dispatch at its receiver. Each block waits for all headers, and all blocks agree
// on which ones count. Cost: every block polls R * (1 + E_local / 2) words; if no rank is masked, one block
// makes one store.
#pragma once

#include "exchange/nvlink/wait.cuh"

namespace ep::cuda {

// The contents of the headers. counts: [R][E_local], behind it in dynamic shared memory.
struct Arrival {
  uint32_t tokens[kMaxPeers];
  uint32_t missed;   // bits per rank
  uint32_t arrived;  // the ranks on which all blocks agreed

  __device__ __forceinline__ void take(const Device& g, uint64_t epoch, uint32_t source, uint32_t word,
                                       uint32_t value, uint16_t* counts) {
    if (word == 0) {
      const bool sound = (value & ~kHasWeights) <= g.layout.max_tokens;
      if (!sound)
        fail(g, Code::kViolation, Op::kDispatch, Phase::kRecvHeader, source, uint32_t(epoch), value);
      tokens[source] = sound ? value & ~kHasWeights : 0;
      return;
    }
    uint16_t* two = counts + source * g.local_experts + 2 * (word - 1);
    two[0] = uint16_t(value);
    if (2 * word - 1 < g.local_experts) two[1] = uint16_t(value >> 16);
  }
};

__device__ __forceinline__ uint32_t header_words(const Device& g) { return 1 + (g.local_experts + 1) / 2; }

// Waits for word `word` of the header of `source`. Returns false if waits() turns false first.
template <class Waits>
__device__ __forceinline__ bool look_again(const Device& g, const Opened& o, uint32_t source, uint32_t word,
                                           uint64_t* cell, Waits&& waits) {
  do {
    *cell = load_relaxed(g.own() + g.layout.header_at(o.bank, source, word));
    if (uint32_t(*cell) == uint32_t(o.epoch)) return true;
  } while (waits());
  return false;
}

// Decides which headers count, if this block misses one or knows of a masked rank. Blocks may have looked at
// different times and seen different headers, but each places rows by all headers. So one block decides: the
// one with `decides`. It checks missing headers once more, kGraceNs after it learned of the mask. All other
// blocks follow it. A block that never calls agree() had all headers: it had just seen no mask, or saw none
// after they arrived. Those headers arrived before the last check, which finds them. The whole block calls
// it.
__device__ __noinline__ inline uint32_t agree(const Device& g, const Opened& o, bool decides, uint32_t missed,
                                              Arrival& arrival, uint16_t* counts) {
  atomicOr(&arrival.missed, missed);
  __syncthreads();
  const uint32_t words = header_words(g), seen = o.peers & ~arrival.missed, lane = threadIdx.x;
  const uint64_t start = clock_ns(), deadline = 2 * g.state->control.timeout_ns + 2 * kGraceNs;
  const auto goes_on = [&] { return !has_failed(g) && clock_ns() - start < deadline; };
  uint64_t* said = &g.state->arrivals[o.bank];
  if (decides && lane < kWarp) {
    bool here = lane < g.num_ranks && (g.all() & ~seen & ~g.state->control.absent) >> lane & 1;
    if (here) {
      auto* since = reinterpret_cast<unsigned long long*>(&g.state->masked_since_ns[lane]);
      const uint64_t first = atomicCAS(since, 0ull, start), from = first == 0 ? start : first;
      while (clock_ns() - from < kGraceNs) {
      }
      uint64_t cell;
      for (uint32_t w = 0; w < words; ++w)
        here = here && look_again(g, o, lane, w, &cell, [] { return false; });
    }
    const uint32_t arrived = seen | __ballot_sync(kFull, here);
    if (lane == 0) store_relaxed(said, o.epoch << kMaxPeers | arrived);
    if (lane == 0) arrival.arrived = arrived;
  } else if (!decides && lane == 0) {
    uint64_t word;
    do word = load_relaxed(said);
    while (word >> kMaxPeers != o.epoch && goes_on());
    const bool known = word >> kMaxPeers == o.epoch;
    if (!known) fail(g, Code::kTimeout, Op::kDispatch, Phase::kRecvHeader, g.rank, uint32_t(o.epoch), 0);
    arrival.arrived = known ? uint32_t(word) & g.all() : 0;
  }
  __syncthreads();
  const uint32_t arrived = arrival.arrived;
#pragma unroll 1
  for (uint32_t i = lane; i < g.num_ranks * words; i += blockDim.x) {
    const uint32_t source = i / words, word = i % words;
    uint64_t cell;
    if ((arrived & ~seen) >> source & 1 && look_again(g, o, source, word, &cell, goes_on))
      arrival.take(g, o.epoch, source, word, uint32_t(cell >> 32), counts);
  }
  __syncthreads();
  return arrived;
}

constexpr uint32_t kHeadersAhead = 2;  // words that a thread has in flight

// Fills `arrival` and `counts`. Returns the bits of the ranks whose header arrived, the same in all blocks.
// The whole block calls it; threads from `self` on wait. `leads`: set in one block of a kernel, which
// measures and decides.
__device__ __forceinline__ uint32_t await_headers(const Device& g, const DispatchRecvArgs& a, const Opened& o,
                                                  Slot slot, bool leads, uint32_t self, Arrival& arrival,
                                                  uint16_t* counts) {
  const uint32_t words = header_words(g), all = g.num_ranks * words, step = blockDim.x - self;
  uint32_t missed = 0;
  bool slow = false;
#pragma unroll 1
  for (uint32_t first = threadIdx.x - self; first < all; first += kHeadersAhead * step) {
    uint64_t cells[kHeadersAhead];  // looked at together: usually the others have come by then
#pragma unroll
    for (uint32_t j = 0; j < kHeadersAhead; ++j)
      if (const uint32_t i = first + j * step; i < all)
        cells[j] = load_relaxed(g.own() + g.layout.header_at(o.bank, i / words, i % words));
#pragma unroll
    for (uint32_t j = 0; j < kHeadersAhead; ++j) {
      const uint32_t i = first + j * step, source = i / words, word = i % words;
      if (i >= all) break;
      Wanted wanted{Op::kDispatch, Phase::kRecvHeader, source, o.epoch};
      wanted.slow = &slow;
      if (leads && word == 0) {
        wanted.waited = &g.scratch(slot, o.epoch).wait_ns[source];
        wanted.stats = a.wait_stats == nullptr ? nullptr : a.wait_stats + source;
      }
      const bool asked = o.peers >> source & 1;
      if (asked && uint32_t(cells[j]) != uint32_t(o.epoch) &&
          !await_word<Match::kHeader>(g, g.own() + g.layout.header_at(o.bank, source, word), wanted,
                                      &cells[j]))
        missed |= 1u << source;
      arrival.take(g, o.epoch, source, word, asked ? uint32_t(cells[j] >> 32) : 0, counts);
    }
  }
  if (threadIdx.x == 0) arrival.missed = 0;
  bool asks = missed != 0 || o.fresh != 0;
  if (slow && !asks) asks = (masked_now(g) & o.peers) != 0;
  if (__syncthreads_or(asks)) return agree(g, o, leads, missed, arrival, counts);
  if (leads && threadIdx.x == 0) store_relaxed(&g.state->arrivals[o.bank], o.epoch << kMaxPeers | o.peers);
  return o.peers;
}

}  // namespace ep::cuda

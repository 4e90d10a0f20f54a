// [7] dispatch_recv, on the GPU.
//
// Waits for the header of every unmasked rank and for the rows of the tokens that the headers announce.
// Entries are numbered by (local expert, source, token). Each row carries its position among the rows of its
// source, and the headers say how many rows precede those. Two runs give identical bytes, and nothing is
// counted here.
// Afterwards
//   PADDED rows[e, position], scales column-major; COMPACT rows[row]; INDEX row_ids[row], no copy
//   counts, offsets, src_info, layout_range: see DispatchRecvArgs
//   handle: the row and weight of each entry
// and the slots are empty again and counted as read, unless the view reads them in place.
// Cost: one row read per received row, one row written and one emptied per entry.
// Grid: block 0 reports to the caller what arrived. The others take (token, source) in turn.
#pragma once

#include "exchange/common/quant.hpp"
#include "exchange/nvlink/await_headers.cuh"
#include "exchange/nvlink/bookkeeping.cuh"

namespace ep::cuda {

// first[e] = rows of local experts before e; first[E_local] = all rows. First warp of the block.
__device__ __forceinline__ void scan_experts(const Device& g, uint32_t arrived, const uint16_t* counts,
                                             int32_t* first) {
  constexpr uint32_t kTogether = 4;  // experts of a lane, one behind the other: most ranks take one round
  const uint32_t lane = threadIdx.x;
  int32_t running = 0;
#pragma unroll 1
  for (uint32_t begin = 0; begin < g.local_experts; begin += kTogether * kWarp) {
    const uint32_t e = begin + kTogether * lane;
    int32_t rows[kTogether] = {}, sum = 0;
#pragma unroll 1
    for (uint32_t s = 0; s < g.num_ranks; ++s)
#pragma unroll
      for (uint32_t i = 0; i < kTogether; ++i)
        if (e + i < g.local_experts && arrived >> s & 1) rows[i] += counts[s * g.local_experts + e + i];
#pragma unroll
    for (uint32_t i = 0; i < kTogether; ++i) sum += rows[i];
    const int32_t own = sum;
#pragma unroll
    for (uint32_t by = 1; by < kWarp; by *= 2) {
      const int32_t lower = __shfl_up_sync(kFull, sum, by);
      if (lane >= by) sum += lower;
    }
    int32_t before = running + sum - own;
#pragma unroll
    for (uint32_t i = 0; i < kTogether; ++i) {
      if (e + i < g.local_experts) first[e + i] = before;
      before += rows[i];
    }
    running += __shfl_sync(kFull, sum, kWarp - 1);
  }
  if (lane == 0) first[g.local_experts] = running;
}

// Writes counts, offsets and ranges for the caller, and totals for the statistics. One block.
__device__ __forceinline__ void write_layout(const Device& g, const DispatchRecvArgs& a, std::byte* handle,
                                             uint32_t arrived, const Arrival& arrival, const uint16_t* counts,
                                             const int32_t* first) {
#pragma unroll 1
  for (uint32_t e = threadIdx.x; e < g.local_experts; e += blockDim.x) {
    int32_t begin = 0;
    const int32_t most = int32_t(g.num_ranks * g.layout.max_tokens);  // refused ids may exceed it
#pragma unroll 1
    for (uint32_t s = 0; s < g.num_ranks; ++s) {
      const int32_t said = arrived >> s & 1 ? counts[s * g.local_experts + e] : 0,
                    count = min(said, most - begin);
      if (a.layout_range != nullptr)
        a.layout_range[uint64_t(e) * g.num_ranks + s] = count == 0 ? 0 : int64_t(begin) << 32 | count;
      begin += count;
    }
    a.counts[e] = begin;
    a.offsets[e] = first[e];
    add(g.expert_tokens[e], uint64_t(begin));
    if (a.expert_stats != nullptr) atomicAdd(&a.expert_stats[e], begin);
  }
  auto* h = reinterpret_cast<DeviceHandle*>(handle);
  if (threadIdx.x < g.num_ranks) h->source_tokens[threadIdx.x] = arrival.tokens[threadIdx.x];
  if (threadIdx.x != 0) return;
  a.offsets[g.local_experts] = first[g.local_experts];
  h->arrived = arrived;
}

// Writes the result of a failed dispatch: no rows, so later kernels in the stream have nothing to do. One
// block.
__device__ __forceinline__ void write_none(const Device& g, const DispatchRecvArgs& a) {
#pragma unroll 1
  for (uint32_t e = threadIdx.x; e <= g.local_experts; e += blockDim.x) {
    if (e < g.local_experts) a.counts[e] = 0;
    a.offsets[e] = 0;
  }
}

// In shared memory: where the copies of one received row go, as offsets of bytes and of scales in the view.
struct Placed {
  uint64_t row[kMaxTopK], scale[kMaxTopK];
  uint32_t count, failed;
  uint32_t late;         // a thread has given up a row: all leave together after the next barrier
  uint2 seen[kMaxTopK];  // entries that await_first() read
};

// One choice of a received token, held by the lane of its number.
struct Entry {
  uint32_t row = 0, expert = 0, position = 0, weight = 0;
  bool here = false;
};

// Waits for the entries of the block's first token while other threads wait for headers. It ends when the
// entries have arrived, or when the header says that the source has no such token. Otherwise the entries stay
// all ones, and the failure is reported. First warp.
__device__ __forceinline__ void await_first(const Device& g, const Opened& o, uint32_t source, uint32_t token,
                                            Placed& placed) {
  const DeviceLayout& l = g.layout;
  const uint32_t lane = threadIdx.x;
  const std::byte* at = g.own() + l.slot_at(o.bank, source, token) + l.entry_offset + lane * sizeof(uint64_t);
  const std::byte* header = g.own() + l.header_at(o.bank, source, 0);
  uint2 entry{kNothing, kNothing};
  uint64_t start = 0;
#pragma unroll 1
  for (uint32_t spins = 0; o.peers >> source & 1; ++spins) {
    if (lane < l.top_k) entry = peek8(at);
    const uint64_t cell = load_relaxed(header);
    const bool known = uint32_t(cell) == uint32_t(o.epoch);
    const bool absent = known && token >= (uint32_t(cell >> 32) & ~kHasWeights);
    if (__all_sync(kFull, absent || lane >= l.top_k || came(entry))) break;  // all lanes leave together
    if (spins == 0) start = clock_ns();
    if (spins % kSpins != kSpins - 1) continue;
    const Look look = look_around(g, source, start);
    if (lane == 0 && look != Look::kGoOn && look != Look::kMasked)
      report(g, Op::kDispatch, Phase::kRecvHeader, o.epoch, look, source, 0);
    if (__any_sync(kFull, has_failed(g) || masked_now(g) >> source & 1)) break;
  }
  if (lane < kMaxTopK) placed.seen[lane] = entry;
}

// Waits for the entries of a token, unless await_first() has `seen` them, and computes their rows. First
// warp; lane k has choice k.
__device__ __forceinline__ Entry place(const Device& g, const DispatchRecvArgs& a, const Opened& o, Slot slot,
                                       uint32_t source, std::byte* token_slot, uint32_t arrived,
                                       const uint16_t* counts, const int32_t* first, bool seen,
                                       Placed& placed) {
  const DeviceLayout& l = g.layout;
  const uint32_t lane = threadIdx.x, padded = l.num_ranks * l.max_tokens;
  const uint32_t before = arrived & ((1u << source) - 1), low = (1u << l.position_bits) - 1;
  const uint32_t column = g.scale_words * a.scale_pitch;
  const bool pads = a.view == View::kPadded;
  std::byte* at = token_slot + l.entry_offset + lane * sizeof(uint64_t);
  uint2 came_in[1] = {{kNothing, kNothing}};
  if (seen) came_in[0] = placed.seen[lane % kMaxTopK];
  Trouble trouble;
  bool lost = false;
  if (lane < l.top_k && !came(came_in[0])) {
    uint64_t* waited = lane == 0 ? g.scratch(slot, o.epoch).wait_ns : nullptr;
    lost = await_slots(g, source, 1, waited, [&](uint32_t) { return at; }, came_in, trouble) == 0;
  }
  Entry e;
  e.here = lane < l.top_k && !lost && came_in[0].x != DeviceLayout::kAbsent;
  e.weight = came_in[0].y;
  if (e.here) {
    // If a sender refused ids, for example repeated ones, its positions may be too large. Clamp them to
    // protect memory.
    e.expert = min(came_in[0].x >> l.position_bits, g.local_experts - 1);
    e.position = came_in[0].x & low;
#pragma unroll
    for (uint32_t s = 0; s < kMaxPeers - 1; ++s)
      if (before >> s & 1) e.position += counts[s * g.local_experts + e.expert];
    e.position = min(e.position, padded - 1);
    e.row = pads ? e.expert * padded + e.position : first[e.expert] + e.position;
    if (!pads && e.row >= a.capacity) {
      fail(g, kCapacity, Op::kDispatch, Phase::kRecvExpand, source, a.capacity, e.row);
      e.here = false;
    }
  }
  const uint32_t all = __ballot_sync(kFull, e.here), n = __popc(all & ((1u << lane) - 1));
  if (e.here) {
    placed.row[n] = uint64_t(e.row) * l.row_bytes;
    placed.scale[n] = pads ? uint64_t(e.expert) * column + e.position : uint64_t(e.row) * g.scale_words;
  }
  if (lane == 0) {
    placed.count = __popc(all);
    placed.failed = placed.late;
  }
  if (!__any_sync(kFull, lost)) return e;
  report(g, {Op::kDispatch, Phase::kRecvHeader, source, o.epoch}, trouble);
  // If a peer is given up, its rows may keep old contents. Row ids of an INDEX view may not.
  if (lane == 0 && a.view == View::kIndex)
    fail(g, Code::kTimeout, Op::kDispatch, Phase::kRecvHeader, source, uint32_t(o.epoch), 0);
  if (lane == 0) placed.failed = has_failed(g);
  return e;
}

// Stores what others need to know of a token's choices, while its row is copied. Called by the warp that
// placed it.
__device__ __forceinline__ void note(const Device& g, const DispatchRecvArgs& a, std::byte* handle,
                                     const Opened& o, uint32_t source, uint32_t token, std::byte* token_slot,
                                     const Entry& e) {
  const DeviceLayout& l = g.layout;
  const uint32_t lane = threadIdx.x, row = source * l.max_tokens + token;
  if (lane >= l.top_k) return;
  if (a.view != View::kIndex) put8(token_slot + l.entry_offset + lane * sizeof(uint64_t), kNothing, kNothing);
  const uint64_t n = uint64_t(row) * l.top_k + lane;
  reinterpret_cast<int32_t*>(handle + DeviceHandle::entry_rows(l))[n] = e.here ? int32_t(e.row) : -1;
  reinterpret_cast<float*>(handle + DeviceHandle::entry_weights(l))[n] = float_of(e.weight);
  if (!e.here) return;
  if (a.src_info != nullptr)
    a.src_info[uint64_t(e.expert) * l.num_ranks * l.max_tokens + e.position] = int32_t(token);
  if (a.view == View::kIndex) a.row_ids[e.row] = int64_t(o.bank) * l.num_ranks * l.max_tokens + row;
}

constexpr uint32_t kAhead = 2;  // 16-byte words of a row that a thread awaits at once

// What a thread reads of a row at a time: words and one scale, all in flight together. A word that the thread
// does not own is zero, which counts as arrived.
struct Taken {
  uint4 v[kAhead];
  uint32_t scale;
};

// The position in a row: round 0, 1, ... of a slot. A word begins at at(i), below `bytes`.
struct RowAt {
  const Device& g;
  std::byte* slot;
  uint32_t round;

  __device__ __forceinline__ uint32_t at(uint32_t i) const {
    return (threadIdx.x + (round * kAhead + i) * blockDim.x) * 16;
  }
  __device__ __forceinline__ uint32_t unit() const { return threadIdx.x + round * blockDim.x; }
  __device__ __forceinline__ std::byte* scale() const {
    return slot + g.layout.scale_offset + unit() * sizeof(uint32_t);
  }
  __device__ __forceinline__ bool has(uint32_t i) const { return at(i) < uint32_t(g.layout.row_bytes); }
  __device__ __forceinline__ bool has_scale() const { return unit() < g.scale_words; }

  __device__ __forceinline__ Taken nothing_yet() const {
    Taken taken;
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i)
      taken.v[i] = has(i) ? uint4{kNothing, kNothing, kNothing, kNothing} : uint4{};
    taken.scale = has_scale() ? kNothing : 0;
    return taken;
  }
};
__device__ __forceinline__ bool came(const Taken& taken) {
  bool all = came(taken.scale);
#pragma unroll
  for (uint32_t i = 0; i < kAhead; ++i) all = all && came(taken.v[i]);
  return all;
}
// Reads the words that have not arrived.
__device__ __forceinline__ void peek(const RowAt& at, Taken* taken) {
#pragma unroll
  for (uint32_t i = 0; i < kAhead; ++i)
    if (!came(taken->v[i])) taken->v[i] = peek16(at.slot + at.at(i));
  if (!came(taken->scale)) taken->scale = peek4(at.scale());
}

// Copies one received row to all its entries and empties its slot. Words that the sender never sent become
// zero. `taken`: the words of round 0, read once.
template <bool kNarrow>
__device__ __forceinline__ void expand(const Device& g, const DispatchRecvArgs& a, uint32_t source,
                                       std::byte* slot, const Placed& placed, Taken (&taken)[1],
                                       Trouble& trouble) {
  const DeviceLayout& l = g.layout;
  const uint32_t bytes = uint32_t(l.row_bytes), count = placed.count;
  const uint32_t stride = a.view == View::kPadded ? a.scale_pitch : 1;
  auto* out = static_cast<std::byte*>(a.rows);
#pragma unroll 1
  for (RowAt at{g, slot, 0}; at.has(0) && !trouble.any(); ++at.round) {  // there are fewer scales than words
    if (at.round != 0) taken[0] = at.nothing_yet();
    if (at.round != 0 || !came(taken[0]))
      await_slots(g, source, 1, nullptr, [&](uint32_t) { return at; }, taken, trouble);
    if (a.view == View::kIndex) continue;
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      if (!at.has(i)) continue;
      const uint4 v = came(taken[0].v[i]) ? taken[0].v[i] : uint4{};
      empty16(slot + at.at(i));
#pragma unroll 1
      for (uint32_t n = 0; n < count; ++n) store_row<kNarrow>(out + placed.row[n], at.at(i), bytes, v);
    }
    if (!at.has_scale()) continue;
    const uint32_t scale = came(taken[0].scale) ? taken[0].scale : 0;
    put4(at.scale(), kNothing);
#pragma unroll 1
    for (uint32_t n = 0; n < count; ++n) a.scales[placed.scale[n] + uint64_t(at.unit()) * stride] = scale;
  }
}

// After a failure: rows that have no token point to one, so that whoever reads the view stays inside it.
__device__ __noinline__ inline void point_anywhere(const Device& g, const DispatchRecvArgs& a,
                                                   const Opened& o, uint32_t rows) {
  for (uint32_t i = threadIdx.x; i < min(rows, a.capacity); i += blockDim.x)
    a.row_ids[i] = int64_t(o.bank) * g.num_ranks * g.layout.max_tokens;
}

// `shared`: [E_local + 1] int32, then [R][E_local] uint16. `epoch`: null if the kernel sends too.
template <bool kNarrow>
__device__ __forceinline__ Done dispatch_recv(const Device& g, const DispatchRecvArgs& a, std::byte* handle,
                                              Opened& o, Slot slot, const uint64_t* epoch, uint32_t block,
                                              uint32_t blocks, int32_t* first) {
  __shared__ Arrival arrival;
  __shared__ Placed placed;
  auto* counts = reinterpret_cast<uint16_t*>(first + g.local_experts + 1);
  if (threadIdx.x == 0) placed.late = 0;
  if (threadIdx.x < kWarp) open(g, Op::kDispatch, epoch, o);
  __syncthreads();
  Done done;
  if (!o.alive) {
    if (block == 0) write_none(g, a);
    return done;
  }

  // 1. Wait for all headers. Block 0 only reports them to the caller, so that the others need not wait for
  // that.
  const bool begins = block != 0 && block - 1 < g.layout.max_tokens * g.num_ranks;
  if (begins && threadIdx.x < kWarp) await_first(g, o, g.source_of(block - 1), g.token_of(block - 1), placed);
  const uint32_t arrived = await_headers(g, a, o, slot, block == 0, begins ? kWarp : 0, arrival, counts);
  if (arrived != o.peers && __syncthreads_or(has_failed(g))) {
    if (block == 0) write_none(g, a);
    return done;
  }
  if (a.view != View::kPadded || block == 0) {
    if (threadIdx.x < kWarp) scan_experts(g, arrived, counts, first);
    __syncthreads();
  }
  if (block == 0) {
    write_layout(g, a, handle, arrived, arrival, counts, first);
    return done;
  }

  // 2. Take the tokens of all sources in turn: find the rows, then copy the words as they arrive.
  uint32_t most = 0;
#pragma unroll 1
  for (uint32_t s = 0; s < g.num_ranks; ++s)
    if (arrived >> s & 1) most = max(most, arrival.tokens[s]);
  const uint32_t items = most * g.num_ranks;
  Trouble trouble;
#pragma unroll 1
  for (uint32_t i = block - 1; i < items; i += blocks - 1) {
    const uint32_t token = g.token_of(i), source = g.source_of(i);
    if (!(arrived >> source & 1) || token >= arrival.tokens[source]) continue;
    std::byte* row = g.own() + g.layout.slot_at(o.bank, source, token);
    const RowAt begin{g, row, 0};
    Taken taken[1] = {begin.nothing_yet()};
    peek(begin, &taken[0]);
    __syncthreads();
    Entry entry;
    if (threadIdx.x < kWarp)
      entry = place(g, a, o, slot, source, row, arrived, counts, first, i == block - 1, placed);
    __syncthreads();
    if (placed.failed) {
      if (a.view == View::kIndex) point_anywhere(g, a, o, first[g.local_experts]);
      break;
    }
    done.emptied = a.view != View::kIndex;
    if (threadIdx.x < kWarp) note(g, a, handle, o, source, token, row, entry);
    if (placed.count == 0) continue;
    ++done.rows;
    expand<kNarrow>(g, a, source, row, placed, taken, trouble);
    if (!trouble.any()) continue;
    report(g, {Op::kDispatch, Phase::kRecvHeader, 0, o.epoch}, trouble);
    placed.late = 1;
  }
  return done;
}

// Empties the slot of a received token after a view has read it in place. The whole block calls it.
__device__ __forceinline__ void empty_slot(const Device& g, uint32_t bank, uint32_t source, uint32_t token) {
  std::byte* slot = g.own() + g.layout.slot_at(bank, source, token);
#pragma unroll 1
  for (uint32_t at = threadIdx.x * 16; at < g.layout.slot_pitch; at += blockDim.x * 16) empty16(slot + at);
}

}  // namespace ep::cuda

// [7] dispatch_send, on the GPU.
//
// Afterwards, for every unmasked rank d of this rank s, bank of the epoch:
//   d.slots[bank][s][t], every token t:
//     row x[t] (quantised for FP8) and scales, where d has an expert of t
//     per choice {place, weight}: place = expert of d and how many tokens of s before t chose it, or kAbsent
//   d.headers[bank][s] = T, whether there are weights, and how many tokens of s chose each expert of d
//   handle: epoch, T, sent_to, places, weights.
// A receiver computes from the row and the headers where copies go: ranks need no common counter.
// Host obligations: one send of a group at a time (stream order or events).
// Cost: one read of x, one row written per (token, rank); each block reads T * K ids for the counts.
// Grid: one block writes the headers, every other takes tokens, or parts of them, in turn.
#pragma once

#include "exchange/nvlink/bookkeeping.cuh"
#include "exchange/nvlink/row.cuh"

namespace ep::cuda {

__device__ __forceinline__ uint32_t tokens_of(const DispatchSendArgs& a) {
  if (a.tokens_on_device == nullptr) return a.tokens;
  return min(uint32_t(max(*a.tokens_on_device, 0)), a.tokens);
}

// Copies the table of owners to shared memory. Each thread first loads four words, which arrive during other
// work.
__device__ __forceinline__ uint4 load_owners(const Device& g) {
  return threadIdx.x * 4 < g.num_experts ? reinterpret_cast<const uint4*>(g.table)[threadIdx.x] : uint4{};
}
__device__ __forceinline__ void keep_owners(const Device& g, const uint4& first, uint32_t* table) {
  const uint32_t mine[4] = {first.x, first.y, first.z, first.w};
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i)
    if (threadIdx.x * 4 + i < g.num_experts) table[threadIdx.x * 4 + i] = mine[i];
#pragma unroll 1
  for (uint32_t e = blockDim.x * 4 + threadIdx.x; e < g.num_experts; e += blockDim.x) table[e] = g.table[e];
}

// -- headers ----------------------------------------------------------------------------------------

// Loads the ids of all tokens, several per thread in flight. They are not inspected here, because that would
// wait for each load. All warps but the first take part; the first opens the kernel.
struct Ids {
  static constexpr uint32_t kAhead = 6;
  int64_t id[kAhead];

  static __device__ __forceinline__ uint32_t at(uint32_t from, uint32_t i) {
    return from + threadIdx.x - kWarp + i * (blockDim.x - kWarp);
  }
  __device__ __forceinline__ void load(const DispatchSendArgs& a, uint32_t count, uint32_t from) {
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) id[i] = at(from, i) < count ? a.ids[at(from, i)] : -1;
  }
};

// Fills the handle and counts, in shared memory, how many tokens chose each expert. Experts are in rank
// order.
__device__ __forceinline__ void count_choices(const Device& g, const DispatchSendArgs& a, std::byte* handle,
                                              uint32_t tokens, Ids& ids, uint32_t* counts) {
  auto* places = reinterpret_cast<int32_t*>(handle + DeviceHandle::places());
  auto* weights = reinterpret_cast<float*>(handle + DeviceHandle::weights(g.layout));
  const uint32_t top_k = g.layout.top_k, count = tokens * top_k;
  uint32_t bad = kNothing;
#pragma unroll 1
  for (uint32_t from = 0; from < count;) {
    int32_t place[Ids::kAhead];  // -1: none, -2: invalid id
    float weight[Ids::kAhead];
#pragma unroll
    for (uint32_t i = 0; i < Ids::kAhead; ++i) {
      const int64_t id = ids.id[i];
      place[i] = id >= -1 ? -1 : -2;
      if (id >= 0) place[i] = id < int64_t(g.num_experts) ? int32_t(g.table[id]) : -2;
      weight[i] = Ids::at(from, i) < count && a.weights != nullptr ? a.weights[Ids::at(from, i)] : 0.0f;
    }
#pragma unroll
    for (uint32_t i = 0; i < Ids::kAhead; ++i) {
      const uint32_t j = Ids::at(from, i);
      if (j >= count) break;
      if (place[i] >= 0)
        atomicAdd(&counts[g.experts_before[place[i] >> kOwnerShift] + (place[i] & kLocalMask)], 1u);
      else if (place[i] == -2)
        bad = j;
      places[j] = max(place[i], -1);
      weights[j] = weight[i];
    }
    from += Ids::kAhead * (blockDim.x - kWarp);
    if (from < count) ids.load(a, count, from);
  }
  if (bad != kNothing) fail(g, kBadIds, Op::kDispatch, Phase::kSendRows, g.rank, bad / top_k, bad % top_k);
}

// `counts`: [E] in shared memory.
__device__ __forceinline__ Done send_headers(const Device& g, const DispatchSendArgs& a, std::byte* handle,
                                             Opened& o, uint32_t* counts) {
  const uint32_t tokens = tokens_of(a);
  Ids ids;
  if (threadIdx.x >= kWarp) ids.load(a, tokens * g.layout.top_k, 0);
#pragma unroll 1
  for (uint32_t e = threadIdx.x; e < g.num_experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  if (threadIdx.x < kWarp)
    open(g, Op::kDispatch, nullptr, o);
  else
    count_choices(g, a, handle, tokens, ids, counts);
  __syncthreads();  // all threads have counted
  if (!o.alive) return {};
  if (threadIdx.x == 0) {
    auto* h = reinterpret_cast<DeviceHandle*>(handle);
    h->epoch = o.epoch;
    h->tokens = tokens;
    h->sent_to = o.peers;
  }
  bool paused;
  const uint32_t peers = writable(g, Op::kDispatch, Phase::kSendHeader, o, &paused);
  const uint64_t tag = uint32_t(o.epoch), first = tokens | (a.weights != nullptr ? kHasWeights : 0);
  Done done;
#pragma unroll 1
  for (uint32_t r = 0; r < g.num_ranks; ++r) {
    if (!(peers >> r & 1)) continue;
    const uint32_t experts = g.experts_of[r], words = 1 + (experts + 1) / 2;
    const uint32_t* chosen = counts + g.experts_before[r];
#pragma unroll 1
    for (uint32_t w = threadIdx.x; w < words; w += blockDim.x) {
      const uint32_t e = 2 * (w - 1);
      const uint64_t value = w == 0 ? first : chosen[e] | (e + 1 < experts ? chosen[e + 1] : 0) << 16;
      store_relaxed(g.regions[r] + g.layout.header_at(o.bank, g.rank, w), value << 32 | tag);
    }
    (r == g.rank ? done.bytes_local : done.bytes) += words * sizeof(uint64_t);
  }
  if (threadIdx.x == 0) add(g.state->totals.tokens, tokens);
  return done;
}

// -- rows -------------------------------------------------------------------------------------------

template <class Fn>
__device__ __forceinline__ void for_each_rank(const Device& g, uint32_t ranks, Fn&& fn) {
#pragma unroll 1
  for (uint32_t i = 1, r = g.rank; i <= g.num_ranks; ++i) {
    if (++r == g.num_ranks) r = 0;
    if (ranks >> r & 1) fn(g.regions[r]);
  }
}

constexpr uint32_t kNobody = 0xffff;  // no expert: E fits 16 bits (ep_server/exchange/nvlink/launch.py)
constexpr uint32_t kEarly = 6;        // ids of earlier tokens that a thread has in flight

// Ids of the tokens before one, held by all warps but the first, which opens the kernel meanwhile.
struct Earlier {
  uint32_t ids[kEarly];  // not used while loading, because each use would wait for its load

  static __device__ __forceinline__ uint32_t step() { return kEarly * (blockDim.x - kWarp); }
  __device__ __forceinline__ void load(const int64_t* from, uint32_t count, uint32_t first) {
#pragma unroll
    for (uint32_t i = 0; i < kEarly; ++i) {
      const uint32_t j = first + threadIdx.x - kWarp + i * (blockDim.x - kWarp);
      ids[i] = j < count ? uint32_t(from[j]) & 0xffff : kNobody;
    }
  }
  // In lane k: how many ids of the warp equal `wanted` of lane k.
  __device__ __forceinline__ uint32_t same_as(uint32_t wanted, uint32_t top_k) const {
    constexpr uint32_t kTogether = 4;  // divides 16, the maximum top-k
    uint32_t found = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < top_k; first += kTogether) {
#pragma unroll
      for (uint32_t k = first; k < first + kTogether; ++k) {
        const uint32_t id = __shfl_sync(kFull, wanted, k);
        uint32_t same = 0;
#pragma unroll
        for (uint32_t i = 0; i < kEarly; ++i) same += ids[i] == id;
        same = __reduce_add_sync(kFull, same);
        if (threadIdx.x % kWarp == k) found = same;
      }
    }
    return found;
  }
};

// In shared memory: for each choice k of the current token, how many earlier tokens made it, by warp.
struct Before {
  uint32_t found[kMaxWarps][kMaxTopK];

  // Called by all warps but the first. `id`: choice `lane`.
  __device__ __forceinline__ void count(Earlier& earlier, const int64_t* from, uint32_t count, int64_t id,
                                        uint32_t top_k) {
    const uint32_t lane = threadIdx.x % kWarp, wanted = lane < top_k ? uint32_t(id) & 0xffff : kNobody;
    uint32_t mine = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < count;) {
      mine += earlier.same_as(wanted, top_k);
      first += Earlier::step();
      if (first < count) earlier.load(from, count, first);
    }
    if (lane < kMaxTopK) found[threadIdx.x / kWarp][lane] = mine;
  }
  __device__ __forceinline__ uint32_t of(uint32_t k) const {
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t w = 1; w < kMaxWarps; ++w)
      if (w < blockDim.x / kWarp) sum += found[w][k];
    return sum;
  }
};

template <class RowOf>
__device__ __forceinline__ void store_pieces(const Device& g, const RowOf& row, uint64_t slot,
                                             uint32_t ranks) {
#pragma unroll
  for (uint32_t i = 0; i < RowOf::kAhead; ++i) {
    if (!__any_sync(kFull, row.at(i) < row.end)) continue;
    const Piece p = row.piece(i, g.payload);
    for_each_rank(g, ranks, [&](std::byte* region) {
      if (p.active) put16(region + slot + p.at, p.words);
      if (p.leads) put4(region + slot + g.layout.scale_offset + p.scale_at * sizeof(uint32_t), p.scale);
    });
  }
}

// Writes {place, weight} per choice to every peer, one warp per peer. Lane k has choice k. place: from the
// table.
__device__ __forceinline__ void send_entries(const Device& g, uint64_t slot, const Before& earlier,
                                             bool valid, uint32_t place, float weight, uint32_t peers) {
  const uint32_t lane = threadIdx.x % kWarp;
  if (lane >= g.layout.top_k) return;
  const uint32_t bits = g.layout.position_bits;
  const uint32_t before = min(earlier.of(lane), (1u << bits) - 1);  // an id repeated in a token may exceed it
  const uint32_t entry = (place & kLocalMask) << bits | before;
  const uint64_t at = slot + g.layout.entry_offset + lane * sizeof(uint64_t);
#pragma unroll 1
  for (uint32_t r = threadIdx.x / kWarp; r < g.num_ranks; r += blockDim.x / kWarp)
    if (peers >> r & 1)
      put8(g.regions[r] + at, valid && place >> kOwnerShift == r ? entry : DeviceLayout::kAbsent,
           sendable(bits_of(weight)));
}

// What a token needs, loaded before the block waits for anything.
template <bool kFp8, bool kNarrow>
struct Token {
  Row<kFp8, kNarrow> row;
  Earlier earlier;
  int64_t id;  // choice `lane`
  float weight;
  uint32_t part;

  // i: index over all parts of all tokens.
  __device__ __forceinline__ void load(const Device& g, const DispatchSendArgs& a, uint32_t i) {
    const uint32_t t = i >> a.split, lane = threadIdx.x % kWarp, top_k = g.layout.top_k;
    part = i & ((1u << a.split) - 1);
    begin_row(row, a.x, g.hidden, t, part, a.split);
    row.load();
    id = lane < top_k ? a.ids[uint64_t(t) * top_k + lane] : -1;
    weight = lane < top_k && a.weights != nullptr ? a.weights[uint64_t(t) * top_k + lane] : 0.0f;
    if (part == 0 && threadIdx.x >= kWarp) earlier.load(a.ids, t * top_k, 0);
  }
  // Counts the earlier tokens that made the same choices.
  __device__ __forceinline__ void count(const Device& g, const DispatchSendArgs& a, uint32_t i,
                                        Before& before) {
    const uint32_t top_k = g.layout.top_k;
    if (part == 0 && threadIdx.x >= kWarp) before.count(earlier, a.ids, (i >> a.split) * top_k, id, top_k);
  }
};

// `table`: [E] in shared memory.
template <bool kFp8, bool kNarrow>
__device__ __forceinline__ Done dispatch_send(const Device& g, const DispatchSendArgs& a, Opened& o,
                                              uint32_t block, uint32_t blocks, uint32_t* table) {
  __shared__ Before before;
  const uint32_t items = tokens_of(a) << a.split;
  bool opened = false, paused = false;
  uint32_t peers = 0, twice = 0;
  Done done;
#pragma unroll 1
  for (uint32_t i = block;;) {
    // 1. Start loading what the token needs before waiting for anything.
    Token<kFp8, kNarrow> token;
    if (i < a.tokens << a.split) token.load(g, a, i);
    if (!opened) {
      const uint4 owners = load_owners(g);
      if (threadIdx.x < kWarp) open(g, Op::kDispatch, nullptr, o);
      keep_owners(g, owners, table);
    }
    if (i < items) token.count(g, a, i, before);
    __syncthreads();
    if (!o.alive || i >= items) break;
    if (!opened) {
      opened = true;
      peers = writable(g, Op::kDispatch, Phase::kSendRows, o, &paused);
      if (paused) continue;  // load it again instead of keeping it in registers
    }

    // 2. Find where the copies go, from the choices of earlier tokens.
    const uint32_t t = i >> a.split, lane = threadIdx.x % kWarp;
    const uint64_t slot = g.layout.slot_at(o.bank, g.rank, t);
    const bool valid = token.id >= 0 && token.id < int64_t(g.num_experts);
    const uint32_t place = valid ? table[token.id] : 0;
    if (token.part == 0) send_entries(g, slot, before, valid, place, token.weight, peers);
    const uint32_t ranks = __reduce_or_sync(kFull, valid ? 1u << (place >> kOwnerShift) : 0) & peers;

    // 3. Load and quantise the row once, and store it to all its ranks.
#pragma unroll 1
    for (;;) {
      store_pieces(g, token.row, slot, ranks);
      if (!token.row.next()) break;
      token.row.load();
    }
    if (token.part == 0 && threadIdx.x < kWarp) {
      const uint32_t bytes = uint32_t(g.layout.row_bytes) + g.scale_words * 4;
      done.bytes += __popc(ranks & ~(1u << g.rank)) * bytes;
      done.bytes_local += (ranks >> g.rank & 1) * bytes;
      const uint32_t same = __match_any_sync(kFull, valid ? int32_t(token.id) : -1 - int32_t(lane));
      if ((same & (same - 1)) != 0) twice = t + 1;
    }
    i += blocks;
    if (i >= items) break;
    __syncthreads();  // all threads have used the counts
  }
  if (twice != 0) fail(g, kBadIds, Op::kDispatch, Phase::kSendRows, g.rank, twice - 1, threadIdx.x);
  return done;
}

}  // namespace ep::cuda

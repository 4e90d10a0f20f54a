// dispatch_send, on the GPU.
//
// Afterwards, for every unmasked rank d of this rank s, bank of the epoch:
//   d.slots[bank][s][t], every token t:
//     row x[t] (quantised for FP8) and scales, where d has an expert of t
//     per choice {place, weight}: place = expert of d and how many tokens of s before t chose it, or kAbsent
//   d.headers[bank][s] = T, whether there are weights, and how many tokens of s chose each expert of d
//   handle: epoch, T, sent_to, places, weights.
// So a receiver knows from one row and the headers where its copies go: nobody counts what others count.
// Host obligations: one send of a group at a time (stream order or events).
// Cost: one read of x, one row written per (token, rank); T * K ids read by each block, for the counts.
// Grid: one block writes the headers, every other takes tokens, or parts of them, in turn.
#pragma once

#include "cuda/housekeeping.cuh"
#include "cuda/quantise.cuh"

namespace ep::cuda {

__device__ __forceinline__ uint32_t tokens_of(const DispatchSendArgs& a) {
  if (a.tokens_on_device == nullptr) return a.tokens;
  return min(uint32_t(max(*a.tokens_on_device, 0)), a.tokens);
}

// The table of owners: four words of a thread under way, then in shared memory.
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

// Ids and weights of all tokens, the first of them under way at once.
struct Ids {
  static constexpr uint32_t kAhead = 5;
  int32_t id[kAhead];  // -2: not one
  float weight[kAhead];

  __device__ __forceinline__ void load(const DispatchSendArgs& a, uint32_t experts, uint32_t count,
                                       uint32_t from = 0) {
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      const uint32_t j = from + threadIdx.x + i * blockDim.x;
      const int64_t given = j < count ? a.ids[j] : -1;
      id[i] = given >= -1 && given < int64_t(experts) ? int32_t(given) : -2;
      weight[i] = j < count && a.weights != nullptr ? a.weights[j] : 0.0f;
    }
  }
};

// The handle, and in shared memory how many tokens chose each expert, experts in the order of their ranks.
__device__ __forceinline__ void count_choices(const Device& g, const DispatchSendArgs& a, std::byte* handle,
                                              uint32_t tokens, Ids& ids, const uint32_t* table,
                                              uint32_t* counts) {
  auto* places = reinterpret_cast<int32_t*>(handle + DeviceHandle::places());
  auto* weights = reinterpret_cast<float*>(handle + DeviceHandle::weights(g.layout));
  const uint32_t top_k = g.layout.top_k, count = tokens * top_k;
#pragma unroll 1
  for (uint32_t from = 0; from < count;) {
#pragma unroll
    for (uint32_t i = 0; i < Ids::kAhead; ++i) {
      const uint32_t j = from + threadIdx.x + i * blockDim.x;
      const int32_t id = ids.id[i];
      if (j >= count) break;
      int32_t place = -1;
      if (id >= 0) {
        place = int32_t(table[id]);
        atomicAdd(&counts[g.experts_before[place >> kOwnerShift] + (place & kLocalMask)], 1u);
      } else if (id != -1) {
        fail(g, kBadIds, Op::kDispatch, Phase::kSendRows, g.rank, j / top_k, j % top_k);
      }
      places[j] = place;
      weights[j] = ids.weight[i];
    }
    from += Ids::kAhead * blockDim.x;
    if (from < count) ids.load(a, g.num_experts, count, from);
  }
}

// `shared`: [E] table, [E] counts.
__device__ __forceinline__ Done send_headers(const Device& g, const DispatchSendArgs& a, std::byte* handle,
                                             Opened& o, uint32_t* shared) {
  uint32_t *table = shared, *counts = shared + g.num_experts;
  const uint32_t tokens = tokens_of(a);
  const uint4 owners = load_owners(g);
  Ids ids;
  ids.load(a, g.num_experts, tokens * g.layout.top_k);
#pragma unroll 1
  for (uint32_t e = threadIdx.x; e < g.num_experts; e += blockDim.x) counts[e] = 0;
  if (threadIdx.x < kWarp) open(g, Op::kDispatch, nullptr, o);
  keep_owners(g, owners, table);
  __syncthreads();
  if (!o.alive) return {};
  if (threadIdx.x == 0) {
    auto* h = reinterpret_cast<DeviceHandle*>(handle);
    h->epoch = o.epoch;
    h->tokens = tokens;
    h->sent_to = o.peers;
  }
  count_choices(g, a, handle, tokens, ids, table, counts);
  bool paused;
  const uint32_t peers = writable(g, Op::kDispatch, Phase::kSendHeader, o, &paused);
  __syncthreads();  // all have counted
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

constexpr uint32_t kNobody = 0xffff;  // no expert: E fits 16 bits (ep/cuda.py)
constexpr uint32_t kEarly = 6;        // ids of earlier tokens that a thread loads before it needs them

// In shared memory: the choices of the token at hand.
struct Choices {
  uint32_t id[kMaxTopK];
  uint32_t before[kMaxTopK];  // tokens before this one that chose the same

  // First warp: lane k has the id of choice k.
  __device__ __forceinline__ void keep(int64_t of_lane, uint32_t num_experts, uint32_t top_k) {
    if (threadIdx.x >= top_k) return;
    id[threadIdx.x] = of_lane >= 0 && of_lane < int64_t(num_experts) ? uint32_t(of_lane) : kNobody;
    before[threadIdx.x] = 0;
  }
};

// Ids of the tokens before one, the first few of them loaded at once, two to a register.
struct Earlier {
  uint32_t ids[kEarly / 2];

  __device__ __forceinline__ void load(const int64_t* from, uint32_t count) {
#pragma unroll
    for (uint32_t i = 0; i < kEarly / 2; ++i) ids[i] = ~0u;
#pragma unroll
    for (uint32_t i = 0; i < kEarly; ++i) {
      const uint32_t j = threadIdx.x + i * blockDim.x;
      if (i * blockDim.x >= count) break;
      const uint32_t id = j < count ? uint32_t(from[j]) & 0xffff : kNobody;
      ids[i / 2] = i % 2 == 0 ? id | kNobody << 16 : (ids[i / 2] & 0xffff) | id << 16;
    }
  }
  __device__ __forceinline__ void count_into(Choices& c, const int64_t* from, uint32_t count,
                                             uint32_t top_k) const {
    if (count == 0) return;
#pragma unroll 1
    for (uint32_t k = 0; k < top_k; ++k) {
      const uint32_t wanted = c.id[k];
      if (wanted == kNobody) continue;
      uint32_t same = 0;
#pragma unroll
      for (uint32_t i = 0; i < kEarly / 2; ++i)
        same += ((ids[i] & 0xffff) == wanted) + (ids[i] >> 16 == wanted);
      if (same != 0) atomicAdd(&c.before[k], same);
    }
#pragma unroll 1
    for (uint32_t j = threadIdx.x + kEarly * blockDim.x; j < count; j += blockDim.x) {
      const uint32_t other = uint32_t(from[j]) & 0xffff;
#pragma unroll 1
      for (uint32_t k = 0; k < top_k; ++k)
        if (other == c.id[k] && other != kNobody) atomicAdd(&c.before[k], 1u);
    }
  }
};

// Two times 16 bytes of a row in flight per thread; for FP8 32 bytes of channels each.
template <bool kFp8, bool kNarrow>
struct Row {
  static constexpr uint32_t kBytes = kFp8 ? 32 : 16, kAhead = 2;
  const std::byte* x;
  uint32_t bytes, first, end;  // of x; in units of kBytes
  uint4 low[kAhead], high[kFp8 ? kAhead : 1];

  __device__ __forceinline__ uint32_t at(uint32_t i) const { return first + threadIdx.x + i * blockDim.x; }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      if (kFp8 ? false : at(i) >= end) continue;
      const uint32_t from = (kFp8 && at(i) >= end ? 0 : at(i)) * kBytes;  // lanes of a group stay together
      low[i] = load_row<kNarrow>(x, from, bytes);
      if constexpr (kFp8) high[i] = load_row<kNarrow>(x, from + 16, bytes);
    }
  }
  __device__ __forceinline__ void store(const Device& g, uint64_t slot, uint32_t ranks) {
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      const bool active = at(i) < end;
      if constexpr (kFp8) {
        if (__any_sync(kFull, active)) store_fp8(g, slot, ranks, low[i], high[i], at(i), active);
      } else if (active) {
        const uint4 v = sendable(low[i]);
        for_each_rank(g, ranks, [&](std::byte* region) { put16(region + slot + at(i) * 16, v); });
      }
    }
  }
  __device__ __forceinline__ bool next() {
    first += kAhead * blockDim.x;
    return first < end;
  }
  // 16 channels of a lane, 8 lanes to a scale.
  static __device__ __forceinline__ void store_fp8(const Device& g, uint64_t slot, uint32_t ranks,
                                                   const uint4& low, const uint4& high, uint32_t unit,
                                                   bool active) {
    const uint32_t lane = threadIdx.x % kWarp;
    float scale;
    uint4 q = quantise16(low, high, g.payload != Payload::kFp8, &scale);
    uint32_t word = bits_of(scale), to = unit / 8 * 4;
    bool leader = active && lane % 8 == 0;
    if (g.payload == Payload::kFp8Ue8m0) {  // four groups of a warp share a word
      word = __reduce_or_sync(kFull, leader ? uint32_t(ue8m0_of(scale)) << lane / 8 * 8 : 0u);
      // Four groups that are not finite: the lowest arrives with an exponent that is, its codes are NaN.
      if (word == kNothing && lane < 8) q = {kNanCodes, kNanCodes, kNanCodes, kNanCodes};
      word = sendable(word);
      to = unit / 32 * 4;
      leader = active && lane == 0;
    }
    for_each_rank(g, ranks, [&](std::byte* region) {
      if (active) put16(region + slot + unit * 16, q);
      if (leader) put4(region + slot + g.layout.scale_offset + to, word);
    });
  }
};

// Where part `part` of 1 << split begins, in multiples that no group of lanes straddles; behind the last: the
// end.
__device__ __forceinline__ uint32_t part_begin(uint32_t units, uint32_t part, uint32_t split) {
  return part >> split ? units : min(part * (((units >> split) + kWarp - 1) / kWarp * kWarp), units);
}

// Per choice {place, weight} to every peer: a warp to a peer, lane k has choice k. place: of the table.
__device__ __forceinline__ void send_entries(const Device& g, uint64_t slot, const Choices& c, bool valid,
                                             uint32_t place, float weight, uint32_t peers) {
  const uint32_t lane = threadIdx.x % kWarp;
  if (lane >= g.layout.top_k) return;
  const uint32_t bits = g.layout.position_bits;
  const uint32_t before = min(c.before[lane], (1u << bits) - 1);  // an id twice in a token counts too much
  const uint32_t entry = (place & kLocalMask) << bits | before;
  const uint64_t at = slot + g.layout.entry_offset + lane * sizeof(uint64_t);
#pragma unroll 1
  for (uint32_t r = threadIdx.x / kWarp; r < g.num_ranks; r += blockDim.x / kWarp)
    if (peers >> r & 1)
      put8(g.regions[r] + at, valid && place >> kOwnerShift == r ? entry : DeviceLayout::kAbsent,
           sendable(bits_of(weight)));
}

// What a token needs, under way before anything is waited for.
template <bool kFp8, bool kNarrow>
struct Token {
  using RowOf = Row<kFp8, kNarrow>;
  RowOf row;
  Earlier earlier;
  int64_t id;  // of choice `lane`
  float weight;
  uint32_t part;

  // Item i of all tokens' parts.
  __device__ __forceinline__ void load(const Device& g, const DispatchSendArgs& a, uint32_t i) {
    const uint32_t t = i >> a.split, lane = threadIdx.x % kWarp, top_k = g.layout.top_k;
    const uint32_t bytes = g.hidden * uint32_t(sizeof(uint16_t));
    const uint32_t units = (bytes + RowOf::kBytes - 1) / RowOf::kBytes;
    part = i & ((1u << a.split) - 1);
    row.x = static_cast<const std::byte*>(a.x) + uint64_t(t) * bytes;
    row.bytes = bytes;
    row.first = part_begin(units, part, a.split);
    row.end = part_begin(units, part + 1, a.split);
    row.load();
    id = lane < top_k ? a.ids[uint64_t(t) * top_k + lane] : -1;
    weight = lane < top_k && a.weights != nullptr ? a.weights[uint64_t(t) * top_k + lane] : 0.0f;
    if (part == 0) earlier.load(a.ids, t * top_k);
  }
};

// `table`: [E] in shared memory.
template <bool kFp8, bool kNarrow>
__device__ __forceinline__ Done dispatch_send(const Device& g, const DispatchSendArgs& a, Opened& o,
                                              uint32_t block, uint32_t blocks, uint32_t* table) {
  __shared__ Choices choices;
  const uint32_t top_k = g.layout.top_k, lane = threadIdx.x % kWarp;
  Token<kFp8, kNarrow> token;
  const bool any = block < a.tokens << a.split;
  if (any) token.load(g, a, block);
  const uint4 owners = load_owners(g);
  const uint32_t items = tokens_of(a) << a.split;
  if (any) choices.keep(token.id, g.num_experts, top_k);
  if (threadIdx.x < kWarp) open(g, Op::kDispatch, nullptr, o);
  keep_owners(g, owners, table);
  __syncthreads();
  Done done;
  if (!o.alive || !any) return done;
  bool paused;
  const uint32_t peers = writable(g, Op::kDispatch, Phase::kSendRows, o, &paused);
  if (paused) token.load(g, a, block);

  uint32_t twice = 0;
#pragma unroll 1
  for (uint32_t i = block; i < items;) {
    // 1. Where the copies go: by the choices of the tokens before this one.
    const uint32_t t = i >> a.split;
    const uint64_t slot = g.layout.slot_at(o.bank, g.rank, t);
    if (token.part == 0) {
      token.earlier.count_into(choices, a.ids, t * top_k, top_k);
      __syncthreads();
    }
    const bool valid = token.id >= 0 && token.id < int64_t(g.num_experts);
    const uint32_t place = valid ? table[token.id] : 0;
    if (token.part == 0) send_entries(g, slot, choices, valid, place, token.weight, peers);
    const uint32_t ranks = __reduce_or_sync(kFull, valid ? 1u << (place >> kOwnerShift) : 0) & peers;

    // 2. The row, loaded once, quantised once, stored to all its ranks.
#pragma unroll 1
    for (;;) {
      token.row.store(g, slot, ranks);
      if (!token.row.next()) break;
      token.row.load();
    }
    if (token.part == 0) {
      const uint32_t bytes = uint32_t(g.layout.row_bytes) + g.scale_words * 4;
      done.bytes += __popc(ranks & ~(1u << g.rank)) * bytes;
      done.bytes_local += (ranks >> g.rank & 1) * bytes;
      const uint32_t same = __match_any_sync(kFull, valid ? int32_t(token.id) : -1 - int32_t(lane));
      if (threadIdx.x < kWarp && (same & (same - 1)) != 0) twice = t + 1;
    }
    i += blocks;
    if (i >= items) break;
    token.load(g, a, i);
    __syncthreads();  // the choices are free again
    choices.keep(token.id, g.num_experts, top_k);
    __syncthreads();
  }
  if (twice != 0) fail(g, kBadIds, Op::kDispatch, Phase::kSendRows, g.rank, twice - 1, lane);
  return done;
}

}  // namespace ep::cuda

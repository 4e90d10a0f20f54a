// dispatch_send, on the GPU.
//
// Afterwards, for every unmasked rank d and token t of this rank s with an expert on d:
//   d.rows[bank][s][t] = x[t] (quantised for FP8)
//   d.row_cell[bank][s][t][part] = epoch and whether there is a row, for every unmasked d and t; after the
//   row d.meta[bank][s] = ids and weights of all tokens of s, d.counts[bank][s] = its rows per expert of d,
//   then d.header[dispatch][bank][s] = (epoch, T); rows or none. Header and rows arrive in any order.
//   handle: epoch, T, ids, weights, sent_to.
// Host obligations: one send of a group at a time (stream order or events).
// Cost: one read of x, one row written per (token, rank), T * K * 8 bytes of routing per rank.
// Grid: R blocks write the headers, every other block takes tokens in turn.
#pragma once

#include "cuda/memory.cuh"
#include "ep/quant.hpp"

namespace ep::cuda {

// Ids, weights, counts and the header cell for one peer; for this rank itself the handle too.
__device__ __forceinline__ void send_header(const Device& g, const DispatchSendArgs& a, std::byte* handle,
                                            const Opened& o, uint32_t tokens, uint32_t peer,
                                            uint32_t* counts) {
  __shared__ uint32_t may_write;
  const Layout& l = g.layout;
  const bool own = peer == g.rank;
  auto* h = reinterpret_cast<DeviceHandle*>(handle);
  if (own && threadIdx.x == 0) {
    h->epoch = o.epoch;
    h->tokens = tokens;
    h->has_weights = a.weights != nullptr;
    h->sent_to = o.peers;
    h->held = 0;
  }
  for (uint32_t e = threadIdx.x; e < g.experts_of[peer]; e += blockDim.x) counts[e] = 0;
  if (threadIdx.x == 0) may_write = await_bank(g, Op::kDispatch, o, peer, Slot::kDispatchSend);
  __syncthreads();
  if (!may_write) return;

  auto* ids = reinterpret_cast<int32_t*>(g.regions[peer] + l.ids_at(o.bank, g.rank));
  auto* weights = reinterpret_cast<float*>(g.regions[peer] + l.weights_at(o.bank, g.rank));
  auto* own_ids = reinterpret_cast<int32_t*>(handle + DeviceHandle::ids());
  auto* own_weights = reinterpret_cast<float*>(handle + DeviceHandle::weights(l));
  for (uint32_t i = threadIdx.x; i < tokens * l.top_k; i += blockDim.x) {
    int64_t id = a.ids[i];
    const float weight = a.weights != nullptr ? a.weights[i] : 0.0f;
    if (id < 0 || id >= int64_t(g.num_experts)) {
      if (id != -1 && own)
        fail(g, kBadIds, Op::kDispatch, Phase::kSendRows, g.rank, i / l.top_k, i % l.top_k);
      id = -1;
    } else if (const uint32_t place = g.table[id]; place >> kOwnerShift == peer) {
      atomicAdd(&counts[place & kLocalMask], 1u);
    }
    ids[i] = int32_t(id);
    if (a.weights != nullptr) weights[i] = weight;
    if (own) {
      own_ids[i] = int32_t(id);
      if (a.weights != nullptr) own_weights[i] = weight;
    }
  }
  __syncthreads();
  auto* theirs = reinterpret_cast<uint32_t*>(g.regions[peer] + g.cells.counts_at(o.bank, g.rank));
  for (uint32_t e = threadIdx.x; e < g.experts_of[peer]; e += blockDim.x) theirs[e] = counts[e];
  __syncthreads();
  if (threadIdx.x != 0) return;
  const uint32_t payload = tokens | (a.weights != nullptr ? kHasWeights : 0);
  store_release(g.regions[peer] + Head::header(Op::kDispatch, o.bank, g.rank),
                uint64_t(payload) << 32 | uint32_t(o.epoch));
  const uint64_t bytes =
      uint64_t(tokens) * l.top_k * (a.weights != nullptr ? 8 : 4) + g.experts_of[peer] * sizeof(uint32_t);
  Totals& totals = g.state->totals;
  add(own ? totals.bytes_local[uint32_t(Op::kDispatch)] : totals.bytes[uint32_t(Op::kDispatch)], bytes);
  if (own) add(totals.tokens, tokens);
}

// Bits of the ranks that own an expert of a token; the same in all lanes. `id`: of choice `lane`, or -1.
__device__ __forceinline__ uint32_t owners_of(const Device& g, int64_t id, uint32_t token, bool report) {
  const bool valid = id >= 0 && id < int64_t(g.num_experts);
  const uint32_t bit = valid ? 1u << (g.table[id] >> kOwnerShift) : 0;
  const uint32_t same = __match_any_sync(kFull, id);
  if (report && valid && (same & (same - 1)) != 0)
    fail(g, kBadIds, Op::kDispatch, Phase::kSendRows, g.rank, token, threadIdx.x % kWarp);
  return __reduce_or_sync(kFull, bit);
}

template <class Fn>
__device__ __forceinline__ void for_each_rank(const Device& g, uint32_t ranks, Fn&& fn) {
#pragma unroll 1
  for (uint32_t i = 1, r = g.rank; i <= g.num_ranks; ++i) {
    if (++r == g.num_ranks) r = 0;
    if (ranks >> r & 1) fn(g.regions[r]);
  }
}

__device__ __forceinline__ uint32_t to_e4m3x2(float low, float high) {
  uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}

// 16 channels of a lane, 8 lanes to a group, as e4m3; `scale` is what the receiver multiplies by.
__device__ __forceinline__ uint4 quantise16(const uint4& a, const uint4& b, bool power_of_two, float* scale) {
  const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  uint32_t most = 0;
#pragma unroll
  for (uint32_t word : words) {
    most = max(most, word << 16 & 0x7fffffffu);
    most = max(most, word & 0x7fff0000u);
  }
#pragma unroll
  for (uint32_t lane = 4; lane != 0; lane /= 2) most = max(most, __shfl_xor_sync(kFull, most, lane));
  const Scale by = scale_of(most, power_of_two);
  *scale = by.stored;
  uint32_t out[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t p = words[2 * i], q = words[2 * i + 1];
    out[i] = to_e4m3x2(float_of(p << 16) * by.multiply, float_of(p & 0xffff0000u) * by.multiply) |
             to_e4m3x2(float_of(q << 16) * by.multiply, float_of(q & 0xffff0000u) * by.multiply) << 16;
  }
  return {out[0], out[1], out[2], out[3]};
}

// 16 channels of a lane.
struct Chunk {
  uint4 low, high;
  uint32_t at;
  bool active;

  __device__ __forceinline__ void load(const std::byte* x, uint32_t chunk, uint32_t end) {
    active = chunk < end;  // whole groups of 8 lanes: H is a multiple of 128
    at = active ? chunk : 0;
    low = load16(x + at * 32);
    high = load16(x + at * 32 + 16);
  }
};

// Quantises a part of a row and stores it to all ranks of the mask.
__device__ __forceinline__ void store_fp8(const Device& g, const Chunk& c, uint64_t slot, uint32_t ranks) {
  const uint32_t lane = threadIdx.x % kWarp;
  float scale;
  const uint4 q = quantise16(c.low, c.high, g.payload != Payload::kFp8, &scale);
  uint32_t word = bits_of(scale), to = c.at / 8 * 4;
  bool leader = c.active && lane % 8 == 0;
  if (g.payload == Payload::kFp8Ue8m0) {  // four groups of a warp share a word
    word = __reduce_or_sync(kFull, leader ? uint32_t(ue8m0_of(scale)) << lane / 8 * 8 : 0u);
    to = c.at / 32 * 4;
    leader = c.active && lane == 0;
  }
  for_each_rank(g, ranks, [&](std::byte* region) {
    if (c.active) store16(region + slot + c.at * 16, q);
    if (leader) *reinterpret_cast<uint32_t*>(region + slot + g.layout.scale_offset + to) = word;
  });
}

template <uint32_t kBytes>
__device__ __forceinline__ void send_bytes(const Device& g, const std::byte* x, uint64_t slot, uint32_t ranks,
                                           uint32_t begin, uint32_t end) {
  for (uint32_t at = begin + threadIdx.x * kBytes; at < end; at += blockDim.x * kBytes) {
    const auto v = Word<kBytes>::load(x + at);
    for_each_rank(g, ranks, [&](std::byte* region) { Word<kBytes>::store(region + slot + at, v); });
  }
}

// Where part `part` of `parts` begins, in multiples that no group of lanes straddles; part == parts: the end.
__device__ __forceinline__ uint32_t part_begin(uint32_t units, uint32_t part, uint32_t parts) {
  return part == parts ? units : min(part * ((units / parts + kWarp - 1) / kWarp * kWarp), units);
}

template <bool kFp8, uint32_t kBytes>
__device__ __forceinline__ void dispatch_send(const Device& g, const DispatchSendArgs& a, std::byte* handle,
                                              const Opened& o, uint32_t block, uint32_t blocks,
                                              uint32_t* shared) {
  const uint32_t parts = a.parts;
  const uint32_t lane = threadIdx.x % kWarp, top_k = g.layout.top_k;
  uint32_t tokens = a.tokens;
  if (a.tokens_on_device != nullptr) tokens = min(uint32_t(max(*a.tokens_on_device, 0)), tokens);

  // 1. Routing first: it is small, and receivers can place rows while these are under way.
  if (block < g.num_ranks) {
    const uint32_t peer = (g.rank + 1 + block) % g.num_ranks;
    if (o.peers >> peer & 1) send_header(g, a, handle, o, tokens, peer, shared);
    return;
  }

  // 2. Parts of rows, each loaded once and stored to all its ranks, then its cells.
  block -= g.num_ranks;
  blocks -= g.num_ranks;
  if (block >= tokens * parts) return;
  uint32_t peers = 0;
  for (uint32_t i = block; i < tokens * parts; i += blocks) {
    const uint32_t t = i / parts, part = i % parts;
    const std::byte* x = static_cast<const std::byte*>(a.x) + uint64_t(t) * g.hidden * sizeof(uint16_t);
    const int64_t id = lane < top_k ? a.ids[uint64_t(t) * top_k + lane] : -1 - int64_t(lane);
    const uint64_t slot = g.layout.row_at(o.bank, g.rank, t);
    uint32_t ranks = 0;
    if constexpr (kFp8) {
      const uint32_t units = g.hidden / 16, begin = part_begin(units, part, parts);
      const uint32_t end = part_begin(units, part + 1, parts);
      uint32_t first = begin;
#pragma unroll 1
      do {  // once at least: a short row has an empty part, whose cell is awaited all the same
        Chunk chunk;
        chunk.load(x, first + threadIdx.x, end);  // under way before it is known where to
        if (first == begin) {
          if (i == block) peers = free_peers(g, Op::kDispatch, o, Slot::kDispatchSend);
          ranks = owners_of(g, id, t, threadIdx.x < kWarp) & peers;
        }
        store_fp8(g, chunk, slot, ranks);
        first += blockDim.x;
      } while (first < end);
    } else {
      if (i == block) peers = free_peers(g, Op::kDispatch, o, Slot::kDispatchSend);
      ranks = owners_of(g, id, t, threadIdx.x < kWarp) & peers;
      const uint32_t units = uint32_t(g.layout.row_bytes) / kBytes;
      send_bytes<kBytes>(g, x, slot, ranks, part_begin(units, part, parts) * kBytes,
                         part_begin(units, part + 1, parts) * kBytes);
    }
    __syncthreads();
    if (threadIdx.x < kWarp && peers >> lane & 1) {
      std::byte* cell = g.regions[lane] + g.cells.row_cell(o.bank, g.rank, t, part);
      const uint64_t value = o.epoch << 1 | (ranks >> lane & 1);
      fence_system();  // of all that the block has stored
      store_relaxed(cell, value);
      if (parts == 1) store_relaxed(cell + sizeof(uint64_t), value);
    }
    if (threadIdx.x == 0 && part == 0) {
      const uint64_t bytes = g.layout.row_bytes + g.layout.scale_bytes;
      const uint32_t own = ranks >> g.rank & 1, remote = __popc(ranks) - own;
      if (remote != 0) add(g.state->totals.bytes[uint32_t(Op::kDispatch)], remote * bytes);
      if (own != 0) add(g.state->totals.bytes_local[uint32_t(Op::kDispatch)], bytes);
    }
  }
}

}  // namespace ep::cuda

// dispatch_send, on the GPU.
//
// Afterwards, for every unmasked rank d and token t of this rank s with an expert on d:
//   d.rows[bank][s][t] = x[t] (quantised for FP8), then d.row_cell[bank][s][t] = epoch
//   d.meta[bank][s] = ids and weights of all tokens of s, d.counts[bank][s] = its rows per expert of d,
//   then d.header[dispatch][bank][s] = (epoch, T); rows or none. Header and rows arrive in any order.
//   handle: epoch, T, ids, weights, sent_to.
// Host obligations: one send of a group at a time (stream order or events).
// Cost: one read of x, one row written per (token, rank), T * K * 8 bytes of routing per rank.
// Grid: R blocks write the headers, every other block takes tokens in turn.
#pragma once

#include "cuda/memory.cuh"
#include "ep/quant.hpp"

namespace ep::cuda {

struct Source {
  uint32_t tokens, bank;
  uint64_t epoch, peers;
};

// Ids, weights, counts and the header cell for one peer; for this rank itself the handle too.
__device__ __forceinline__ void send_header(const Device& g, const DispatchSendArgs& a, std::byte* handle,
                                            const Source& src, uint32_t peer, uint32_t* counts) {
  __shared__ uint32_t rows_sent, may_write;
  const Layout& l = g.layout;
  const bool own = peer == g.rank;
  if (threadIdx.x == 0) {
    rows_sent = 0;
    may_write = bank_is_free(g, Op::kDispatch, peer, src.epoch, Slot::kDispatchSend);
  }
  for (uint32_t e = threadIdx.x; e < g.experts_of[peer]; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  if (own) {
    auto* h = reinterpret_cast<DeviceHandle*>(handle);
    if (threadIdx.x == 0) {
      h->epoch = src.epoch;
      h->tokens = src.tokens;
      h->has_weights = a.weights != nullptr;
      h->sent_to = src.peers;
      h->held = 0;
    }
  }
  if (!may_write) return;

  auto* ids = reinterpret_cast<int32_t*>(g.regions[peer] + l.ids_at(src.bank, g.rank));
  auto* weights = reinterpret_cast<float*>(g.regions[peer] + l.weights_at(src.bank, g.rank));
  auto* own_ids = reinterpret_cast<int32_t*>(handle + DeviceHandle::ids());
  auto* own_weights = reinterpret_cast<float*>(handle + DeviceHandle::weights(l));
  uint32_t rows = 0;
  for (uint32_t i = threadIdx.x; i < src.tokens * l.top_k; i += blockDim.x) {
    const uint32_t k = i % l.top_k;
    int64_t id = a.ids[i];
    bool bad = id < -1 || id >= int64_t(g.num_experts), first = true;
    const uint32_t place = bad || id < 0 ? 0 : g.table[id];
    for (uint32_t j = 1; j <= k; ++j) {
      const int64_t other = a.ids[i - j];
      bad |= id >= 0 && other == id;
      if (other >= 0 && other < int64_t(g.num_experts)) first &= g.table[other] >> kOwnerShift != peer;
    }
    if (bad) {
      if (own)
        fail(g, {kBadIds, Op::kDispatch, Phase::kSendRows, g.rank, g.rank, i / l.top_k, k});
      id = -1;
    }
    if (id >= 0 && place >> kOwnerShift == peer) {
      atomicAdd(&counts[place & kLocalMask], 1u);
      rows += first;
    }
    ids[i] = int32_t(id);
    if (a.weights != nullptr) weights[i] = a.weights[i];
    if (own) {
      own_ids[i] = int32_t(id);
      if (a.weights != nullptr) own_weights[i] = a.weights[i];
    }
  }
  if (rows != 0) atomicAdd(&rows_sent, rows);
  __syncthreads();
  auto* theirs = reinterpret_cast<uint32_t*>(g.regions[peer] + g.cells.counts_at(src.bank, g.rank));
  for (uint32_t e = threadIdx.x; e < g.experts_of[peer]; e += blockDim.x) theirs[e] = counts[e];
  __syncthreads();
  if (threadIdx.x != 0) return;
  const uint32_t payload = src.tokens | (a.weights != nullptr ? kHasWeights : 0);
  store_release(g.regions[peer] + Head::header(Op::kDispatch, src.bank, g.rank),
                uint64_t(payload) << 32 | uint32_t(src.epoch));
  const uint64_t bytes = uint64_t(rows_sent) * (l.row_bytes + l.scale_bytes) +
                         uint64_t(src.tokens) * l.top_k * (a.weights != nullptr ? 8 : 4) +
                         g.experts_of[peer] * sizeof(uint32_t);
  Totals& totals = g.state->totals;
  add(own ? totals.bytes_local[uint32_t(Op::kDispatch)] : totals.bytes[uint32_t(Op::kDispatch)], bytes);
  if (own) add(totals.tokens, src.tokens);
}

// Bits of the ranks that own an expert of a token; the same in all lanes.
__device__ __forceinline__ uint32_t owners_of(const Device& g, const int64_t* ids, uint32_t lane) {
  uint32_t bit = 0;
  if (lane < g.layout.top_k) {
    const int64_t id = ids[lane];
    if (id >= 0 && id < int64_t(g.num_experts)) bit = 1u << (g.table[id] >> kOwnerShift);
  }
  return __reduce_or_sync(kFull, bit);
}

template <class Fn>
__device__ __forceinline__ void for_each_rank(const Device& g, uint32_t ranks, Fn&& fn) {
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

// Quantises one row and stores it to all ranks of the mask.
__device__ __forceinline__ void send_row_fp8(const Device& g, const std::byte* x, uint64_t slot, uint32_t ranks) {
  const uint32_t lane = threadIdx.x % kWarp, chunks = g.hidden / 16;
  const bool power_of_two = g.payload != Payload::kFp8;
  for (uint32_t first = threadIdx.x - lane; first < chunks; first += blockDim.x) {
    const uint32_t c = first + lane;
    const bool active = c < chunks;  // whole groups of 8 lanes: H is a multiple of 128
    uint4 a{}, b{};
    if (active) {
      a = load16(x + c * 32);
      b = load16(x + c * 32 + 16);
    }
    float scale;
    const uint4 q = quantise16(a, b, power_of_two, &scale);
    uint32_t word = bits_of(scale);
    uint32_t to = c / 8 * 4;
    bool leader = active && lane % 8 == 0;
    if (g.payload == Payload::kFp8Ue8m0) {  // four groups of a warp share a word
      const uint32_t exponent = uint32_t(ue8m0_of(scale)) << lane / 8 * 8;
      word = __reduce_or_sync(kFull, leader ? exponent : 0u);
      to = c / 32 * 4;
      leader = active && lane == 0;
    }
    for_each_rank(g, ranks, [&](std::byte* region) {
      if (active) store16(region + slot + c * 16, q);
      if (leader) *reinterpret_cast<uint32_t*>(region + slot + g.layout.scale_offset + to) = word;
    });
  }
}

template <uint32_t kBytes>
__device__ __forceinline__ void send_row(const Device& g, const std::byte* x, uint64_t slot, uint32_t ranks) {
  for (uint32_t at = threadIdx.x * kBytes; at < g.layout.row_bytes; at += blockDim.x * kBytes) {
    const auto v = Word<kBytes>::load(x + at);
    for_each_rank(g, ranks, [&](std::byte* region) { Word<kBytes>::store(region + slot + at, v); });
  }
}

template <bool kFp8, uint32_t kBytes>
__device__ __forceinline__ void dispatch_send(const Device& g, const DispatchSendArgs& a, std::byte* handle,
                                              uint64_t epoch, uint32_t block, uint32_t blocks,
                                              uint32_t* shared) {
  const uint32_t lane = threadIdx.x % kWarp;
  Source src{a.tokens, g.bank_of(epoch), epoch, g.all() & ~g.state->control.masked};
  if (a.tokens_on_device != nullptr) src.tokens = min(uint32_t(max(*a.tokens_on_device, 0)), a.tokens);

  // 1. Routing first: it is small, and receivers can place rows while these are under way.
  if (block < g.num_ranks) {
    const uint32_t peer = (g.rank + 1 + block) % g.num_ranks;
    if (src.peers >> peer & 1) send_header(g, a, handle, src, peer, shared);
    return;
  }

  // 2. Rows, each loaded once and stored to all its ranks, then its cells.
  if (block - g.num_ranks >= src.tokens) return;
  const uint32_t peers = free_peers(g, Op::kDispatch, epoch, uint32_t(src.peers), Slot::kDispatchSend);
  for (uint32_t t = block - g.num_ranks; t < src.tokens; t += blocks - g.num_ranks) {
    const uint32_t ranks = owners_of(g, a.ids + uint64_t(t) * g.layout.top_k, lane) & peers;
    const std::byte* x = static_cast<const std::byte*>(a.x) + uint64_t(t) * g.hidden * sizeof(uint16_t);
    const uint64_t slot = g.layout.row_at(src.bank, g.rank, t);
    if constexpr (kFp8) {
      send_row_fp8(g, x, slot, ranks);
    } else {
      send_row<kBytes>(g, x, slot, ranks);
    }
    __syncthreads();
    if (threadIdx.x < g.num_ranks && ranks >> threadIdx.x & 1)
      store_release(g.regions[threadIdx.x] + g.cells.row_cell(src.bank, g.rank, t), epoch);
  }
}

}  // namespace ep::cuda

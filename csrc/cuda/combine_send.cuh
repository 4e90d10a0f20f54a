// combine_send, on the GPU.
//
// Afterwards, for every unmasked source s and every token t it sent here with an expert of this rank:
//   RANK    s.combine[bank][this rank][t] = sum over its experts here, in top-k order, of weight * output
//   SOURCE  s.combine[bank][this rank][t][k] = output, unweighted
// then the cells of that row's parts = epoch; s.header[combine][bank][this rank] = (epoch, reduction), rows
// or none. Reads the experts' output where the caller has it; an in-place view of the dispatch is given back.
// Grid: block 0 writes the headers, the others take parts of (token, source) in turn.
#pragma once

#include "cuda/sum.cuh"

namespace ep::cuda {

// The rows of one received token, in top-k order. First warp of the block.
__device__ __forceinline__ void collect_outputs(const Device& g, const CombineSendArgs& a,
                                                const std::byte* handle, uint32_t source, uint32_t token,
                                                Terms& terms) {
  const Layout& l = g.layout;
  const uint32_t lane = threadIdx.x;
  const uint64_t entry = (uint64_t(source) * l.max_tokens + token) * l.top_k + lane;
  const uint32_t tokens = reinterpret_cast<const DeviceHandle*>(handle)->source_tokens[source];
  int32_t row = -1;
  float weight = 0.0f;
  if (lane < l.top_k) {
    row = reinterpret_cast<const int32_t*>(handle + DeviceHandle::entry_rows(l))[entry];
    weight = reinterpret_cast<const float*>(handle + DeviceHandle::entry_weights(l))[entry];
  }
  if (token >= tokens) row = -1;  // what lies there is older
  const uint32_t valid = __ballot_sync(kFull, row >= 0);
  if (row >= 0) {
    const uint32_t at = __popc(valid & ((1u << lane) - 1));
    terms.row[at] = static_cast<const std::byte*>(a.expert_out) + uint64_t(row) * l.combine_bytes;
    terms.weight[at] = weight;
    terms.k[at] = lane;
  }
  if (lane == 0) terms.count = __popc(valid);
}

template <uint32_t kBytes>
__device__ __forceinline__ void combine_send(const Device& g, const CombineSendArgs& a, std::byte* handle,
                                             const Opened& o, uint32_t block, uint32_t blocks) {
  const uint32_t parts = a.parts;
  __shared__ Terms terms;
  const Layout& l = g.layout;
  auto* h = reinterpret_cast<DeviceHandle*>(handle);
  const bool by_rank = a.reduction == Reduction::kRank;
  const uint32_t arrived = uint32_t(h->arrived), bytes = uint32_t(l.combine_bytes);

  // 1. Headers, from a block that does nothing else: rows need not wait for their fence.
  if (block == 0) {
    const uint32_t peers = free_peers(g, Op::kCombine, o, Slot::kCombineSend);
    if (threadIdx.x < kWarp && peers >> threadIdx.x & 1)
      store_release(g.regions[threadIdx.x] + Head::header(Op::kCombine, o.bank, g.rank),
                    uint64_t(a.reduction) << 32 | uint32_t(o.epoch));
    if (threadIdx.x == 0) h->combine_epoch = o.epoch;
    return;
  }

  // 2. Parts of the tokens of all sources in turn, so that no source is written by all ranks at once; once
  // the sources have read the bank.
  const uint32_t items = l.max_tokens * g.num_ranks * parts;
  uint32_t sent = 0, kept = 0, answered = 0;
  for (uint32_t i = block - 1; i < items; i += blocks - 1) {
    const uint32_t part = i / g.num_ranks % parts, token = i / g.num_ranks / parts;
    const uint32_t source = (g.rank + 1 + i % g.num_ranks) % g.num_ranks;
    __syncthreads();
    if (threadIdx.x < kWarp) collect_outputs(g, a, handle, source, token, terms);
    if (i == block - 1) answered = arrived & free_peers(g, Op::kCombine, o, Slot::kCombineSend);
    __syncthreads();
    if (!(answered >> source & 1)) continue;
    const uint32_t count = terms.count;
    if (count == 0) continue;
    std::byte* region = g.regions[source];
    const uint32_t begin = part_at(bytes, part, parts), end = part_at(bytes, part + 1, parts);
    if (by_rank) {
      sum_to<kBytes>(terms, region + l.rank_sum_at(o.bank, g.rank, token), begin, end);
    } else {
      for (uint32_t n = 0; n < count; ++n) {
        std::byte* to = region + l.choice_at(o.bank, g.rank, token, terms.k[n]);
        for (uint32_t at = begin + threadIdx.x * kBytes; at < end; at += blockDim.x * kBytes)
          Word<kBytes>::store(to + at, Word<kBytes>::load(terms.row[n] + at));
      }
    }
    const uint32_t rows = by_rank ? 1 : count;
    (source == g.rank ? kept : sent) += rows * (end - begin);
    __syncthreads();
    if (threadIdx.x < rows) {
      std::byte* cell =
          region + g.cells.combine_cell(o.bank, g.rank, token, by_rank ? 0 : terms.k[threadIdx.x], part);
      fence_system();  // of all that the block has stored
      store_relaxed(cell, o.epoch);
      if (parts == 1) store_relaxed(cell + sizeof(uint64_t), o.epoch);
    }
  }
  if (threadIdx.x != 0) return;
  if (sent != 0) add(g.state->totals.bytes[uint32_t(Op::kCombine)], sent);
  if (kept != 0) add(g.state->totals.bytes_local[uint32_t(Op::kCombine)], kept);
}

}  // namespace ep::cuda

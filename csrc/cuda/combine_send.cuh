// combine_send, on the GPU.
//
// Afterwards, for every unmasked source s and every token t it sent here with an expert of this rank:
//   RANK    s.combine[bank][this rank][t] = sum over its experts here, in top-k order, of weight * output
//   SOURCE  s.combine[bank][this rank][t][k] = output, unweighted
// then the cell of that row = epoch; s.header[combine][bank][this rank] = (epoch, reduction), rows or none.
// Reads the experts' output where the caller has it; an in-place view of the dispatch is given back.
// Grid: blocks take (token, source) in turn; block 0 writes the headers first.
#pragma once

#include "cuda/sum.cuh"

namespace ep::cuda {

// The rows of one received token, in top-k order. First warp of the block.
__device__ __forceinline__ void collect_outputs(const Device& g, const CombineSendArgs& a, const std::byte* handle,
                                                uint32_t source, uint32_t token, Terms& terms) {
  const Layout& l = g.layout;
  const uint32_t lane = threadIdx.x;
  const uint64_t entry = (uint64_t(source) * l.max_tokens + token) * l.top_k + lane;
  int32_t row = -1;
  float weight = 0.0f;
  if (lane < l.top_k) {
    row = reinterpret_cast<const int32_t*>(handle + DeviceHandle::entry_rows(l))[entry];
    weight = reinterpret_cast<const float*>(handle + DeviceHandle::entry_weights(l))[entry];
  }
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
                                             uint64_t epoch, uint32_t block, uint32_t blocks) {
  __shared__ Terms terms;
  const Layout& l = g.layout;
  auto* h = reinterpret_cast<DeviceHandle*>(handle);
  const uint32_t bank = g.bank_of(epoch);
  const bool by_rank = a.reduction == Reduction::kRank;

  // 1. Banks that every source has read.
  const uint32_t peers =
      free_peers(g, Op::kCombine, epoch, uint32_t(g.all() & ~g.state->control.masked), Slot::kCombineSend);
  if (block == 0 && threadIdx.x < g.num_ranks && peers >> threadIdx.x & 1)
    store_release(g.regions[threadIdx.x] + Head::header(Op::kCombine, bank, g.rank),
                  uint64_t(a.reduction) << 32 | uint32_t(epoch));
  if (block == 0 && threadIdx.x == 0) h->combine_epoch = epoch;
  const uint32_t answered = peers & uint32_t(h->arrived);

  // 2. Tokens of all sources in turn, so that no source is written by all ranks at once.
  const uint32_t items = l.max_tokens * g.num_ranks;
  uint32_t sent = 0, kept = 0;
  for (uint32_t i = block; i < items; i += blocks) {
    const uint32_t token = i / g.num_ranks, source = (g.rank + 1 + i % g.num_ranks) % g.num_ranks;
    if (token >= h->source_tokens[source] || !(answered >> source & 1)) continue;
    __syncthreads();
    if (threadIdx.x < kWarp) collect_outputs(g, a, handle, source, token, terms);
    __syncthreads();
    if (terms.count == 0) continue;
    std::byte* region = g.regions[source];
    if (by_rank) {
      sum_to<kBytes>(terms, region + l.rank_sum_at(bank, g.rank, token), uint32_t(l.combine_bytes));
    } else {
      for (uint32_t n = 0; n < terms.count; ++n) {
        std::byte* to = region + l.choice_at(bank, g.rank, token, terms.k[n]);
        for (uint32_t at = threadIdx.x * kBytes; at < l.combine_bytes; at += blockDim.x * kBytes)
          Word<kBytes>::store(to + at, Word<kBytes>::load(terms.row[n] + at));
      }
    }
    const uint32_t rows = by_rank ? 1 : terms.count;
    (source == g.rank ? kept : sent) += rows;
    __syncthreads();
    if (threadIdx.x < rows)
      store_release(region + g.cells.combine_cell(bank, g.rank, token, by_rank ? 0 : terms.k[threadIdx.x]), epoch);
  }
  if (threadIdx.x != 0) return;
  if (sent != 0) add(g.state->totals.bytes[uint32_t(Op::kCombine)], sent * l.combine_bytes);
  if (kept != 0) add(g.state->totals.bytes_local[uint32_t(Op::kCombine)], kept * l.combine_bytes);
}

}  // namespace ep::cuda

// [8] combine_recv, on the GPU.
//
// Afterwards out[t] = RANK:   sum over the ranks that own experts of t, ascending, of the rows they returned
//                     SOURCE: sum over k, ascending, of weights[t, k] * the row of that choice
// in float32 from +0, rounded once. The slots are then empty and counted as read. Ranks that are masked or
// never got the token contribute nothing. Neither do words that a rank masked midway never sent. With AddNorm
// the sum goes to the residual stream, and `out` is its norm.
// Grid: block 0 waits for the headers, so that a missing peer without rows is noticed too. The other blocks
// take parts of tokens in turn.
#pragma once

#include "exchange/nvlink/add_norm.cuh"
#include "exchange/nvlink/combine_send.cuh"
#include "exchange/nvlink/weighted_sum.cuh"

namespace ep::cuda {

__device__ __forceinline__ void await_combine_headers(const Device& g, const CombineRecvArgs& a,
                                                      const Opened& o, Slot slot) {
  const uint32_t peer = threadIdx.x;
  if (peer >= g.num_ranks || !(o.peers >> peer & 1)) return;
  const Wanted wanted{Op::kCombine,
                      Phase::kRecvHeader,
                      peer,
                      o.epoch,
                      &g.scratch(slot, o.epoch).wait_ns[peer],
                      a.wait_stats == nullptr ? nullptr : a.wait_stats + peer};
  uint64_t cell;
  if (!await_word<Match::kHeader>(g, g.own() + Head::header(Op::kCombine, o.bank, peer), wanted, &cell))
    return;
  if (uint32_t(cell >> 32) != manner_of(a.reduction, a.wire))  // the callers disagree
    fail(g, Code::kViolation, Op::kCombine, Phase::kRecvHeader, peer, uint32_t(o.epoch), uint32_t(cell));
}

// The place (rank and expert) that computes choice `lane` of a token.
__device__ __forceinline__ int32_t place_of(const Device& g, const std::byte* handle, uint32_t token) {
  const uint32_t lane = threadIdx.x % kWarp, top_k = g.layout.top_k;
  const auto* places = reinterpret_cast<const int32_t*>(handle + DeviceHandle::places());
  return lane < top_k ? places[token * top_k + lane] : -1;
}

// The slots of the rows returned for one token, in order of ranks or choices. One warp.
__device__ __forceinline__ void collect_outputs(const Device& g, const CombineRecvArgs& a,
                                                const std::byte* handle, const Opened& o, uint32_t asked,
                                                uint32_t token, int32_t place, Terms& terms) {
  const DeviceLayout& l = g.layout;
  const uint32_t lane = threadIdx.x % kWarp, owner = place >= 0 ? uint32_t(place) >> kOwnerShift : 0;
  const bool wanted = place >= 0 && asked >> owner & 1;
  if (a.reduction == Reduction::kRank) {
    const bool returns = __reduce_or_sync(kFull, wanted ? 1u << owner : 0u) >> lane & 1;
    return terms.collect(returns, {g.own() + l.output_at(o.bank, lane, token, 0), 1.0f, lane});
  }
  const float* weights =
      a.weights != nullptr ? a.weights : reinterpret_cast<const float*>(handle + DeviceHandle::weights(l));
  const float weight = wanted ? weights[token * l.top_k + lane] : 0.0f;
  terms.collect(wanted, {g.own() + l.output_at(o.bank, owner, token, lane), weight, owner});
}

// Adds 16-byte words of all rows as they arrive, and empties their slots. Word w begins at `at` + w * `step`,
// if that is before `end`. kAtOnce: rows awaited together. kHeld: slot addresses stay in registers during the
// wait, so that neither a store nor the load of a weight delays the sum of a word.
template <uint32_t kAtOnce, bool kHeld>
__device__ __forceinline__ void sum_outputs(const Device& g, const Terms& terms, uint64_t* waited,
                                            uint32_t at, uint32_t step, uint32_t end, Sum (&sum)[kWords],
                                            Trouble& trouble) {
#pragma unroll 1
  for (uint32_t i = 0; i < terms.count && !trouble.any(); i += kAtOnce) {
    uint4 v[kAtOnce * kWords];
    std::byte* rows[kAtOnce];
    uint32_t wanted = 0, peers = 0;
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce * kWords; ++j) {
      if (i + j / kWords >= terms.count || at + j % kWords * step >= end) continue;
      peers |= terms.list[i + j / kWords].of << kPeerBits<kAtOnce * kWords> * j;
      wanted |= 1u << j;
      if (kHeld && j % kWords == 0) rows[j / kWords] = terms.list[i + j / kWords].row + at;
    }
    const auto slot = [&](uint32_t j) {
      if constexpr (kHeld) return rows[j / kWords] + j % kWords * step;
      return terms.list[i + j / kWords].row + at + j % kWords * step;
    };
    const uint32_t here = await_slots(g, peers, wanted, waited, slot, v, trouble);
    float weights[kAtOnce];
    if constexpr (kHeld) {
#pragma unroll
      for (uint32_t n = 0; n < kAtOnce; ++n)
        weights[n] = i + n < terms.count ? terms.list[i + n].weight : 0.0f;
    }
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce * kWords; ++j) {
      if (!(here >> j & 1)) continue;
      sum[j % kWords].add(v[j], kHeld ? weights[j / kWords] : terms.list[i + j / kWords].weight);
      if (!kHeld) empty16(slot(j));
    }
#pragma unroll
    for (uint32_t j = 0; kHeld && j < kAtOnce * kWords; ++j)
      if (here >> j & 1) empty16(slot(j));
  }
}

// Adds a token's whole sum to the residual stream and writes the norm. Returns false if a thread found
// trouble, which it has reported. turn: number of tokens that the block processed before. The whole block
// calls it.
__device__ __forceinline__ bool end_layer(const Device& g, const CombineRecvArgs& a, const Terms& terms,
                                          const Wanted& wanted, uint32_t token, uint32_t turn) {
  const uint32_t bytes = uint32_t(g.layout.output_bytes);
  EndOfLayer row{a.norm, token, bytes, threadIdx.x * 16, {}, {}};
  float mine = 0.0f;
  Trouble trouble;
#pragma unroll 1
  for (uint32_t at = threadIdx.x * 16; at < bytes; at += kWords * row.step()) {
    row.ask(at);
    Sum sum[kWords];
    sum_outputs<kNormRows, true>(g, terms, wanted.waited, at, row.step(), bytes, sum, trouble);
    mine = __fadd_rn(mine, row.add(sum));
  }
  report(g, wanted, trouble);  // before the barrier, because it ends the waits of the other threads
  bool any = trouble.any();
  const float mean = __fmul_rn(sum_of_block(mine, turn, any), a.norm.share);
  row.store(a.out, inverse_root(mean + a.norm.eps));
  return !any;
}

// `both`: the kernel sends too. kNorms: AddNorm follows; then a token is not split.
template <Wire kWire, bool kNarrow, bool kNorms>
__device__ __forceinline__ Done combine_recv(const Device& g, const CombineRecvArgs& a,
                                             const std::byte* handle, Opened& o, bool both, uint32_t split,
                                             uint32_t block, uint32_t blocks) {
  const auto* h = reinterpret_cast<const DeviceHandle*>(handle);
  const Slot slot = both ? Slot::kCombineSend : Slot::kCombineRecv;
  const uint32_t bytes = uint32_t(g.layout.output_bytes), first_item = block - 1;
  Terms terms = own_terms();
  const uint32_t sent_to = h->sent_to, items = h->tokens << split;
  int32_t place = block == 0 ? -1 : place_of(g, handle, min(first_item >> split, g.layout.max_tokens - 1));
  if (threadIdx.x < kWarp) open(g, Op::kCombine, both ? nullptr : &h->combine_epoch, o);
  __syncthreads();
  Done done;
  if (!o.alive) return done;
  if (block == 0) {
    await_combine_headers(g, a, o, slot);
    return done;
  }
  done.emptied = true;

  const uint32_t asked = sent_to & o.peers;
  uint64_t* waited = threadIdx.x == 0 ? g.scratch(slot, o.epoch).wait_ns : nullptr;
  [[maybe_unused]] uint32_t turn = 0;
  Trouble trouble;
#pragma unroll 1
  for (uint32_t i = first_item; i < items && !__any_sync(kFull, trouble.any());) {
    const uint32_t token = i >> split, part = i & ((1u << split) - 1);
    collect_outputs(g, a, handle, o, asked, token, place, terms);
    const uint32_t begin = part_at(bytes, part, split), end = part_at(bytes, part + 1, split);
    auto* out = static_cast<std::byte*>(a.out) + uint64_t(token) * bytes;
    if constexpr (kNorms) {
      if (!end_layer(g, a, terms, {Op::kCombine, Phase::kRecvHeader, 0, o.epoch, waited}, token, turn++))
        return done;
    } else if constexpr (kWire == Wire::kFp8) {
      sum_packed<Fp8Wire>(g, terms, waited, out, begin / 32, end / 32, trouble);
    } else if constexpr (kWire == Wire::kLog10) {
      sum_packed<Log10Wire>(g, terms, waited, out, begin / 32, end / 32, trouble);
    } else {
      const uint32_t step = blockDim.x * 16;
#pragma unroll 1
      for (uint32_t at = begin + threadIdx.x * 16; at < end; at += kWords * step) {
        Sum sum[kWords];
        sum_outputs<kRows, false>(g, terms, waited, at, step, end, sum, trouble);
#pragma unroll
        for (uint32_t w = 0; w < kWords; ++w)
          if (at + w * step < end) store_row<kNarrow>(out, at + w * step, bytes, sum[w].rounded());
      }
    }
    i += blocks - 1;
    if (i < items) place = place_of(g, handle, i >> split);
  }
  report(g, {Op::kCombine, Phase::kRecvHeader, 0, o.epoch}, trouble);
  return done;
}

}  // namespace ep::cuda

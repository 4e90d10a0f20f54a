// combine_recv, on the GPU.
//
// Afterwards out[t] = RANK:   sum over the ranks that own experts of t, ascending, of the rows they returned
//                     SOURCE: sum over k, ascending, of weights[t, k] * the row of that choice
// in float32 from +0, rounded once; then consumed[combine][this rank] = epoch at all ranks. Ranks that are
// masked or never got the token contribute nothing. Grid: block 0 awaits the headers, so that
// a peer without rows is missed too; the others take parts of tokens in turn.
#pragma once

#include "cuda/sum.cuh"

namespace ep::cuda {

__device__ __forceinline__ void await_answer_headers(const Device& g, const CombineRecvArgs& a,
                                                     const Opened& o) {
  const uint32_t peer = threadIdx.x;
  if (peer >= g.num_ranks || !(o.peers >> peer & 1)) return;
  uint64_t cell;
  if (!await<Match::kHeader>(g, g.own() + Head::header(Op::kCombine, o.bank, peer),
                             {Op::kCombine, Phase::kRecvHeader, peer, o.epoch, Slot::kCombineRecv}, &cell))
    return;
  if (uint32_t(cell >> 32) != uint32_t(a.reduction))  // a bug of the callers
    fail(g, Code::kViolation, Op::kCombine, Phase::kRecvHeader, peer, uint32_t(o.epoch), uint32_t(cell));
}

// Waits for the rows that answer one token and lists them in order. First warp of the block.
__device__ __forceinline__ void collect_answers(const Device& g, const CombineRecvArgs& a,
                                                const std::byte* handle, const Opened& o, uint32_t asked,
                                                uint32_t token, uint32_t part, Terms& terms) {
  const Layout& l = g.layout;
  const uint32_t lane = threadIdx.x;
  const auto* ids =
      reinterpret_cast<const int32_t*>(handle + DeviceHandle::ids()) + uint64_t(token) * l.top_k;
  const int32_t id = lane < l.top_k ? ids[lane] : -1;
  uint32_t owner = 0;
  bool wanted = false;
  if (id >= 0) {
    owner = g.table[id] >> kOwnerShift;
    wanted = asked >> owner & 1;
  }
  uint32_t choice = lane;
  float weight = 1.0f;
  uint64_t at;
  if (a.reduction == Reduction::kRank) {
    const uint32_t ranks = __reduce_or_sync(kFull, wanted ? 1u << owner : 0u);
    wanted = ranks >> lane & 1;
    owner = lane;
    choice = 0;
    at = l.rank_sum_at(o.bank, owner, token);
  } else {
    const float* weights =
        a.weights != nullptr ? a.weights : reinterpret_cast<const float*>(handle + DeviceHandle::weights(l));
    if (wanted) weight = weights[uint64_t(token) * l.top_k + lane];
    at = l.choice_at(o.bank, owner, token, choice);
  }
  bool here = false, failed = false;
  if (wanted) {
    uint64_t cell;
    here =
        await<Match::kExact64>(g, g.own() + g.cells.combine_cell(o.bank, owner, token, choice, part),
                               {Op::kCombine, Phase::kRecvHeader, owner, o.epoch, Slot::kCombineRecv}, &cell);
    failed = !here && load_relaxed(&g.state->control.failed) != 0;
  }
  const uint32_t valid = __ballot_sync(kFull, here);
  if (here) {
    const uint32_t n = __popc(valid & ((1u << lane) - 1));
    terms.row[n] = g.own() + at;
    terms.weight[n] = weight;
  }
  const bool any_failed = __any_sync(kFull, failed);
  if (lane != 0) return;
  terms.count = __popc(valid);
  terms.failed = any_failed;
}

template <uint32_t kBytes>
__device__ __forceinline__ void combine_recv(const Device& g, const CombineRecvArgs& a,
                                             const std::byte* handle, const Opened& o, uint32_t block,
                                             uint32_t blocks) {
  constexpr uint32_t kParts = DeviceLayout::kParts;
  __shared__ Terms terms;
  const auto* h = reinterpret_cast<const DeviceHandle*>(handle);
  const uint32_t asked = uint32_t(h->sent_to) & o.peers, tokens = h->tokens;
  const uint32_t bytes = uint32_t(g.layout.combine_bytes);
  if (block == 0) return await_answer_headers(g, a, o);
  for (uint32_t i = block - 1; i < tokens * kParts; i += blocks - 1) {
    const uint32_t t = i / kParts, part = i % kParts;
    __syncthreads();
    if (threadIdx.x < kWarp) collect_answers(g, a, handle, o, asked, t, part, terms);
    __syncthreads();
    if (terms.failed) return;
    sum_to<kBytes>(terms, static_cast<std::byte*>(a.out) + uint64_t(t) * bytes, part_at(bytes, part, kParts),
                   part_at(bytes, part + 1, kParts));
  }
}

}  // namespace ep::cuda

// dispatch_recv, on the GPU.
//
// Waits for the header of every unmasked rank and for the rows that they announce. Entries are numbered by a
// prefix sum over (local expert, source, token) that every block works out for its own tokens, so two runs
// give identical bytes and nothing is counted with atomics. Afterwards
//   PADDED rows[e, position], scales column-major; COMPACT rows[row]; INDEX row_ids[row], no copy
//   counts, offsets, src_info, layout_range as DispatchRecvArgs says; handle: where each entry lies, its
//   weight consumed[dispatch][this rank] = epoch at all ranks, unless the view reads the bank in place.
// Cost: one row read per received row, one written per entry. Grid: blocks take (token, source) in turn.
#pragma once

#include "cuda/memory.cuh"

namespace ep::cuda {

struct Arrival {
  uint32_t tokens[kMaxPeers];
  uint32_t arrived, weighted, failed;
};

// Fills `arrival` (shared) with what the headers say.
__device__ __forceinline__ void await_headers(const Device& g, const Opened& o, Arrival& arrival) {
  const uint32_t peer = threadIdx.x;
  if (peer < kWarp) {
    bool arrived = false, failed = false;
    uint64_t cell = 0;
    if (o.peers >> peer & 1) {
      arrived = await<Match::kHeader>(g, g.own() + Head::header(Op::kDispatch, o.bank, peer),
                                      {Op::kDispatch, Phase::kRecvHeader, peer, o.epoch, Slot::kDispatchRecv},
                                      &cell);
      failed = !arrived && load_relaxed(&g.state->control.failed) != 0;
    }
    const uint32_t payload = arrived ? uint32_t(cell >> 32) : 0;
    const uint32_t tokens = payload & ~kHasWeights;
    if (tokens > g.layout.max_tokens) {
      fail(g, Code::kViolation, Op::kDispatch, Phase::kRecvHeader, peer, uint32_t(o.epoch), uint32_t(cell));
      failed = true;
    }
    if (peer < kMaxPeers) arrival.tokens[peer] = tokens;
    const uint32_t all = __ballot_sync(kFull, arrived),
                   weighted = __ballot_sync(kFull, payload & kHasWeights);
    const uint32_t broken = __ballot_sync(kFull, failed);
    if (peer == 0) {
      arrival.arrived = all;
      arrival.weighted = weighted;
      arrival.failed = broken;
    }
  }
  __syncthreads();
}

// first[e] = rows of local experts before e; first[E_local] = all rows. First warp of the block.
__device__ __forceinline__ void scan_experts(const Device& g, uint32_t bank, uint32_t arrived,
                                             int32_t* first) {
  const uint32_t lane = threadIdx.x;
  int32_t running = 0;
  for (uint32_t begin = 0; begin < g.local_experts; begin += kWarp) {
    const uint32_t e = begin + lane;
    int32_t rows = 0;
#pragma unroll
    for (uint32_t s = 0; s < kMaxPeers; ++s)
      if (e < g.local_experts && arrived >> s & 1)
        rows += int32_t(reinterpret_cast<const uint32_t*>(g.own() + g.cells.counts_at(bank, s))[e]);
    int32_t sum = rows;
#pragma unroll
    for (uint32_t by = 1; by < kWarp; by *= 2) {
      const int32_t lower = __shfl_up_sync(kFull, sum, by);
      if (lane >= by) sum += lower;
    }
    if (e < g.local_experts) first[e] = running + sum - rows;
    running += __shfl_sync(kFull, sum, kWarp - 1);
  }
  if (lane == 0) first[g.local_experts] = running;
}

// Counts, offsets and ranges for the caller, totals for the statistics. One block.
__device__ __forceinline__ void write_layout(const Device& g, const DispatchRecvArgs& a, uint32_t bank,
                                             uint32_t arrived, const int32_t* first) {
  for (uint32_t e = threadIdx.x; e < g.local_experts; e += blockDim.x) {
    int32_t begin = 0;
    for (uint32_t s = 0; s < g.num_ranks; ++s) {
      int32_t count = 0;
      if (arrived >> s & 1)
        count = int32_t(reinterpret_cast<const uint32_t*>(g.own() + g.cells.counts_at(bank, s))[e]);
      if (a.layout_range != nullptr)
        a.layout_range[uint64_t(e) * g.num_ranks + s] = count == 0 ? 0 : int64_t(begin) << 32 | count;
      begin += count;
    }
    a.counts[e] = begin;
    a.offsets[e] = first[e];
    add(g.expert_tokens[e], uint64_t(begin));
  }
  if (threadIdx.x == 0) a.offsets[g.local_experts] = first[g.local_experts];
}

// Where the entries of one received token go: -1 where the expert is not here.
struct Placed {
  int32_t row[kMaxTopK], expert[kMaxTopK], position[kMaxTopK];
  uint32_t any, ready, failed;
};

// One warp places one choice; the same result in all lanes.
__device__ __forceinline__ void place(const Device& g, const DispatchRecvArgs& a, std::byte* handle,
                                      uint32_t bank, const Arrival& arrival, uint32_t source, uint32_t token,
                                      uint32_t k, const int32_t* first, const uint32_t* table,
                                      Placed& placed) {
  const Layout& l = g.layout;
  const uint32_t lane = threadIdx.x % kWarp;
  const auto* ids = reinterpret_cast<const int32_t*>(g.own() + l.ids_at(bank, source));
  const int32_t id = ids[token * l.top_k + k];
  int32_t row = -1, local = -1, position = 0;
  if (id >= 0 && uint32_t(id) < g.num_experts && table[id] >> kOwnerShift == g.rank) {
    local = int32_t(table[id] & kLocalMask);
    const uint32_t before = token * l.top_k;
    uint32_t count = 0;
    for (uint32_t j = lane * 4; j < before;
         j += kWarp * 4) {  // reads up to 12 bytes beyond, inside the block
      const int4 v = *reinterpret_cast<const int4*>(ids + j);
      count += (v.x == id) + (j + 1 < before && v.y == id) + (j + 2 < before && v.z == id) +
               (j + 3 < before && v.w == id);
    }
    if (lane < source && arrival.arrived >> lane & 1)
      count += reinterpret_cast<const uint32_t*>(g.own() + g.cells.counts_at(bank, lane))[local];
    position = int32_t(__reduce_add_sync(kFull, count));
    const uint32_t padded = l.num_ranks * l.max_tokens;
    if (a.view == View::kPadded) {
      row = uint32_t(position) < padded ? local * int32_t(padded) + position : -1;
    } else {
      row = first[local] + position;
      if (uint32_t(row) >= a.capacity) row = -1;
    }
    if (row < 0 && lane == 0)
      fail(g, kCapacity, Op::kDispatch, Phase::kRecvExpand, source, a.capacity, uint32_t(position));
  }
  if (lane != 0) return;
  placed.row[k] = row;
  placed.expert[k] = local;
  placed.position[k] = position;
  const uint64_t entry = (uint64_t(source) * l.max_tokens + token) * l.top_k + k;
  reinterpret_cast<int32_t*>(handle + DeviceHandle::entry_rows(l))[entry] = row;
  if (row < 0) return;
  if (arrival.weighted >> source & 1)
    reinterpret_cast<float*>(handle + DeviceHandle::entry_weights(l))[entry] =
        reinterpret_cast<const float*>(g.own() + l.weights_at(bank, source))[token * l.top_k + k];
  if (a.src_info != nullptr)
    a.src_info[uint64_t(local) * l.num_ranks * l.max_tokens + position] = int32_t(token);
  if (a.view == View::kIndex) a.row_ids[row] = (int64_t(bank) * l.num_ranks + source) * l.max_tokens + token;
}

// Copies one received row to all its entries; zeros where its sender was given up.
template <uint32_t kBytes>
__device__ __forceinline__ void expand(const Device& g, const DispatchRecvArgs& a, const std::byte* row,
                                       const Placed& placed) {
  const Layout& l = g.layout;
  const uint32_t top_k = l.top_k, width = uint32_t(l.scale_bytes / sizeof(uint32_t));
  auto* out = static_cast<std::byte*>(a.rows);
  const auto* scales = reinterpret_cast<const uint32_t*>(row + l.scale_offset);
  uint32_t scale = 0;
  if (placed.ready && threadIdx.x < width) scale = scales[threadIdx.x];  // under way together with the row
  for (uint32_t at = threadIdx.x * kBytes; at < l.row_bytes; at += blockDim.x * kBytes) {
    typename Word<kBytes>::Type v{};
    if (placed.ready) v = Word<kBytes>::load(row + at);
    for (uint32_t k = 0; k < top_k; ++k)
      if (placed.row[k] >= 0) Word<kBytes>::store(out + uint64_t(placed.row[k]) * l.row_bytes + at, v);
  }
  for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
    if (i != threadIdx.x) scale = placed.ready ? scales[i] : 0;
    for (uint32_t k = 0; k < top_k; ++k) {
      if (placed.row[k] < 0) continue;
      const uint64_t to = a.view == View::kPadded
                              ? (uint64_t(placed.expert[k]) * width + i) * a.scale_pitch + placed.position[k]
                              : uint64_t(placed.row[k]) * width + i;
      a.scales[to] = scale;
    }
  }
}

template <uint32_t kBytes>
__device__ __forceinline__ void dispatch_recv(const Device& g, const DispatchRecvArgs& a, std::byte* handle,
                                              const Opened& o, uint32_t block, uint32_t blocks,
                                              int32_t* first) {
  __shared__ Arrival arrival;
  __shared__ Placed placed;
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;

  // 1. All headers; meanwhile the table of owners comes near.
  auto* table = reinterpret_cast<uint32_t*>(first + g.local_experts + 1);
  for (uint32_t e = threadIdx.x; e < g.num_experts; e += blockDim.x) table[e] = g.table[e];
  await_headers(g, o, arrival);
  if (arrival.failed) return;
  const uint32_t arrived = arrival.arrived;

  // 2. Rows before each expert. Block 0 tells the caller and does nothing else: the others need not wait.
  if (a.view != View::kPadded || block == 0) {
    if (warp == 0) scan_experts(g, o.bank, arrived, first);
    __syncthreads();
  }
  if (block == 0) {
    write_layout(g, a, o.bank, arrived, first);
    auto* h = reinterpret_cast<DeviceHandle*>(handle);
    if (threadIdx.x < g.num_ranks) h->source_tokens[threadIdx.x] = arrival.tokens[threadIdx.x];
    if (threadIdx.x == 0) {
      h->arrived = arrived;
      h->rows = uint32_t(first[g.local_experts]);
      h->held = a.view == View::kIndex;
    }
    return;
  }

  // 3. Tokens of all sources in turn: place while the row is awaited, then copy.
  const uint32_t items = g.layout.max_tokens * g.num_ranks;
  uint32_t received = 0;
  for (uint32_t i = block - 1; i < items; i += blocks - 1) {
    const uint32_t token = i / g.num_ranks, source = (g.rank + 1 + i % g.num_ranks) % g.num_ranks;
    if (token >= arrival.tokens[source]) continue;
    __syncthreads();
    if (warp == warps - 1) {
      bool ready = true;
      uint64_t cell = 0;
      if (lane < DeviceLayout::kParts)
        ready = await<Match::kPresence>(
            g, g.own() + g.cells.row_cell(o.bank, source, token, lane),
            {Op::kDispatch, Phase::kRecvHeader, source, o.epoch, Slot::kDispatchRecv}, &cell);
      ready = __all_sync(kFull, ready);
      const bool any = __any_sync(kFull, cell & 1) || !ready;
      if (lane == 0) {
        placed.any = any;
        placed.ready = ready;
        placed.failed = !ready && load_relaxed(&g.state->control.failed) != 0;
      }
    }
    // The warp that waits places nothing: all is placed when the row comes.
    for (uint32_t k = warp; warp < warps - 1 && k < g.layout.top_k; k += warps - 1)
      place(g, a, handle, o.bank, arrival, source, token, k, first, table, placed);
    __syncthreads();
    if (!placed.any) continue;
    ++received;
    if (placed.failed) return;
    if (a.view != View::kIndex)
      expand<kBytes>(g, a, g.own() + g.layout.row_at(o.bank, source, token), placed);
  }
  if (threadIdx.x == 0 && received != 0)
    atomicAdd(&g.state->scratch[uint32_t(Slot::kDispatchRecv)].rows, received);
}

}  // namespace ep::cuda

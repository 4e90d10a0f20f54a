// Copies every row to all ranks that have an expert of it, straight to its final place. Where few blocks run,
// a third of them keeps what stays on this GPU: behind stores that wait for the link, those would wait too.
#include "exchange/nvlink/bulk_copy.cuh"

namespace ep::cuda {
namespace {

// Number of this rank's first row in the block of rank `to`.
__device__ __forceinline__ uint32_t first_row(const Device& g, const BulkDispatchArgs& a, uint32_t to) {
  return g.rank == 0 ? 0 : uint32_t(a.prefix[(g.rank - 1) * g.num_ranks + to]);
}

// One warp copies rows first, first + step, ... to the ranks of a mask.
__device__ __forceinline__ void copy_rows(const Device& g, const BulkDispatchArgs& a, const BulkOpened& o,
                                          uint32_t to_ranks, uint32_t first, uint32_t step) {
  const uint32_t lane = threadIdx.x % kWarp, ranks = g.num_ranks;
  const uint32_t rows = first < a.tokens ? (a.tokens - first + step - 1) / step : 0;
  // Lane = (row of a batch, rank): one load finds the places of several rows.
  const uint32_t batch = kWarp / ranks, rank = lane % ranks, begin = rank < ranks ? first_row(g, a, rank) : 0;
  const auto find = [&](uint32_t row) {
    const uint32_t i = row + lane / ranks;
    if (lane / ranks >= batch || i >= rows || !(to_ranks >> rank & 1)) return -1;
    const int32_t place = a.places[uint64_t(first + i * step) * ranks + rank];
    return place < 0 ? -1 : place + int32_t(begin);
  };
  int32_t places = find(0), next = find(batch);
  uint32_t in_batch = 0;
  const auto to_all = [&](auto&& put) {
#pragma unroll 1
    for (uint32_t i = 0; i < ranks; ++i) {
      const uint32_t to = g.rank + 1 + i < ranks ? g.rank + 1 + i : g.rank + 1 + i - ranks;
      const int32_t place = __shfl_sync(kFull, places, in_batch * ranks + to);
      if (place >= 0 && uint32_t(place) < o.peers[to].capacity)
        put(o.peers[to].block + uint64_t(place) * a.row_bytes);
    }
  };
  const auto* x = static_cast<const std::byte*>(a.x);
#pragma unroll 1
  for (uint32_t i = 0; i < rows; ++i) {
    const bool wanted = __any_sync(kFull, places >= 0 && lane / ranks == in_batch);
    if (wanted) copy_row(x + uint64_t(first + i * step) * a.row_bytes, a.row_bytes, to_all);
    if (++in_batch != batch) continue;
    in_batch = 0;
    places = next;
    next = find(i + 1 + batch);
  }
}

// One warp writes what goes with a row.
__device__ __forceinline__ void write_row_data(const Device& g, const BulkDispatchArgs& a,
                                               const BulkPeer& peer, uint32_t to, uint32_t token,
                                               uint32_t row) {
  const uint32_t lane = threadIdx.x % kWarp;
  const BulkBlock b = BulkBlock::of(peer.capacity, a.row_bytes, a.scale_words, a.top_k, true, a.sources);
  for (uint32_t i = lane; i < a.scale_words; i += kWarp)
    reinterpret_cast<uint32_t*>(peer.block + b.scales)[uint64_t(row) * a.scale_words + i] =
        a.scales[uint64_t(token) * a.scale_row + uint64_t(i) * a.scale_column];
  if (lane < a.top_k) {
    const int64_t id = a.ids[uint64_t(token) * a.top_k + lane], local = id - int64_t(to) * a.local_experts;
    const bool here = local >= 0 && local < a.local_experts;
    const uint64_t at = uint64_t(row) * a.top_k + lane;
    reinterpret_cast<int64_t*>(peer.block + b.ids)[at] = here ? local : -1;
    reinterpret_cast<float*>(peer.block + b.weights)[at] =
        here ? a.weights[uint64_t(token) * a.top_k + lane] : 0.0f;
  }
  if (lane == 0 && a.sources) reinterpret_cast<int32_t*>(peer.block + b.sources)[row] = int32_t(token);
}

__device__ __forceinline__ void write_data(const Device& g, const BulkDispatchArgs& a, const BulkOpened& o,
                                           uint32_t first, uint32_t step) {
  const uint32_t lane = threadIdx.x % kWarp, ranks = g.num_ranks;
  const uint32_t begin = lane < ranks ? first_row(g, a, lane) : 0;
  for (uint32_t token = first; token < a.tokens; token += step) {
    const int32_t place = lane < ranks ? a.places[uint64_t(token) * ranks + lane] : -1;
    uint32_t wanted = __ballot_sync(kFull, place >= 0);
    while (wanted != 0) {
      const uint32_t to = __ffs(wanted) - 1;
      wanted &= wanted - 1;
      const uint32_t row = uint32_t(__shfl_sync(kFull, place + int32_t(begin), to));
      if (row < o.peers[to].capacity) write_row_data(g, a, o.peers[to], to, token, row);
    }
  }
}

// Marks the rows that nobody sends.
__device__ __forceinline__ void fill_rest(const Device& g, const BulkDispatchArgs& a) {
  const uint32_t rows = uint32_t(a.prefix[(g.num_ranks - 1) * g.num_ranks + g.rank]);
  std::byte* block = g.own() + g.bulk.heap + a.target.offset;
  const BulkBlock b = BulkBlock::of(a.target.capacity, a.row_bytes, a.scale_words, a.top_k, true, a.sources);
  const uint64_t all = uint64_t(a.target.capacity) * a.top_k, step = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = uint64_t(rows) * a.top_k + blockIdx.x * blockDim.x + threadIdx.x; i < all; i += step) {
    reinterpret_cast<int64_t*>(block + b.ids)[i] = -1;
    reinterpret_cast<float*>(block + b.weights)[i] = 0.0f;
  }
}

__global__ void __launch_bounds__(kBulkDispatchThreads, 1)
    bulk_dispatch_kernel(const __grid_constant__ Device g, const __grid_constant__ BulkDispatchArgs a) {
  __shared__ BulkOpened o;
  open_bulk(g, Op::kDispatch, &a.target, o);
  const uint32_t warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const uint32_t keeping = keeping_blocks(gridDim.x), sending = gridDim.x - keeping;
  const uint32_t own = 1u << g.rank, others = keeping == 0 ? kFull : ~own;
  if (o.alive && blockIdx.x >= sending) {
    copy_rows(g, a, o, own, warp * keeping + blockIdx.x - sending, warps * keeping);
  } else if (o.alive && warp < kSendingWarps) {
    copy_rows(g, a, o, others, warp * sending + blockIdx.x, kSendingWarps * sending);
  } else if (o.alive) {
    write_data(g, a, o, (warp - kSendingWarps) * sending + blockIdx.x, (warps - kSendingWarps) * sending);
  }
  if (o.alive && a.fill) fill_rest(g, a);
  close_bulk(g, o);
  if (blockIdx.x != 0 || !o.alive) return;
  if (threadIdx.x == 0) note_sent(g, Op::kDispatch);
  await_done(g, Op::kDispatch, o);
  if (threadIdx.x == 0) {
    BulkTimes& t = g.state->bulk[uint32_t(Op::kDispatch)];
    t.arrived_ns = t.end_ns = clock_ns();
  }
}

}  // namespace

cudaError_t bulk_dispatch(const BulkLaunch& launch, const Device& device, const BulkDispatchArgs& args) {
  return start_bulk_kernel(launch, bulk_dispatch_kernel, kBulkDispatchThreads, 0, device, args);
}

}  // namespace ep::cuda

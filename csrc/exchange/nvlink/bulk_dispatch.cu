// Copies every row to all ranks that have an expert of it, straight to its final place. Where few blocks run,
// three eighths of them keep what stays on this GPU: behind stores that wait for the link, those would wait
// too.
#include "exchange/nvlink/bulk_copy.cuh"

namespace ep::cuda {
namespace {

// Number of this rank's first row in the block of rank `to`.
__device__ __forceinline__ uint32_t first_row(const Device& g, const BulkDispatchArgs& a, uint32_t to) {
  return g.rank == 0 ? 0 : uint32_t(a.prefix[(g.rank - 1) * g.num_ranks + to]);
}

// One of `warps` copies pieces of rows to the ranks of a mask. Multiprocessors differ in what the link takes
// from them, by a half, so who is ready takes the next piece. taken: by all, behind the first two of each.
__device__ __forceinline__ void copy_rows(const Device& g, const BulkDispatchArgs& a, const BulkOpened& o,
                                          uint32_t to_ranks, uint32_t warp, uint32_t warps, uint32_t& taken) {
  const uint32_t lane = threadIdx.x % kWarp, ranks = g.num_ranks;
  const bool wanted = lane < ranks && to_ranks >> lane & 1;
  const uint32_t begin = wanted ? first_row(g, a, lane) : 0;
  const Pieces pieces(a.row_bytes);
  const auto* x = static_cast<const std::byte*>(a.x);
  struct Piece {
    uint32_t row, at;
    int32_t place;  // lane = rank
  };
  const auto find = [&](uint32_t number) {
    const uint32_t i = __shfl_sync(kFull, number, 0), row = i / pieces.count;
    Piece piece{row, (i - row * pieces.count) * pieces.bytes, -1};
    if (wanted && row < a.tokens) piece.place = a.places[uint64_t(row) * ranks + lane];
    return piece;
  };
  const auto take = [&] { return lane == 0 ? 2 * warps + atomicAdd(&taken, 1u) : 0; };
  // Takes two pieces ahead, and looks up the places of one: both last as long as a copy.
  Piece piece = find(warp), next = find(warps + warp);
  uint32_t number = take();
#pragma unroll 1
  while (piece.row < a.tokens) {
    const int32_t place = piece.place < 0 ? -1 : piece.place + int32_t(begin);
    const auto to_all = [&](auto&& put) {
#pragma unroll 1
      for (uint32_t i = 0; i < ranks; ++i) {
        const uint32_t to = g.rank + 1 + i < ranks ? g.rank + 1 + i : g.rank + 1 + i - ranks;
        const int32_t row = __shfl_sync(kFull, place, to);
        if (row >= 0 && uint32_t(row) < o.peers[to].capacity)
          put(o.peers[to].block + uint64_t(row) * a.row_bytes + piece.at);
      }
    };
    if (__any_sync(kFull, place >= 0))
      copy_row(x + uint64_t(piece.row) * a.row_bytes + piece.at, min(pieces.bytes, a.row_bytes - piece.at),
               to_all);
    piece = next;
    next = find(number);
    number = take();
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
  uint32_t (&taken)[2] = g.state->bulk_taken[o.operation & 1];
  if (o.alive && blockIdx.x >= sending) {
    copy_rows(g, a, o, own, warp * keeping + blockIdx.x - sending, warps * keeping, taken[1]);
  } else if (o.alive && warp < kSendingWarps) {
    copy_rows(g, a, o, others, warp * sending + blockIdx.x, kSendingWarps * sending, taken[0]);
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

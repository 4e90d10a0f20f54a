// What the kernels of bulk.hpp share: their start and end, waits, and copies of rows.
#pragma once

#include "exchange/nvlink/bulk.hpp"
#include "exchange/nvlink/bulk_times.cuh"
#include "exchange/nvlink/wait.cuh"

namespace ep::cuda {

// Who waits for what.
struct BulkWait {
  Op op;
  Phase phase;
  uint32_t peer;
  uint64_t operation;
};

// Called between two looks at a cell. Returns false if the group failed.
__device__ __forceinline__ bool keep_waiting(const Device& g, const BulkWait& w, uint32_t spins,
                                             uint64_t& start) {
  if (spins == 0) start = clock_ns();
  if (spins % kSpins != kSpins - 1) return true;
  const Look look = look_around(g, w.peer, start);
  if (look == Look::kGoOn) return true;
  report(g, w.op, w.phase, w.operation, look == Look::kMasked ? Look::kLate : look, w.peer, 0);
  return false;
}

// Waits until a cell has reached `least`. Returns false if the group failed. waited += ns of the wait.
__device__ __forceinline__ bool await_cell(const Device& g, const void* cell, uint64_t least,
                                           const BulkWait& w, uint64_t& waited) {
  uint64_t start = 0;
#pragma unroll 1
  for (uint32_t spins = 0; load_acquire(cell) < least; ++spins)
    if (!keep_waiting(g, w, spins, start)) return false;
  if (start != 0) waited += clock_ns() - start;
  return true;
}

// Where the rows for a peer go.
struct BulkPeer {
  std::byte* block;
  uint32_t capacity;
};

// What all threads of a block read. In shared memory.
struct BulkOpened {
  uint64_t operation;
  BulkPeer peers[kMaxPeers];
  uint32_t absent;  // bit per rank that this generation goes on without: nobody writes to it or awaits it
  bool alive;

  __device__ __forceinline__ bool is_absent(uint32_t rank) const { return absent >> rank & 1; }
};

// Publishes to `peer` where rows for this rank go. Earlier kernels have ended, and all they did there: no
// release.
__device__ __forceinline__ void publish_target(const Device& g, const BulkTarget& target, uint64_t operation,
                                               uint32_t peer) {
  std::byte* cell = g.regions[peer] + g.bulk.ready_at(operation & 1, g.rank);
  store_relaxed(cell, target.offset / BulkLayout::kUnit << 32 | uint32_t(operation));
  store_relaxed(cell + sizeof(uint64_t), uint64_t(target.capacity) << 32 | uint32_t(operation));
}

// Waits for what publish_target() tells. Returns false if the group failed.
__device__ __forceinline__ bool await_target(const Device& g, const BulkWait& w, BulkPeer& peer) {
  const std::byte* cell = g.own() + g.bulk.ready_at(w.operation & 1, w.peer);
  uint64_t start = 0;
#pragma unroll 1
  for (uint32_t spins = 0;; ++spins) {
    const uint64_t place = load_relaxed(cell), capacity = load_relaxed(cell + sizeof(uint64_t));
    if (low_word(place) == uint32_t(w.operation) && low_word(capacity) == uint32_t(w.operation)) {
      peer = {g.regions[w.peer] + g.bulk.heap + high_word(place) * BulkLayout::kUnit, high_word(capacity)};
      return true;
    }
    if (!keep_waiting(g, w, spins, start)) return false;
  }
}

// Thread r finds out where rows for rank r go. Without a target nobody asks. The whole block calls it first.
__device__ __forceinline__ void open_bulk(const Device& g, Op op, const BulkTarget* target, BulkOpened& o) {
  const uint32_t r = threadIdx.x;
  const uint64_t operation = (load_relaxed(&g.state->bulk_operations) >> kTicketShift) + 1;
  const uint32_t absent = g.state->control.absent;
  const bool writes = target != nullptr && r < g.num_ranks && r != g.rank && !(absent >> r & 1);
  if (writes && blockIdx.x == 0 && !has_failed(g)) publish_target(g, *target, operation, r);
  if (r == 0) {
    if (blockIdx.x == 0) {
      start_bulk_times(g, op);
      for (uint32_t& taken : g.state->bulk_taken[~operation & 1]) taken = 0;  // for the next operation
    }
    o.operation = operation;
    o.alive = !aborted(g);
    o.absent = absent;
  }
  __syncthreads();
  if (target == nullptr) return;
  if (r < g.num_ranks && o.alive) {
    o.peers[r] = {g.own() + g.bulk.heap + target->offset, o.is_absent(r) ? 0 : target->capacity};
    if (writes && !await_target(g, {op, Phase::kSendHeader, r, operation}, o.peers[r])) o.alive = false;
  }
  __syncthreads();
}

// This block's part of an operation.
__device__ __forceinline__ uint64_t bulk_share() {
  const uint64_t share = kBulkOperation / gridDim.x;
  return blockIdx.x == 0 ? kBulkOperation - share * (gridDim.x - 1) : share;
}

// The whole block calls it when all it wrote is on its way: publishes that to all ranks. wrote: rows that no
// flag has announced.
__device__ __forceinline__ void close_bulk(const Device& g, const BulkOpened& o, bool wrote = true) {
  __syncthreads();
  if (threadIdx.x < g.num_ranks && o.alive && !o.is_absent(threadIdx.x)) {
    if (wrote) fence_system();
    add_system(g.regions[threadIdx.x] + g.bulk.done_at(g.rank), bulk_share());
  }
  if (threadIdx.x == 0) add(g.state->bulk_operations, bulk_share());
}

// Block 0 calls it: waits until all ranks have written what they send to this one.
__device__ __forceinline__ void await_done(const Device& g, Op op, const BulkOpened& o) {
  if (threadIdx.x >= kWarp) return;
  uint64_t waited = 0;
  if (threadIdx.x < g.num_ranks && !o.is_absent(threadIdx.x))
    await_cell(g, g.own() + g.bulk.done_at(threadIdx.x), o.operation << kTicketShift,
               {op, Phase::kRecvHeader, threadIdx.x, o.operation}, waited);
  if (waited != 0) g.state->bulk[uint32_t(op)].wait_ns[threadIdx.x] += waited;
  __syncwarp();
}

constexpr uint32_t kCopyWords = 7;  // 16-byte words of a lane in flight: half or a quarter of 7168 channels

// Rows are copied in pieces that are as equal as possible: then the warps of a block end together.
struct Pieces {
  uint32_t count, bytes;  // of a row; of all pieces but the last

  __device__ __forceinline__ explicit Pieces(uint32_t row_bytes) {
    constexpr uint32_t kLine = kWarp * sizeof(uint4), kMost = kCopyWords * kLine;
    count = (row_bytes + kMost - 1) / kMost;
    bytes = (row_bytes + count * kLine - 1) / (count * kLine) * kLine;
  }
};

// Copies a row of this GPU, or a piece of one, through registers. to_all(put) calls put(at) for every place.
// The whole warp calls it.
template <class ToAll>
__device__ __forceinline__ void copy_row(const std::byte* row, uint32_t bytes, ToAll&& to_all) {
  const uint32_t lane = threadIdx.x % kWarp, words = bytes / sizeof(uint4);
#pragma unroll 1
  for (uint32_t first = lane; first - lane < words; first += kCopyWords * kWarp) {
    uint4 v[kCopyWords];
#pragma unroll
    for (uint32_t i = 0; i < kCopyWords; ++i)
      if (first + i * kWarp < words) v[i] = load16(row + uint64_t(first + i * kWarp) * sizeof(uint4));
    to_all([&](std::byte* at) {
#pragma unroll
      for (uint32_t i = 0; i < kCopyWords; ++i)
        if (first + i * kWarp < words) store16(at + uint64_t(first + i * kWarp) * sizeof(uint4), v[i]);
    });
  }
}

}  // namespace ep::cuda

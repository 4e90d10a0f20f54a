// Measures the operations for many rows. None of it lies on the way of a row.
#pragma once

#include "exchange/nvlink/kernel_times.hpp"
#include "exchange/nvlink/wait.cuh"

namespace ep::cuda {

// The first kernel of an operation has begun, or another one of it. One thread of block 0.
__device__ __forceinline__ void start_bulk_times(const Device& g, Op op) {
  BulkTimes& t = g.state->bulk[uint32_t(op)];
  if (t.start_ns != 0 && t.end_ns == 0) return;
  t = BulkTimes{};
  t.start_ns = clock_ns();
}

// The rows are on their way. One thread of block 0. A dispatch sends nothing while it waits for its plan.
__device__ __forceinline__ void note_sent(const Device& g, Op op) {
  BulkTimes& t = g.state->bulk[uint32_t(op)];
  uint64_t longest = 0;
  if (op == Op::kDispatch)
    for (uint32_t r = 0; r < g.num_ranks; ++r) longest = max(longest, t.wait_ns[r]);
  t.sent_ns = clock_ns() - longest;
}

// Adds the times of an operation that has ended to the totals. One thread.
__device__ __noinline__ inline void flush_bulk_times(const Device& g, Op op) {
  BulkTimes& t = g.state->bulk[uint32_t(op)];
  if (t.end_ns == 0) return;
  Totals& totals = g.state->totals;
  const uint32_t kind = kind_of(op, true);
  uint64_t longest = 0;
#pragma unroll 1
  for (uint32_t r = 0; r < g.num_ranks; ++r) {
    const uint64_t waited = t.wait_ns[r];
    longest = max(longest, waited);
    add(totals.peer_wait_ns[kind][r], waited);
    raise(totals.peer_wait_max_ns[kind][r], waited);
  }
  for_each_bulk_time(op, t, longest, [&](Part part, uint64_t ns) {
    add(totals.times[kind][uint32_t(part)][bucket_of(ns)], 1);
    add(totals.sums[kind][uint32_t(part)], ns);
  });
  t = BulkTimes{};
}

}  // namespace ep::cuda

// What kernels do besides their work. Each block ends with tickets. Block 0 of the next kernel publishes to
// the senders which banks were read, and adds up the times. No row ever waits for this.
//
// A bank is freed at the start of the reader's next kernel of any kind, or by release() or publish() if there
// is none. Doing so at the end would add a round trip over the link to every kernel.
#pragma once

#include "exchange/nvlink/kernel_times.hpp"
#include "exchange/nvlink/wait.cuh"

namespace ep::cuda {

// One block's share. The shares of all blocks add up to one kernel.
__device__ __forceinline__ uint64_t share_of_ticket() {
  return blockIdx.x == 0 ? (1ull << kTicketShift) - (gridDim.x - 1) : 1;
}

// What a block has done, to be added to the totals. Valid in thread 0.
struct Done {
  uint32_t bytes = 0, bytes_local = 0, rows = 0;
  bool emptied = false;  // slots emptied by any thread
};

// Ends every block of a kernel that sends, receives or both. `slot`: where its times are added. One access
// adds all sums, because hundreds of blocks end at once.
__device__ __forceinline__ void end_block(const Device& g, Slot slot, const Opened& o, bool sends, bool reads,
                                          const Done& done) {
  __syncthreads();
  let_next_kernel_start();
  const uint32_t lane = threadIdx.x;
  if (lane >= kWarp) return;
  Tally& t = g.tally(op_of(slot));
  const uint64_t by[5] = {sends ? share_of_ticket() : 0, __shfl_sync(kFull, done.bytes, 0),
                          __shfl_sync(kFull, done.bytes_local, 0), __shfl_sync(kFull, done.rows, 0),
                          reads ? share_of_ticket() : 0};
  if (done.emptied) fence_gpu();  // before the ticket that announces it
  uint64_t mine = 0;
#pragma unroll
  for (uint32_t i = 0; i < 5; ++i)
    if (lane == i) mine = by[i];
  if (mine != 0) add(lane < 4 ? (&t.sends)[lane] : t.reads[o.bank], mine);
  if (lane == 0) raise(g.scratch(slot, o.epoch).end_ns, clock_ns());
}

// Counts a bank of a dispatch that was read in place. All threads have emptied their slots. One thread calls
// it.
__device__ __forceinline__ void count_read(const Device& g, Op op, uint32_t bank) {
  fence_gpu();
  add(g.tally(op).reads[bank], share_of_ticket());
}

// Publishes to all senders which banks were read since the last call. One warp.
__device__ __forceinline__ void publish_reads(const Device& g, const Opened& o) {
  const uint32_t banks = g.layout.num_banks, i = threadIdx.x % kWarp;
  if (i >= kBankedOps * banks) return;
  const uint32_t op = i / banks, bank = i % banks;
  const uint64_t read = load_acquire_gpu(&g.tally(Op(op)).reads[bank]) >> kTicketShift;
  if (read <= load_relaxed(&g.state->published[op][bank])) return;  // or a concurrent kernel was faster
  const uint64_t epoch = o.base + (bank == 0 ? banks : bank) + (read - 1) * banks;
  fence_system();
#pragma unroll 1
  for (uint32_t r = 0; r < g.num_ranks; ++r)
    if (o.peers >> r & 1) raise_relaxed(g.regions[r] + g.layout.read_cell(Op(op), bank, g.rank), epoch);
  raise(g.state->published[op][bank], read);
}

// Waits until the bank of a send is free. This rank's own reads may come from a kernel on another stream, and
// perhaps no kernel follows that one to publish them, so this loop publishes them. One warp. It returns early
// if another rank reports a failure.
__device__ __noinline__ inline void publish_until_free(const Device& g, Op op, const Opened& o) {
  const uint32_t lane = threadIdx.x, banks = g.layout.num_banks;
  const bool asked = lane < g.num_ranks && o.peers >> lane & 1 && o.epoch > o.base + banks;
  const std::byte* cell = g.own() + g.layout.read_cell(op, o.bank, asked ? lane : 0);
  const uint64_t start = clock_ns();
#pragma unroll 1
  for (;;) {
    const bool free = !asked || load_acquire(cell) >= o.epoch - banks || masked_now(g) >> lane & 1;
    if (__all_sync(kFull, free)) return;
    if (__any_sync(kFull, has_failed(g) || clock_ns() - start >= g.state->control.timeout_ns)) return;
    publish_reads(g, o);
    __syncwarp();
  }
}

// Adds the times of a finished kernel to the totals. One warp.
__device__ __forceinline__ void flush_times(const Device& g, Slot slot, Scratch& s) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint64_t start = s.start_ns, sent = s.sent_ns, end = s.end_ns;
  const bool both = s.both;
  const Op op = op_of(slot);
  uint64_t wait = lane < g.num_ranks ? s.wait_ns[lane] : 0;
  __syncwarp();
  if (end == 0) return;
  if (lane < g.num_ranks) {
    add(g.state->totals.peer_wait_ns[uint32_t(op)][lane], wait);
    raise(g.state->totals.peer_wait_max_ns[uint32_t(op)][lane], wait);
    s.wait_ns[lane] = 0;
  }
#pragma unroll
  for (uint32_t by = kWarp / 2; by != 0; by /= 2) wait = max(wait, __shfl_xor_sync(kFull, wait, by));
  if (lane != 0) return;
  for_each_time(slot, {start, sent, end, both, wait}, [&](Op of, Part part, uint64_t ns) {
    add(g.state->totals.times[uint32_t(of)][uint32_t(part)][bucket_of(ns)], 1);
    add(g.state->totals.sums[uint32_t(of)][uint32_t(part)], ns);
  });
  s.start_ns = s.sent_ns = s.end_ns = s.both = 0;
}

// The work of block 0. `epoch`: for a receive, from its handle. `both`: the kernel sends and receives.
__device__ __forceinline__ void do_bookkeeping(const Device& g, Slot slot, const uint64_t* epoch, Opened& o,
                                               bool both) {
  if (threadIdx.x < kWarp) {
    const uint64_t start = clock_ns();
    open(g, op_of(slot), epoch, o);
    __syncwarp();
    const uint32_t banks = g.layout.num_banks;
    Scratch& mine = g.scratch(slot, o.epoch);
    if (threadIdx.x == 0) {
      mine.both = both;
      mine.start_ns = start;
    }
    publish_reads(g, o);
    // That kernel has ended, or this kernel's bank would not be free.
    if (o.epoch > o.base + banks) flush_times(g, slot, g.scratch(slot, o.epoch - banks));
    if (epoch == nullptr && !o.banks_free) publish_until_free(g, op_of(slot), o);
  }
}

}  // namespace ep::cuda

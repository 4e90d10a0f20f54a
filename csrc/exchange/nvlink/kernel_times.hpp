// Assigns the times of a finished kernel to statistics. The next kernel and the host both use this.
#pragma once

#include "exchange/nvlink/state.hpp"

namespace ep::cuda {

EP_HOST_DEVICE inline Op op_of(Slot slot) {
  return slot == Slot::kDispatchSend || slot == Slot::kDispatchRecv ? Op::kDispatch : Op::kCombine;
}

// The bucket of a histogram: the highest bit that is set.
EP_HOST_DEVICE inline uint32_t bucket_of(uint64_t ns) {
#ifdef __CUDA_ARCH__
  const uint32_t bucket = 63 - __clzll(static_cast<long long>(ns | 1));
#else
  const uint32_t bucket = 63 - uint32_t(__builtin_clzll(ns | 1));
#endif
  return bucket < kNumBuckets ? bucket : kNumBuckets - 1;
}

struct KernelTimes {
  uint64_t start_ns, sent_ns, end_ns;
  bool both;            // the kernel ran both halves
  uint64_t longest_ns;  // wait for a peer
};

// Calls record(op, part, ns) for each part of the kernel.
template <class Record>
EP_HOST_DEVICE inline void for_each_time(Slot slot, const KernelTimes& t, Record&& record) {
  const bool recv = slot == Slot::kDispatchRecv || slot == Slot::kCombineRecv;
  const Op op = op_of(slot);
  if (t.both || !recv) record(op, Part::kSend, (t.both ? t.sent_ns : t.end_ns) - t.start_ns);
  if (!t.both && !recv) return;
  record(op, Part::kWait, t.longest_ns);
  const Part rest = op == Op::kDispatch ? Part::kExpand : Part::kReduce;
  record(op, t.both ? Part::kTotal : rest, t.end_ns - t.start_ns);
}

// Calls record(part, ns) for each part of an operation for many rows. longest_ns: wait for a peer.
template <class Record>
EP_HOST_DEVICE inline void for_each_bulk_time(Op op, const BulkTimes& t, uint64_t longest_ns,
                                              Record&& record) {
  if (t.sent_ns != 0) record(Part::kSend, t.sent_ns - t.start_ns);
  record(Part::kWait, longest_ns);
  if (op == Op::kDispatch && t.end_ns > t.arrived_ns) record(Part::kExpand, t.end_ns - t.arrived_ns);
  record(Part::kTotal, t.end_ns - t.start_ns);
}

}  // namespace ep::cuda

// Counters of one rank. One writer (the thread that drives the exchange), any number of readers, no locks.
// Durations are ns; bucket b of a histogram counts durations in [2^b, 2^(b+1)).
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "exchange/common/layout.hpp"
#include "exchange/common/status.hpp"

namespace ep {

enum class Part : uint32_t { kSend, kWait, kExpand, kReduce, kTotal };
constexpr uint32_t kNumParts = 5, kNumBuckets = 48;  // 2^48 ns = 78 h

// Index of what is timed: dispatch, combine and vote, then dispatch and combine of many rows.
constexpr uint32_t kTimedOps = 5, kFirstOfMany = 3;
EP_HOST_DEVICE constexpr uint32_t timed(Op op, bool many) { return uint32_t(op) + (many ? kFirstOfMany : 0); }
inline std::string timed_name(uint32_t index) {
  return index < kFirstOfMany ? name(Op(index)) : std::string("normal_") + name(Op(index - kFirstOfMany));
}

// A number with a single writer: a plain add that a reader never sees half done.
class Counter {
 public:
  void add(uint64_t by) {
    value_.store(value_.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
  }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

struct Histogram {
  std::array<Counter, kNumBuckets> counts;
  Counter sum;

  void record(uint64_t ns) {
    const uint32_t bucket = ns == 0 ? 0 : std::bit_width(ns) - 1;
    counts[bucket < kNumBuckets ? bucket : kNumBuckets - 1].add(1);
    sum.add(ns);
  }
};

// What went through the NIC to one peer.
struct Traffic {
  Counter bytes;    // written, with everything that belongs to an operation
  Counter retries;  // times that the NIC had no room for a write, which then waited
};

struct Statistics {
  std::array<std::array<Histogram, kNumParts>, kTimedOps> times;
  std::array<std::array<Counter, kMaxRanks>, kTimedOps> peer_wait_ns;
  std::array<Counter, kTimedOps> bytes;        // written into memory of other ranks
  std::array<Counter, kTimedOps> bytes_local;  // written into this rank's own region
  Counter tokens;                              // given to dispatch_send
  Counter rows;                                // deduplicated rows received, by dispatch
  Counter timeouts;                            // waits that passed their deadline, masked or raised
  Counter sleeps;                              // futex waits, after spinning was not enough
  std::array<Traffic, kMaxRanks> traffic;      // to ranks of other hosts; written by whoever drives the NIC
  std::string domain;                          // of the NIC, set before traffic begins; empty if none
  std::vector<Counter> expert_tokens;          // [E_local] rows received

  explicit Statistics(size_t local_experts) : expert_tokens(local_experts) {}
  Histogram& time(Op op, Part part, bool many = false) { return times[timed(op, many)][uint32_t(part)]; }
};

}  // namespace ep

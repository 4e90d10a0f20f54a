// Two bare endpoints, for the benchmark: measures the cost of a write with its notification.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "exchange/fabric/endpoint.hpp"
#include "exchange/fabric/registered_memory.hpp"

namespace ep::fabric {

class Probe {
 public:
  // bytes: of the largest write. Throws FabricError.
  Probe(const Options& options, uint64_t bytes);

  Endpoint& endpoint() { return endpoint_; }

  // Returns half of each round trip in ns. One side is `first`. Both sides call it with the same numbers.
  std::vector<uint64_t> latency(uint64_t bytes, uint32_t rounds, bool first, uint64_t timeout_ns);

  // Returns the ns for `writes` writes, until the receiver returned the last one. `window` of them are in
  // flight.
  uint64_t stream(uint64_t bytes, uint32_t writes, uint32_t window, bool first, uint64_t timeout_ns);

 private:
  void put(uint64_t bytes, uint32_t number, uint32_t window);
  void await(uint64_t arrivals);  // this many more than before; the peer may be ahead
  void look();

  const Library library_;
  Pages inbound_, outbound_;
  Endpoint endpoint_;
  uint64_t arrived_ = 0, awaited_ = 0, deadline_ = 0;
};

}  // namespace ep::fabric

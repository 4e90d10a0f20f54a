// Memory that one process writes into another one's, of two that have nothing else in common.
#pragma once

#include <cstdint>
#include <set>

#include "exchange/fabric/endpoint.hpp"
#include "exchange/fabric/registered_memory.hpp"

namespace ep::fabric {

// One end. Both have memory of the same size, and what is written keeps its place. One thread at a time.
class Lane {
 public:
  // Throws FabricError, std::bad_alloc.
  Lane(const Options& options, uint64_t bytes);

  Endpoint& endpoint() { return endpoint_; }
  Memory memory() const { return {memory_.begin(), memory_.bytes()}; }

  // Copies some bytes to the same place at the peer, and returns when they may change here. number: for
  // await(). Throws FabricError, also after the timeout; std::out_of_range.
  void write(uint64_t at, uint64_t bytes, uint32_t number, uint64_t timeout_ns);

  // Waits for the write of that number. Returns whether it is here. Throws FabricError.
  bool await(uint32_t number, uint64_t timeout_ns);

 private:
  void look();

  const Library library_;
  Pages memory_;
  Endpoint endpoint_;
  std::set<uint32_t> arrived_;
};

}  // namespace ep::fabric

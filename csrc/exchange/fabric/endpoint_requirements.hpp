// Requirements on an endpoint beyond libfabric's capability bits, which providers also grant when they only
// emulate them.
#pragma once

#include <rdma/fi_endpoint.h>

#include <string>

#include "exchange/fabric/library.hpp"

namespace ep::fabric {

struct Demand {
  const Library& library;
  const fi_info& info;
  fid_ep* endpoint;                // not enabled yet, where not said otherwise
  const std::string& description;  // for errors
};

// Throws FabricError where the endpoint, enabled, makes RDMA writes of messages. EFA alone says so.
void refuse_emulation(const Demand& demand);

// Throws FabricError unless the card itself reads and writes the memory of CUDA devices.
void demand_peer_to_peer(const Demand& demand);

}  // namespace ep::fabric

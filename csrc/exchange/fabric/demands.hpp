// What an endpoint is asked for besides capabilities, as these are granted by providers that emulate them.
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

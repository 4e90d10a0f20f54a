// Requirements on an endpoint beyond libfabric's capability bits. Providers grant those bits even if they
// only emulate a capability.
#pragma once

#include <rdma/fi_endpoint.h>

#include <string>

#include "exchange/fabric/library.hpp"

namespace ep::fabric {

struct Demand {
  const Library& library;
  const fi_info& info;
  fid_ep* endpoint;                // not enabled yet, unless stated otherwise
  const std::string& description;  // for errors
};

// Throws FabricError if the enabled endpoint emulates RDMA writes by messages. Only EFA reports that.
void refuse_emulation(const Demand& demand);

// Throws FabricError unless the NIC itself reads and writes the memory of CUDA devices.
void demand_peer_to_peer(const Demand& demand);

}  // namespace ep::fabric

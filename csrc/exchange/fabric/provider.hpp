// Chooses the libfabric provider by its capabilities, never by its name alone.
//
// Required: reliable datagrams to other hosts, RDMA writes, and 4 bytes of remote completion data per write.
// Not required: an order between writes, atomics, events at the target's memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "exchange/fabric/library.hpp"
#include "exchange/fabric/provider_settings.hpp"

namespace ep::fabric {

// One provider and device, in the order of preference.
struct Candidate {
  std::string provider, fabric, domain;
  std::string missing;  // why it cannot be used; empty if it can
};

// All candidates, usable or not.
std::vector<Candidate> list(const Library& library, const Options& options);

// The best usable candidate. Throws FabricError that lists what each one lacks, or says that there is none.
Info choose(const Library& library, const Options& options);

// One line for the log: provider, domain, version, and the modes that it requires.
std::string describe(const Library& library, const fi_info& info);

}  // namespace ep::fabric

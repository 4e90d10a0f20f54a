// Passes traffic settings to providers: through the environment that libfabric reads when it is loaded, or
// through hints.
#pragma once

#include <rdma/fabric.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ep::fabric {

struct Options {
  std::string library;           // path; empty = the loader's libfabric.so.1
  std::string provider;          // exact name as libfabric gives it, as "tcp;ofi_rxm"; empty = by capability
  std::string domain;            // device or interface; empty = the first
  std::string address;           // of this host on that network; empty = the provider's choice
  std::string interface = {};    // network interface to which the provider keeps; empty = its choice
  int64_t traffic_class = -1;    // a value of libfabric's tclass; -1 = the provider's default
  int32_t gid_index = -1;        // of the port's table; -1 = the provider's default
  uint32_t queue_depth = 0;      // writes in flight, of all peers; 0 = the provider's default
  bool adaptive_routing = true;  // false: the provider is asked for writes in order
  uint64_t disorder =
      0;  // seed: writes and completions in any order; 0 = as they come. See network_emulation.hpp
  bool strict_memory = false;  // addresses and keys as production networks want them
  bool device_memory = false;  // asks for providers that reach a device's memory (FI_HMEM)
  bool device_copies = false;  // also those that copy it through the host's; for tests
};

struct Parameter {
  const char* name;
  std::string value;
};

// What providers read when they are loaded, as libfabric 1.14 to 2.x call it.
std::vector<Parameter> parameters(const Options& options);

// Puts them into the environment of this process. libfabric reads it once: call it before it is loaded.
void export_parameters(const Options& options);

// The same settings as hints: what is wanted of a provider when it is asked what it has.
void add_hints(const Options& options, fi_info& hints);

// "" or the first setting that this provider has no use for, and what to do instead: nothing that was asked
// for is passed over in silence.
std::string unused(const Options& options, const std::string& provider);

}  // namespace ep::fabric

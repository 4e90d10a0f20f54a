// Passes traffic settings to providers: through environment variables that libfabric reads when it is loaded,
// or through hints.
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
  std::string interface = {};    // network interface that the provider uses; empty = its choice
  int64_t traffic_class = -1;    // a value of libfabric's tclass; -1 = the provider's default
  int32_t gid_index = -1;        // of the port's table; -1 = the provider's default
  uint32_t queue_depth = 0;      // writes in flight to all peers together; 0 = the provider's default
  bool adaptive_routing = true;  // false: the provider is asked for writes in order
  uint64_t disorder = 0;  // seed: writes and completions in any order; 0 = off. See network_emulation.hpp
  uint64_t delay_ns = 0;  // from sending a message until it is visible; 0 = none
  bool strict_memory = false;  // addresses and keys as on production networks
  bool device_memory = false;  // requires a provider that reaches device memory (FI_HMEM)
  bool device_copies = false;  // accepts providers that copy device memory through the host; for tests
};

struct Parameter {
  const char* name;
  std::string value;
};

// Environment variables that providers read when they are loaded, under their names in libfabric 1.14 to 2.x.
std::vector<Parameter> parameters(const Options& options);

// Sets them in this process. Call it before libfabric is loaded, which reads them once.
void export_parameters(const Options& options);

// The same settings as hints for a query.
void add_hints(const Options& options, fi_info& hints);

// The first setting that this provider does not support, and what to do instead, or "". No setting is ignored
// silently.
std::string unused(const Options& options, const std::string& provider);

}  // namespace ep::fabric

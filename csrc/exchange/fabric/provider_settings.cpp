// Environment variables and hints of the known providers.
#include "exchange/fabric/provider_settings.hpp"

#include <stdlib.h>

#include <algorithm>
#include <array>

namespace ep::fabric {
namespace {

constexpr uint64_t kWriteOrder = FI_ORDER_WAW | FI_ORDER_RMA_WAW;
constexpr const char* kInterface[] = {"FI_TCP_IFACE", "FI_NET_IFACE", "FI_VERBS_IFACE", "FI_SOCKETS_IFACE"};
// Transmit queues. On verbs also receives: each immediate uses one up, so their number must match.
constexpr const char* kDepth[] = {"FI_VERBS_TX_SIZE",       "FI_VERBS_RX_SIZE",       "FI_OFI_RXM_TX_SIZE",
                                  "FI_OFI_RXM_MSG_TX_SIZE", "FI_OFI_RXM_MSG_RX_SIZE", "FI_EFA_TX_SIZE",
                                  "FI_TCP_TX_SIZE",         "FI_NET_TX_SIZE"};

// "verbs" of "verbs;ofi_rxm": layers do not send by themselves.
std::string core(const std::string& provider) { return provider.substr(0, provider.find(';')); }

std::string no_use(const std::string& setting, const std::string& provider, const std::string& instead) {
  return setting + ": provider " + provider + " has no such setting; " + instead;
}

}  // namespace

std::vector<Parameter> parameters(const Options& options) {
  std::vector<Parameter> all;
  if (!options.interface.empty())
    for (const char* name : kInterface) all.push_back({name, options.interface});
  if (options.gid_index >= 0) all.push_back({"FI_VERBS_GID_IDX", std::to_string(options.gid_index)});
  if (options.queue_depth != 0)
    for (const char* name : kDepth) all.push_back({name, std::to_string(options.queue_depth)});
  return all;
}

void export_parameters(const Options& options) {
  for (const Parameter& parameter : parameters(options)) setenv(parameter.name, parameter.value.c_str(), 1);
}

void add_hints(const Options& options, fi_info& hints) {
  if (options.traffic_class >= 0) hints.tx_attr->tclass = uint32_t(options.traffic_class);
  hints.tx_attr->size = options.queue_depth;
  if (!options.adaptive_routing) {
    hints.tx_attr->msg_order |= kWriteOrder;
    hints.rx_attr->msg_order |= kWriteOrder;
  }
}

std::string unused(const Options& options, const std::string& provider) {
  const std::string from = core(provider);
  const bool sockets = from == "tcp" || from == "net";
  const std::string traffic_class = "traffic_class = " + std::to_string(options.traffic_class);
  if (options.traffic_class >= 0 && from == "verbs")
    return no_use(
        traffic_class, provider,
        "leave it out, and set the DSCP (cma_roce_tos) or the service level (subnet manager) of RDMA CM");
  if (options.traffic_class >= 0 && from == "efa" && options.traffic_class != FI_TC_LOW_LATENCY)
    return no_use(traffic_class, provider, "it knows low_latency alone");
  if (options.traffic_class >= 0 && sockets && options.traffic_class != FI_TC_BULK_DATA)
    return no_use(traffic_class, provider, "it knows bulk_data alone");
  if (options.gid_index >= 0 && from != "verbs")
    return no_use("gid_index = " + std::to_string(options.gid_index), provider, "leave it out");
  if (!options.interface.empty() && from == "efa")
    return no_use("interface = " + options.interface, provider, "name the device in domain");
  return {};
}

}  // namespace ep::fabric

// Lists providers and why each of them cannot be used.
#include "exchange/fabric/provider.hpp"

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include <algorithm>
#include <cstring>

#include "exchange/fabric/network_emulation.hpp"

namespace ep::fabric {
namespace {

constexpr uint64_t kCaps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
constexpr uint64_t kMrModes = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
constexpr uint64_t kModes = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;

// EFA's device writes need version 1.18. libfabric 1.17 does not accept a later version than its own.
uint32_t api_version(const Library& library) {
  return std::min<uint32_t>(library.version(), FI_VERSION(1, 18));
}

// A configured address may be the loopback: tests run several ranks on one host.
bool needs_reach(const Options& options) { return options.address.empty(); }

std::string text(const char* value) { return value != nullptr ? value : ""; }

uint64_t needed(const Options& options) { return kCaps | (options.device_memory ? FI_HMEM : 0); }
uint64_t mr_modes(const Options& options) { return kMrModes | (options.device_memory ? FI_MR_HMEM : 0); }

bool layered(const std::string& provider) { return provider.find(';') != std::string::npos; }

// Everything reachable, with the modes that we support. `caps` = 0 asks for no capability.
Info query(const Library& library, const Options& options, uint64_t caps, bool with_settings = true) {
  Info hints = library.empty_hints();
  if (!hints) throw FabricError("libfabric has no memory for hints");
  hints->caps = caps;
  hints->mode = kModes;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = int(mr_modes(options));
  hints->domain_attr->threading = FI_THREAD_DOMAIN;  // one lock for everything that belongs to an endpoint
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  // The thread that drives makes progress. A thread of the provider would take its core or a lock from it.
  hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  // libfabric frees strings in hints with free().
  if (!options.provider.empty()) hints->fabric_attr->prov_name = strdup(options.provider.c_str());
  if (!options.domain.empty()) hints->domain_attr->name = strdup(options.domain.c_str());
  if (with_settings) add_hints(options, *hints);
  const char* node = options.address.empty() ? nullptr : options.address.c_str();
  return library.candidates(api_version(library), node, hints.get());
}

// "", or why the candidate cannot be used.
std::string missing(const fi_info& info, const Options& options) {
  // libfabric adds layers to a given provider name, and some providers ignore the domain.
  const std::string name = text(info.fabric_attr->prov_name), domain = text(info.domain_attr->name);
  if (!options.provider.empty() && name != options.provider) return "not the provider " + options.provider;
  if (!options.domain.empty() && domain != options.domain) return "not the domain " + options.domain;
  if (needs_reach(options) && !(info.caps & FI_REMOTE_COMM)) return "reaches no other host";
  if ((info.caps & kCaps) != kCaps) return "no RDMA write (FI_RMA | FI_WRITE | FI_REMOTE_WRITE)";
  if (options.device_memory && !(info.caps & FI_HMEM)) return "reaches no memory of devices (FI_HMEM)";
  const bool stamped = options.delay_ns != 0;
  if (const size_t bytes = CompletionData::bytes(stamped); info.domain_attr->cq_data_size < bytes)
    return "remote completion data of " + std::to_string(info.domain_attr->cq_data_size) + " bytes, " +
           std::to_string(bytes) + " needed" + (stamped ? " with delay_seconds" : "");
  if (info.mode & ~kModes) return "asks for a mode that is not served";
  if (uint64_t(info.domain_attr->mr_mode) & ~mr_modes(options))
    return "asks for a memory registration mode not served";
  if (info.tx_attr->size < options.queue_depth)
    return "holds " + std::to_string(info.tx_attr->size) +
           " writes, queue_depth = " + std::to_string(options.queue_depth);
  return unused(options, name);
}

// Lower is better: real devices first, then fewer layers, then libfabric's own order.
int rank(const fi_info& info) {
  const std::string name = text(info.fabric_attr->prov_name);
  const bool device = info.nic != nullptr && info.nic->link_attr != nullptr &&
                      info.nic->bus_attr != nullptr && info.nic->bus_attr->bus_type == FI_BUS_PCI &&
                      info.nic->link_attr->state != FI_LINK_DOWN;
  // According to its own documentation, libfabric keeps these for tests and development.
  const bool slow = name == "sockets" || name.find("udp") != std::string::npos;
  return (device ? 0 : 4) + (slow ? 2 : 0) + (layered(name) ? 1 : 0);
}

std::vector<const fi_info*> ordered(const fi_info* first) {
  std::vector<const fi_info*> all;
  for (; first != nullptr; first = first->next) all.push_back(first);
  std::stable_sort(all.begin(), all.end(), [](auto* a, auto* b) { return rank(*a) < rank(*b); });
  return all;
}

std::string wanted(const Options& options) {
  std::string what = options.provider.empty() ? "any provider" : "provider " + options.provider;
  if (!options.domain.empty()) what += " on " + options.domain;
  if (!options.address.empty()) what += " with address " + options.address;
  return what;
}

}  // namespace

std::vector<Candidate> list(const Library& library, const Options& options) {
  Info all = query(library, options, 0);
  if (!all) all = query(library, options, 0, false);  // no provider accepts the settings
  std::vector<Candidate> found;
  for (const fi_info* info : ordered(all.get()))
    found.push_back({text(info->fabric_attr->prov_name), text(info->fabric_attr->name),
                     text(info->domain_attr->name), missing(*info, options)});
  return found;
}

Info choose(const Library& library, const Options& options) {
  const Info able = query(library, options, needed(options) | (needs_reach(options) ? FI_REMOTE_COMM : 0));
  for (const fi_info* info : ordered(able.get()))
    if (missing(*info, options).empty()) return library.copy(info);
  // No provider fits: say why for each. A query without capabilities also lists those that libfabric left
  // out.
  const std::string refused = std::string("refuses RDMA writes ") +
                              (options.device_memory ? "of device memory (FI_HMEM) " : "") +
                              "with these settings";
  std::string why;
  for (const Candidate& c : list(library, options))
    why += "; " + c.provider + " on " + c.domain + ": " + (c.missing.empty() ? refused : c.missing);
  throw FabricError("libfabric " + library.version_text() + " (" + library.path() + ") cannot use " +
                    wanted(options) + (why.empty() ? ": it lists none" : why));
}

std::string describe(const Library& library, const fi_info& info) {
  std::string line = "libfabric " + library.version_text() + ", provider " +
                     text(info.fabric_attr->prov_name) + ", fabric " + text(info.fabric_attr->name) +
                     ", domain " + text(info.domain_attr->name);
  const std::pair<uint64_t, const char*> registration[] = {{FI_MR_LOCAL, "local"},
                                                           {FI_MR_VIRT_ADDR, "virtual address"},
                                                           {FI_MR_ALLOCATED, "allocated"},
                                                           {FI_MR_PROV_KEY, "provider key"},
                                                           {FI_MR_HMEM, "device memory"}};
  std::string modes;
  for (const auto& [bit, name] : registration)
    if (uint64_t(info.domain_attr->mr_mode) & bit) modes += (modes.empty() ? "" : ", ") + std::string(name);
  line += ", registration " + (modes.empty() ? std::string("by offset") : modes);
  if (info.mode & FI_RX_CQ_DATA) line += ", a receive per immediate";
  return line + ", " + std::to_string(info.tx_attr->size) + " writes in flight";
}

}  // namespace ep::fabric

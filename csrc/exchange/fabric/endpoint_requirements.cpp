// Asks the provider for direct copies and peer-to-peer access.
#include "exchange/fabric/endpoint_requirements.hpp"

#include <rdma/fi_errno.h>

#include <string_view>

namespace ep::fabric {
namespace {

// Available since libfabric 1.18, and not in the headers of 1.17. Both options are bool.
constexpr int kEfaEmulatedWrite = -(0xefa << 16) + 2;  // device writes are emulated
constexpr int kCudaApiPermitted = 10;                  // FI_OPT_CUDA_API_PERMITTED

std::string_view provider(const Demand& demand) { return demand.info.fabric_attr->prov_name; }

template <class T>
int set(const Demand& demand, int option, const T& value) {
  return fi_setopt(&demand.endpoint->fid, FI_OPT_ENDPOINT, option, &value, sizeof value);
}

bool unknown(int result) { return result == -FI_ENOPROTOOPT || result == -FI_ENOSYS; }

}  // namespace

void refuse_emulation(const Demand& demand) {
  if (!provider(demand).starts_with("efa")) return;
  bool emulated = true;
  size_t size = sizeof emulated;
  const int result = fi_getopt(&demand.endpoint->fid, FI_OPT_ENDPOINT, kEfaEmulatedWrite, &emulated, &size);
  demand.library.check(result,
                       demand.description + ": whether RDMA writes are emulated (needs libfabric 1.18)");
  if (emulated)
    throw FabricError(demand.description +
                      ": RDMA writes are emulated: the device has none, or they are off");
}

void demand_peer_to_peer(const Demand& demand) {
  const int required = set(demand, FI_OPT_FI_HMEM_P2P, int(FI_HMEM_P2P_REQUIRED));
  if (required == 0) return;
  if (!unknown(required))
    demand.library.check(required, demand.description +
                                       ": peer to peer transfers of device memory, required of it "
                                       "(FI_OPT_FI_HMEM_P2P)");
  // With verbs the NIC reads and writes registered memory itself. A layer above verbs passes writes through.
  // It would answer the next question for messages, which it copies.
  if (provider(demand).starts_with("verbs")) return;
  // Without calls to CUDA it cannot copy.
  demand.library.check(set(demand, kCudaApiPermitted, false),
                       demand.description +
                           ": device memory without copies through the host, required of it "
                           "(FI_OPT_FI_HMEM_P2P is not known there, FI_OPT_CUDA_API_PERMITTED = false "
                           "is refused; the latter needs libfabric 1.18)");
}

}  // namespace ep::fabric

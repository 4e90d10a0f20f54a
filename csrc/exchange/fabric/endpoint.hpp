// One endpoint: RDMA writes into peers' memory, each with remote completion data (CompletionData).
//
// Each rank registers one region that peers write to, and the memory that it sends from. No order of writes
// is assumed. No liveness is assumed either: no provider reports a silent peer. Only one thread at a time may
// use an endpoint.
#pragma once

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exchange/fabric/library.hpp"
#include "exchange/fabric/network_emulation.hpp"
#include "exchange/fabric/provider.hpp"

namespace ep::fabric {

// Registered memory, in the form that peers use to address it.
struct Target {
  uint64_t base = 0;  // its start, in the provider's addressing
  uint64_t key = 0;
  uint64_t bytes = 0;  // 0: there is none
};

// The address of a peer and of its memory. Ranks exchange addresses before they connect.
struct EndpointAddress {
  std::string name;  // the provider's address
  Target host, device;
};

struct Memory {
  std::byte* begin = nullptr;
  uint64_t bytes = 0;
};

// Device memory that the NIC reads and writes directly. Both are empty if there is none.
struct DeviceMemory {
  Memory inbound;     // peers write to it; writes are also sent from here
  Memory outbound;    // writes are sent from here
  uint32_t kind = 0;  // libfabric's fi_hmem_iface: 0 = host memory, 1 = CUDA
  int32_t number = 0;
};

struct EndpointParams {
  Memory inbound;   // peers write to it
  Memory outbound;  // writes are sent from here
  DeviceMemory device;
  uint32_t peers;         // how many peers will be added
  uint32_t max_arrivals;  // unread completions that it can hold
};

struct Write {
  const std::byte* from;  // in `outbound`; for a device, in either of its memories
  uint64_t bytes;         // at least 1
  uint64_t to;            // offset in the peer's memory of the same kind
  uint32_t immediate;
  uint32_t tag;  // chosen by the caller; returned with the completion
  bool more;     // another write follows at once
  bool device = false;
};

struct Event {
  enum class Kind : uint32_t { kArrived, kSent, kFailed } kind;
  uint32_t peer;       // kSent, kFailed; kNoPeer if the provider does not say
  uint32_t immediate;  // kArrived
  uint32_t sent;       // kArrived: a SendTime if a delay is emulated, else 0
  uint32_t tag;        // kSent
  int error;           // kFailed: errno of libfabric
};
constexpr uint32_t kNoPeer = ~0u;

class Endpoint {
 public:
  // Throws FabricError naming what the provider refused.
  Endpoint(const Library& library, const Options& options, const EndpointParams& params);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  const std::string& description() const { return description_; }
  // The NIC or interface.
  std::string domain() const {
    const char* name = info_->domain_attr->name;
    return name != nullptr ? name : "";
  }
  EndpointAddress address() const;
  // Peers are numbered in the order in which they are added.
  uint32_t add_peer(const EndpointAddress& peer);

  enum class Posted { kDone, kAgain, kFailed };
  // kAgain: no room, or not connected yet; poll and call again. kFailed: `error()` gives the reason.
  Posted write(uint32_t peer, const Write& write);
  int error() const { return error_; }

  // Reads completions and drives the provider. Returns the number of events.
  size_t poll(Event* events, size_t room);

  // A descriptor for poll(2), or -1 if the provider has none. Before each poll, ready_to_sleep() must return
  // true.
  int wait_fd() const { return wait_fd_; }
  bool ready_to_sleep();

  uint32_t in_flight() const {
    return uint32_t(operations_.size() - free_.size() + (late_writes_ ? late_writes_->size() : 0));
  }
  uint32_t depth() const { return uint32_t(operations_.size()); }

 private:
  struct Operation {
    fi_context2 context;  // used by the provider; first, because completions carry its address
    uint32_t peer, tag;
  };
  struct Close {
    void operator()(void* object) const { fi_close(static_cast<fid*>(object)); }
  };
  template <class T>
  using Owned = std::unique_ptr<T, Close>;
  struct Peer {
    fi_addr_t address;
    Target host, device;
  };
  // Memory that peers write to: its registration, its address for peers, and an emulated NIC's address for
  // it.
  struct Inbound {
    Owned<fid_mr> registered;
    Target target;
    std::optional<StrictMemory> strict;
  };
  struct LateWrite {
    uint32_t peer;
    Write write;
    uint32_t sent;
  };

  void open(const EndpointParams& params, uint64_t key);
  void open_queue(uint32_t size);
  void open_memory(const EndpointParams& params, uint64_t key);
  Inbound take_in(const Memory& memory, Owned<fid_mr> registered) const;
  Owned<fid_mr> reg(const Memory& memory, uint64_t access, uint64_t key);
  Owned<fid_mr> reg_device(const DeviceMemory& device, const Memory& memory, uint64_t access, uint64_t key);
  void* descriptor(const Write& write);
  int64_t post_receive(fi_context2* context);
  void post_receives();
  Posted post(uint32_t peer, const Write& write, uint32_t sent);
  size_t read_queue(Event* events, size_t room);
  size_t disordered(Event* events, size_t room);
  Event failure();

  const Library& library_;
  Info info_;
  std::string description_;
  // Closed in reverse order.
  Owned<fid_fabric> fabric_;
  Owned<fid_domain> domain_;
  Owned<fid_av> addresses_;
  Owned<fid_cq> queue_;
  Inbound host_in_, device_in_;
  Owned<fid_mr> host_out_, device_out_;
  Owned<fid_ep> endpoint_;
  Memory device_outbound_;
  const bool strict_, copies_, stamps_;
  std::vector<Peer> peers_;
  std::vector<Operation> operations_;
  std::vector<Operation*> free_;
  std::vector<fi_context2> receives_;   // only for providers where each arrival uses up a receive
  std::vector<fi_context2*> unposted_;  // receives that were used up
  int wait_fd_ = -1, error_ = 0;
  std::optional<Disorder<LateWrite>> late_writes_;
  std::optional<Disorder<Event>> late_events_;
};

}  // namespace ep::fabric

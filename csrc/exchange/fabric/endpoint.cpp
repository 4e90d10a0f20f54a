// Opens an endpoint through libfabric, registers memory, posts writes and reads completions.
#include "exchange/fabric/endpoint.hpp"

#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <algorithm>

#include "exchange/common/cells.hpp"
#include "exchange/fabric/endpoint_requirements.hpp"

namespace ep::fabric {
namespace {

constexpr uint64_t kStrictKey = 0x1eb0;  // the real key, beneath those that network_emulation.hpp makes up
constexpr uint64_t kKeys = 4;            // of one endpoint: consecutive, starting at a multiple of this
constexpr uint64_t kOutbound = 1, kDevice = 2;  // added to the key
constexpr size_t kBatch = 32;
constexpr size_t kMostWrites = 1 << 16;  // in flight

// A random key, if the provider lets us choose one: a process that does not know it cannot write here.
uint64_t random_key(size_t bytes) {
  std::random_device random;
  const uint64_t key = uint64_t(random()) << 32 | random();
  return (bytes >= sizeof key ? key : key & ((uint64_t(1) << 8 * bytes) - 1)) & ~(kKeys - 1);
}

}  // namespace

Endpoint::Endpoint(const Library& library, const Options& options, const EndpointParams& params)
    : library_(library),
      info_(choose(library, options)),
      description_(describe(library, *info_)),
      strict_(options.strict_memory),
      copies_(options.device_copies),
      stamps_(options.delay_ns != 0) {
  open(params, options.strict_memory ? kStrictKey : random_key(info_->domain_attr->mr_key_size));
  if (options.disorder != 0) {
    late_writes_.emplace(options.disorder);
    late_events_.emplace(options.disorder + 1);
  }
}

Endpoint::~Endpoint() = default;

void Endpoint::open(const EndpointParams& params, uint64_t key) {
  const auto check = [this](int64_t result, const char* what) {
    library_.check(result, description_ + ": " + what);
  };
  fid_fabric* fabric = nullptr;
  check(library_.fabric(info_->fabric_attr, &fabric), "fi_fabric");
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  check(fi_domain(fabric, info_.get(), &domain, nullptr), "fi_domain");
  domain_.reset(domain);

  fi_av_attr av{};
  av.type = FI_AV_TABLE;
  av.count = params.peers;
  fid_av* addresses = nullptr;
  check(fi_av_open(domain, &av, &addresses, nullptr), "fi_av_open");
  addresses_.reset(addresses);

  const uint32_t depth = uint32_t(std::clamp<size_t>(info_->tx_attr->size, 1, kMostWrites));
  const bool receives = info_->mode & FI_RX_CQ_DATA;
  // No more arrivals can be outstanding than there are posted receives.
  const auto arrivals =
      receives ? std::min<size_t>(params.max_arrivals, info_->rx_attr->size) : params.max_arrivals;
  open_queue(depth + uint32_t(arrivals));

  open_memory(params, key);
  fid_ep* endpoint = nullptr;
  check(fi_endpoint(domain, info_.get(), &endpoint, nullptr), "fi_endpoint");
  endpoint_.reset(endpoint);
  const Demand demand{library_, *info_, endpoint, description_};
  const bool on_card = params.device.inbound.bytes != 0 && params.device.kind == FI_HMEM_CUDA && !copies_;
  check(fi_ep_bind(endpoint, &queue_->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind of the completion queue");
  check(fi_ep_bind(endpoint, &addresses_->fid, 0), "fi_ep_bind of the address vector");
  if (on_card)
    demand_peer_to_peer(demand);  // after the bind, because some providers cannot close an unbound endpoint
  check(fi_enable(endpoint), "fi_enable");
  refuse_emulation(demand);
  if (on_card) description_ += ", peer to peer";

  operations_.resize(depth);
  for (Operation& operation : operations_) free_.push_back(&operation);
  receives_.resize(receives ? arrivals : 0);
  for (fi_context2& context : receives_)
    library_.check(post_receive(&context), description_ + ": fi_recv for an immediate");
}

void Endpoint::open_queue(uint32_t size) {
  fi_cq_attr attr{};
  attr.size = size;
  attr.format = FI_CQ_FORMAT_DATA;
  attr.wait_obj = FI_WAIT_FD;
  fid_cq* queue = nullptr;
  int result = fi_cq_open(domain_.get(), &attr, &queue, nullptr);
  if (result != 0) {  // some providers can only be polled
    attr.wait_obj = FI_WAIT_NONE;
    result = fi_cq_open(domain_.get(), &attr, &queue, nullptr);
  }
  library_.check(result, description_ + ": fi_cq_open of " + std::to_string(size) + " entries");
  queue_.reset(queue);
  if (attr.wait_obj == FI_WAIT_FD && fi_control(&queue->fid, FI_GETWAIT, &wait_fd_) != 0) wait_fd_ = -1;
}

void Endpoint::open_memory(const EndpointParams& params, uint64_t key) {
  host_in_ = take_in(params.inbound, reg(params.inbound, FI_REMOTE_WRITE, key));
  if (uint64_t(info_->domain_attr->mr_mode) & FI_MR_LOCAL)
    host_out_ = reg(params.outbound, FI_WRITE, key + kOutbound);
  const DeviceMemory& device = params.device;
  if (device.inbound.bytes == 0) return;
  key += kDevice;
  device_in_ = take_in(device.inbound, reg_device(device, device.inbound, FI_REMOTE_WRITE | FI_WRITE, key));
  device_out_ = reg_device(device, device.outbound, FI_WRITE, key + kOutbound);
  device_outbound_ = device.outbound;
}

Endpoint::Inbound Endpoint::take_in(const Memory& memory, Owned<fid_mr> registered) const {
  const auto begin = reinterpret_cast<uint64_t>(memory.begin);
  const bool addressed = uint64_t(info_->domain_attr->mr_mode) & FI_MR_VIRT_ADDR;
  const Target target{addressed ? begin : 0, fi_mr_key(registered.get()), memory.bytes};
  Inbound made{std::move(registered), target, {}};
  if (strict_) made.strict = {begin, memory.bytes, begin ^ std::random_device{}()};
  return made;
}

// The provider decides how a NIC reaches a GPU: dma-buf, or the driver's peer memory.
Endpoint::Owned<fid_mr> Endpoint::reg_device(const DeviceMemory& device, const Memory& memory,
                                             uint64_t access, uint64_t key) {
  const iovec at{memory.begin, memory.bytes};
  fi_mr_attr attr{};
  attr.mr_iov = &at;
  attr.iov_count = 1;
  attr.access = access;
  attr.requested_key = key;
  attr.iface = fi_hmem_iface(device.kind);
  attr.device.cuda = device.number;
  fid_mr* made = nullptr;
  const int result = fi_mr_regattr(domain_.get(), &attr, 0, &made);
  library_.check(result, description_ + ": registration of " + std::to_string(memory.bytes) +
                             " bytes of device " + std::to_string(device.number) +
                             " (FI_HMEM needs a driver with dma-buf, or its peer memory module, and a "
                             "libfabric built for this kind of device)");
  return Owned<fid_mr>(made);
}

Endpoint::Owned<fid_mr> Endpoint::reg(const Memory& memory, uint64_t access, uint64_t key) {
  fid_mr* made = nullptr;
  const int result = fi_mr_reg(domain_.get(), memory.begin, memory.bytes, access, 0, key, 0, &made, nullptr);
  library_.check(result, description_ + ": registration of " + std::to_string(memory.bytes) +
                             " bytes (locked memory may be limited)");
  return Owned<fid_mr>(made);
}

EndpointAddress Endpoint::address() const {
  const auto named = [](const Inbound& inbound) {
    const auto& strict = inbound.strict;
    return strict ? Target{strict->base, strict->key, strict->bytes} : inbound.target;
  };
  EndpointAddress own{std::string(256, '\0'), named(host_in_), named(device_in_)};
  size_t size = own.name.size();
  library_.check(fi_getname(&endpoint_->fid, own.name.data(), &size), description_ + ": fi_getname");
  own.name.resize(size);
  return own;
}

uint32_t Endpoint::add_peer(const EndpointAddress& peer) {
  fi_addr_t address = FI_ADDR_UNSPEC;
  const int inserted = fi_av_insert(addresses_.get(), peer.name.data(), 1, &address, 0, nullptr);
  if (inserted != 1) throw FabricError(description_ + ": fi_av_insert refuses the address of a peer");
  peers_.push_back({address, peer.host, peer.device});
  return uint32_t(peers_.size()) - 1;
}

Endpoint::Posted Endpoint::write(uint32_t peer, const Write& write) {
  const uint32_t sent = stamps_ ? SendTime::encode(now_ns()) : 0;
  if (!late_writes_) return post(peer, write, sent);
  if (in_flight() >= depth()) return Posted::kAgain;
  late_writes_->hold({peer, write, sent});
  return Posted::kDone;
}

Endpoint::Posted Endpoint::post(uint32_t peer, const Write& write, uint32_t sent) {
  if (free_.empty()) return Posted::kAgain;
  Operation* operation = free_.back();
  operation->peer = peer;
  operation->tag = write.tag;
  const Target& target = write.device ? peers_[peer].device : peers_[peer].host;
  void* desc = descriptor(write);
  const iovec from{const_cast<std::byte*>(write.from), write.bytes};
  fi_rma_iov to{target.base + write.to, write.bytes, target.key};
  if (strict_) {
    const StrictMemory theirs{target.base, target.bytes, target.key};
    const std::string wrong = theirs.refuse(to.addr, to.len, to.key);
    if (!wrong.empty()) throw FabricError(description_ + ": " + wrong);
    to.addr -= target.base;  // converted to what the real provider expects
    to.key = write.device ? kStrictKey + kDevice : kStrictKey;
  }
  fi_msg_rma message{};
  message.msg_iov = &from;
  message.desc = &desc;
  message.iov_count = 1;
  message.addr = peers_[peer].address;
  message.rma_iov = &to;
  message.rma_iov_count = 1;
  message.context = operation;
  message.data = CompletionData{write.immediate, sent}.encode();
  const uint64_t flags = FI_COMPLETION | FI_REMOTE_CQ_DATA | (write.more ? FI_MORE : 0);
  const ssize_t result = fi_writemsg(endpoint_.get(), &message, flags);
  if (result == -FI_EAGAIN) return Posted::kAgain;
  if (result != 0) {
    error_ = int(-result);
    return Posted::kFailed;
  }
  free_.pop_back();
  return Posted::kDone;
}

void* Endpoint::descriptor(const Write& write) {
  if (!write.device) return host_out_ ? fi_mr_desc(host_out_.get()) : nullptr;
  const bool outbound =
      write.from >= device_outbound_.begin && write.from < device_outbound_.begin + device_outbound_.bytes;
  return fi_mr_desc(outbound ? device_out_.get() : device_in_.registered.get());
}

size_t Endpoint::poll(Event* events, size_t room) {
  post_receives();
  return late_writes_ ? disordered(events, room) : read_queue(events, room);
}

size_t Endpoint::disordered(Event* events, size_t room) {
  for (LateWrite late; late_writes_->take(late);) {
    const Posted posted = post(late.peer, late.write, late.sent);
    if (posted == Posted::kDone) continue;
    if (posted == Posted::kFailed)
      late_events_->hold({Event::Kind::kFailed, late.peer, 0, 0, late.write.tag, error_});
    if (posted == Posted::kAgain) late_writes_->hold(late);
    break;
  }
  for (size_t i = 0, count = read_queue(events, room); i < count; ++i) late_events_->hold(events[i]);
  size_t count = 0;
  while (count < room && late_events_->take(events[count])) ++count;
  return count;
}

size_t Endpoint::read_queue(Event* events, size_t room) {
  fi_cq_data_entry entries[kBatch];
  const ssize_t count = fi_cq_read(queue_.get(), entries, std::min(room, kBatch));
  if (count == -FI_EAGAIN || count == 0) return 0;
  if (count < 0) {
    events[0] = failure();
    return 1;
  }
  for (ssize_t i = 0; i < count; ++i) {
    if (entries[i].flags & FI_REMOTE_CQ_DATA) {
      const CompletionData data = CompletionData::decode(entries[i].data);
      events[i] = {Event::Kind::kArrived, kNoPeer, data.immediate, data.sent, 0, 0};
      if (!receives_.empty()) unposted_.push_back(static_cast<fi_context2*>(entries[i].op_context));
      continue;
    }
    auto* operation = static_cast<Operation*>(entries[i].op_context);
    events[i] = {Event::Kind::kSent, operation->peer, 0, 0, operation->tag, 0};
    free_.push_back(operation);
  }
  post_receives();
  return size_t(count);
}

Event Endpoint::failure() {
  fi_cq_err_entry entry{};
  const ssize_t result = fi_cq_readerr(queue_.get(), &entry, 0);
  Event event{Event::Kind::kFailed, kNoPeer, 0, 0, 0, result < 0 ? int(-result) : std::abs(entry.err)};
  auto* operation = static_cast<Operation*>(entry.op_context);
  if (result < 0 || operation < operations_.data() || operation >= operations_.data() + operations_.size())
    return event;
  event.peer = operation->peer;
  event.tag = operation->tag;
  free_.push_back(operation);
  return event;
}

bool Endpoint::ready_to_sleep() {
  if (late_writes_ && late_writes_->size() + late_events_->size() != 0) return false;
  fid* waited[] = {&queue_->fid};
  return fi_trywait(fabric_.get(), waited, 1) == 0;
}

int64_t Endpoint::post_receive(fi_context2* context) {
  // Receives no data. The immediate of a write uses it up.
  return fi_recv(endpoint_.get(), nullptr, 0, nullptr, FI_ADDR_UNSPEC, context);
}

// A provider may be full for now. If it stays full, the wait for missing arrivals reaches its deadline.
void Endpoint::post_receives() {
  while (!unposted_.empty() && post_receive(unposted_.back()) == 0) unposted_.pop_back();
}

}  // namespace ep::fabric

// Lays out the memory that peers write and the outbox behind it.
#include "exchange/fabric/registered_memory.hpp"

#include <errno.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <system_error>

#include "exchange/fabric/outgoing.hpp"
#include "exchange/fabric/wire_format.hpp"

namespace ep::fabric {
namespace {

uint64_t inbox_bytes(const Geometry& g) { return Inbox{g.num_ranks, g.num_banks}.bytes(); }

void check_device(const Layout& layout, const Share& share, const DeviceMemory& device) {
  if (device.inbound.bytes == 0) return;
  if (share.segment >= 0)
    throw std::invalid_argument("rows on a device are not shared by the ranks of a host");
  if (device.inbound.bytes != layout.device_in() || device.outbound.bytes != layout.device_out())
    throw std::invalid_argument("device memory of " + std::to_string(device.inbound.bytes) + " and " +
                                std::to_string(device.outbound.bytes) + " bytes, not " +
                                std::to_string(layout.device_in()) + " and " +
                                std::to_string(layout.device_out()));
}

}  // namespace

std::vector<uint32_t> Share::ranks_of(uint32_t rank) const {
  std::vector<uint32_t> ranks;
  for (uint32_t r = 0; r < hosts.size(); ++r)
    if (hosts[r] == hosts[rank]) ranks.push_back(r);
  return ranks;
}

Share Share::alone(uint32_t num_ranks) {
  Share share{std::vector<uint32_t>(num_ranks), -1, {}};
  std::iota(share.hosts.begin(), share.hosts.end(), 0u);
  return share;
}

shm::Regions host_regions(const Geometry& geometry, uint32_t ranks) {
  const uint64_t whole_rows = std::lcm(kPage, Layout::of(geometry).row_pitch);
  return {ranks, align_up(Layout::of(geometry).total + inbox_bytes(geometry), whole_rows)};
}

FabricMemory::FabricMemory(const Group& group, const Share& share, const DeviceMemory& device)
    : rank_(group.rank),
      device_(device),
      region_bytes_(device.inbound.bytes != 0 ? group.layout.rows : group.layout.total),
      inbound_bytes_(align_up(region_bytes_ + inbox_bytes(group.geometry), kPage)),
      outbound_(region_bytes_ + kRecords * kRecordPitch) {
  check_device(group.layout, share, device);
  if (share.segment < 0) {
    alone_.emplace(inbound_bytes_);
    regions_[rank_] = alone_->begin();
    return;
  }
  segment_.emplace(share.segment);
  const std::vector<uint32_t> ranks = share.ranks_of(rank_);
  const shm::Regions wanted = host_regions(group.geometry, uint32_t(ranks.size()));
  const GroupPage& page = segment_->page();
  if (page.regions != wanted.count || page.pitch != wanted.pitch)
    throw std::invalid_argument("the segment has " + std::to_string(page.regions) + " regions of " +
                                std::to_string(page.pitch) + " bytes, not " + std::to_string(wanted.count) +
                                " of " + std::to_string(wanted.pitch));
  for (size_t i = 0; i < ranks.size(); ++i) regions_[ranks[i]] = segment_->region(uint32_t(i));
}

Bells::Bells(uint32_t rank, const Share& share) : rank_(rank) {
  bells_.fill(-1);
  const auto keep = [this](uint32_t of, int fd) {
    if (fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    bells_[of] = fd;
  };
  if (share.segment < 0) {
    keep(rank, eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    return;
  }
  const std::vector<uint32_t> ranks = share.ranks_of(rank);
  if (share.bells.size() != ranks.size())
    throw std::invalid_argument(std::to_string(share.bells.size()) + " bells for " +
                                std::to_string(ranks.size()) + " ranks");
  for (size_t i = 0; i < ranks.size(); ++i) keep(ranks[i], fcntl(share.bells[i], F_DUPFD_CLOEXEC, 0));
}

Bells::~Bells() {
  for (int bell : bells_)
    if (bell >= 0) close(bell);
}

void Bells::ring(uint32_t rank) const { ring_bell(bells_[rank]); }

void ring_bell(int fd) {
  const uint64_t one = 1;
  while (write(fd, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

}  // namespace ep::fabric

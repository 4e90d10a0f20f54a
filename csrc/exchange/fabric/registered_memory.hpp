// Memory of one rank that a NIC may read and write: private pages, or its part of the segment that the ranks
// of its host share.
#pragma once

#include <sys/mman.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "exchange/common/group.hpp"
#include "exchange/fabric/endpoint.hpp"
#include "exchange/shm/segment.hpp"

namespace ep::fabric {

// Pages of this process, zeroed and present. Throws std::bad_alloc.
class Pages {
 public:
  explicit Pages(uint64_t bytes) : bytes_(align_up(bytes, kPage)) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
    void* made = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (made == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<std::byte*>(made);
  }
  ~Pages() { munmap(begin_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::byte* begin() const { return begin_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::byte* begin_;
  uint64_t bytes_;
};

// What the ranks of one host share. The caller keeps the descriptors.
struct Share {
  std::vector<uint32_t> hosts;  // [R] host of each rank
  int segment = -1;             // holds a region per rank of this host; -1: the rank is alone on its host
  std::vector<int> bells;       // eventfd of each rank of this host

  std::vector<uint32_t> ranks_of(uint32_t rank) const;  // of the same host, ascending
  static Share alone(uint32_t num_ranks);
};

// The regions of `ranks` ranks of one host, each followed by its inbox. They are a whole number of rows
// apart, so that one tensor can show all rows.
shm::Regions host_regions(const Geometry& geometry, uint32_t ranks);

// A rank's region with its inbox, the regions of the other ranks of its host, and its outbox with the
// records. If rows are in device memory, region and outbox end before the rows.
class FabricMemory {
 public:
  // device: memory of the caller, of group.layout.device_in() and device_out() bytes; or empty. Throws
  // std::system_error, std::bad_alloc, or std::invalid_argument if share or device do not fit the group.
  FabricMemory(const Group& group, const Share& share, const DeviceMemory& device);

  std::byte* region(uint32_t rank) const { return regions_[rank]; }  // of a rank of this host
  Memory inbound() const { return {regions_[rank_], inbound_bytes_}; }
  Memory outbound() const { return {outbound_.begin(), outbound_.bytes()}; }
  const DeviceMemory& device() const { return device_; }
  uint64_t region_bytes() const {
    return region_bytes_;
  }  // from its begin to the inbox; as long as the outbox
  std::byte* inbox() const { return regions_[rank_] + region_bytes_; }
  std::byte* records() const { return outbound_.begin() + region_bytes_; }

 private:
  const uint32_t rank_;
  const DeviceMemory device_;
  const uint64_t region_bytes_, inbound_bytes_;
  Pages outbound_;
  std::optional<Pages> alone_;
  std::optional<shm::Segment> segment_;
  std::array<std::byte*, kMaxRanks> regions_{};
};

// The eventfds on which the ranks of one host sleep. Throws std::system_error.
class Bells {
 public:
  Bells(uint32_t rank, const Share& share);
  ~Bells();
  Bells(const Bells&) = delete;
  Bells& operator=(const Bells&) = delete;

  int own() const { return bells_[rank_]; }
  void ring(uint32_t rank) const;

 private:
  const uint32_t rank_;
  std::array<int, kMaxRanks> bells_;
};

void ring_bell(int fd);

}  // namespace ep::fabric

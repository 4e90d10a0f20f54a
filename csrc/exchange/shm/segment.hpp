// Memory of a group on one host: one anonymous segment, which ranks open by an inherited or passed
// descriptor. It has no name, so nothing is left behind, however the processes end.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "exchange/common/layout.hpp"

namespace ep::shm {

// What a segment holds behind its first page. pitch: bytes from one region to the next, whole pages.
struct Regions {
  uint32_t count;
  uint64_t pitch;

  uint64_t bytes() const { return kPage + count * pitch; }
};

// The regions of a group whose ranks are all on one host.
inline Regions whole_group(const Geometry& geometry) {
  return {geometry.num_ranks, Layout::of(geometry).total};
}

// Creates the segment with all its pages and writes the group page. Returns the descriptor, close-on-exec.
// Throws std::system_error; ENOSPC and ENOMEM mean that the host has not enough memory.
int create(const Geometry& geometry, const Regions& regions);

// A mapped segment. The memory stays mapped until the last owner of this object is gone.
class Segment {
 public:
  // The descriptor stays the caller's. Throws std::system_error, std::invalid_argument if it is not a
  // segment.
  explicit Segment(int fd);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const GroupPage& page() const { return *reinterpret_cast<const GroupPage*>(base_); }
  // number: index among the ranks of this host.
  std::byte* region(uint32_t number) const { return base_ + kPage + number * page().pitch; }
  const std::byte* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  uint64_t bytes_;
};

// Ends every wait of the group for all ranks but `lost`, which has ended: they report that it is lost. Called
// by a process that is not in the group.
void abort_without(const Segment& segment, uint32_t lost, uint32_t generation);

// A thread that stamps a region's heartbeat word every 100 ms. It stops when the process is stopped or dead,
// and continues while the process computes.
class Heartbeat {
 public:
  // memory: the mapping that contains the region.
  Heartbeat(std::shared_ptr<void> memory, std::byte* region);
  ~Heartbeat();

 private:
  std::shared_ptr<void> memory_;
  std::mutex mutex_;
  std::condition_variable stop_asked_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace ep::shm

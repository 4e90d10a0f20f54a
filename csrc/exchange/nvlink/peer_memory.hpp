// GPU memory that other GPUs of the host write. It is physical memory whose descriptor is passed over a Unix
// socket. Every importer holds a reference, so the death of the owner unmaps nothing in other processes. It
// needs no NVSHMEM, NIC, multicast or privileges. The driver is reached through the runtime and not linked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace ep::nvlink {

class Region {
 public:
  // Allocates at least `bytes` on `device`, zeroed. Throws std::runtime_error saying what is missing.
  static std::unique_ptr<Region> create(int device, uint64_t bytes);
  // Maps a peer's region so that `device` can write it. The caller keeps the descriptor.
  static std::unique_ptr<Region> import(int device, uint64_t bytes, int fd);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  int export_fd() const;  // a new descriptor; the caller closes it
  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  uint64_t bytes() const { return bytes_; }

 private:
  Region() = default;
  void map(int device);

  unsigned long long handle_ = 0, address_ = 0;
  uint64_t bytes_ = 0;
  bool mapped_ = false;
};

}  // namespace ep::nvlink

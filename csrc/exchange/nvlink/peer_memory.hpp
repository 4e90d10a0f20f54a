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
  // Allocates at least `bytes` on `device`, zeroed within `seconds`. Throws std::runtime_error saying what is
  // missing.
  static std::unique_ptr<Region> create(int device, uint64_t bytes, double seconds);
  // Keeps addresses for a peer's region, which attach() maps. Kernels that hold them stay valid whatever
  // memory is there.
  static std::unique_ptr<Region> reserve(int device, uint64_t bytes);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // Maps a peer's memory so that `device` can write it, in place of any mapped before. No kernel may use the
  // region. The caller keeps the descriptor.
  void attach(int device, int fd);
  int export_fd() const;  // a new descriptor; the caller closes it
  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  uint64_t bytes() const { return bytes_; }

 private:
  Region() = default;
  void reserve_addresses();
  void map(int device);
  void unmap();

  unsigned long long handle_ = 0, address_ = 0;
  uint64_t bytes_ = 0;
  bool mapped_ = false;
};

}  // namespace ep::nvlink

// Memory of one process that a network card may read and write.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

#include "ep/layout.hpp"

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

}  // namespace ep::fabric

// Creates and maps segments, and keeps the heartbeat.
#include "exchange/shm/segment.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "exchange/common/cells.hpp"

namespace ep::shm {
namespace {

constexpr auto kBeat = std::chrono::milliseconds(100);

[[noreturn]] void raise_errno(int error, const char* what) {
  throw std::system_error(error, std::generic_category(), what);
}

std::byte* map(int fd, uint64_t bytes) {
  // Enters the pages into this process's tables now, not one by one during the first operations.
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (base == MAP_FAILED) raise_errno(errno, "mmap");
  return static_cast<std::byte*>(base);
}

}  // namespace

int create(const Geometry& geometry, const Regions& regions) {
  const uint64_t bytes = regions.bytes();
  const int fd = memfd_create("ep_server_exchange", MFD_CLOEXEC);
  if (fd < 0) raise_errno(errno, "memfd_create");
  // Allocates all pages now. Running out of memory is an error here, not a bus error during an operation.
  const int error = ftruncate(fd, off_t(bytes)) != 0 ? errno : posix_fallocate(fd, 0, off_t(bytes));
  if (error != 0) {
    close(fd);
    raise_errno(error, "fallocate");
  }
  const GroupPage page{GroupPage::kMagic, GroupPage::kVersion, regions.count, regions.pitch, geometry};
  if (pwrite(fd, &page, sizeof page, 0) != ssize_t(sizeof page)) {
    const int failed = errno;
    close(fd);
    raise_errno(failed, "pwrite");
  }
  return fd;
}

Segment::Segment(int fd) {
  struct stat info{};
  if (fstat(fd, &info) != 0) raise_errno(errno, "fstat");
  GroupPage page{};
  if (pread(fd, &page, sizeof page, 0) != ssize_t(sizeof page) || page.magic != GroupPage::kMagic ||
      page.version != GroupPage::kVersion)
    throw std::invalid_argument("the descriptor is not an exchange segment of this version");
  const Regions regions{page.regions, page.pitch};
  bytes_ = regions.bytes();
  if (uint64_t(info.st_size) != bytes_ || regions.pitch < Layout::of(page.geometry).total)
    throw std::invalid_argument("the exchange segment has an unexpected size");
  base_ = map(fd, bytes_);
}

Segment::~Segment() { munmap(base_, bytes_); }

void abort_without(const Segment& segment, uint32_t lost, uint32_t generation) {
  for (uint32_t rank = 0; rank < segment.page().regions; ++rank)
    if (rank != lost) report_lost(segment.region(rank), lost, generation);
}

Heartbeat::Heartbeat(std::shared_ptr<void> memory, std::byte* region) : memory_(std::move(memory)) {
  cell_at(region, Head::kHeartbeat).store(now_ns(), std::memory_order_relaxed);
  // The process's own threads handle signals.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this, region] {
    std::unique_lock lock(mutex_);
    while (!stop_asked_.wait_for(lock, kBeat, [this] { return stop_; }))
      cell_at(region, Head::kHeartbeat).store(now_ns(), std::memory_order_relaxed);
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Heartbeat::~Heartbeat() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_asked_.notify_all();
  thread_.join();
}

}  // namespace ep::shm

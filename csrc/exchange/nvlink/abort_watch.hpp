// Carries an abort from host memory to a GPU: a thread that sleeps until the group in host memory is aborted.
#pragma once

#include <linux/futex.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>

#include "exchange/common/layout.hpp"

namespace ep::cuda {

// Kernels cannot sleep on host memory, and polling it would cost every wait a read over PCIe. They poll their
// own GPU's memory, which on_abort() writes.
class AbortWatch {
 public:
  // head: of this rank's region in host memory, which must outlive the object.
  AbortWatch(std::byte* head, std::function<void(const AbortWatch&)> on_abort)
      : head_(head), on_abort_(std::move(on_abort)) {
    sigset_t all, before;  // the process's own threads handle signals
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~AbortWatch() {
    stop_ = true;
    syscall(SYS_futex, word(), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    thread_.join();
  }
  AbortWatch(const AbortWatch&) = delete;
  AbortWatch& operator=(const AbortWatch&) = delete;

  // Whether the group is aborted in the generation that this rank is in, or in a later one.
  bool aborted() const { return is_abort(seen()); }

 private:
  // abort_at() of cells.cpp wakes it. A wake can be missed between a look and the sleep that follows, or a
  // reset can undo what on_abort() did, so it looks again now and then.
  static constexpr timespec kAgain{0, 50'000'000};

  void run() {
    while (!stop_) {
      const uint32_t now = seen();
      if (is_abort(now)) on_abort_(*this);
      syscall(SYS_futex, word(), FUTEX_WAIT, now, &kAgain, nullptr, 0);
    }
  }
  // The low half of the cell, which holds the generation that was aborted.
  uint32_t* word() const { return reinterpret_cast<uint32_t*>(head_ + Head::kAbort); }
  uint32_t seen() const { return std::atomic_ref<uint32_t>(*word()).load(std::memory_order_acquire); }
  bool is_abort(uint32_t epoch) const {
    auto& identity = *reinterpret_cast<uint64_t*>(head_ + Head::kIdentity);
    const auto generation = uint32_t(std::atomic_ref<uint64_t>(identity).load(std::memory_order_acquire));
    return int32_t(epoch - generation) > 0;  // a later one too: see ends() of cells.cpp
  }

  std::byte* head_;
  std::function<void(const AbortWatch&)> on_abort_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace ep::cuda

// The command queue in front of the sender: 16-byte entries, several producers, one consumer at a time.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "exchange/common/carrier.hpp"

namespace ep::fabric {

class CommandQueue {
 public:
  // False if it is full.
  bool push(const Command& command) {
    while (producing_.test_and_set(std::memory_order_acquire)) {
    }
    const uint64_t head = head_.load(std::memory_order_relaxed);
    const bool room = head - tail_.load(std::memory_order_acquire) < kEntries;
    if (room) {
      entries_[head % kEntries] = command;
      head_.store(head + 1, std::memory_order_release);
    }
    producing_.clear(std::memory_order_release);
    return room;
  }

  // False if it is empty.
  bool pop(Command& command) {
    const uint64_t tail = tail_.load(std::memory_order_relaxed);
    if (tail == head_.load(std::memory_order_acquire)) return false;
    command = entries_[tail % kEntries];
    tail_.store(tail + 1, std::memory_order_release);
    return true;
  }

  bool empty() const {
    return tail_.load(std::memory_order_acquire) == head_.load(std::memory_order_acquire);
  }

 private:
  static constexpr uint64_t kEntries = 4096;
  std::array<Command, kEntries> entries_;
  alignas(64) std::atomic<uint64_t> head_{0};
  alignas(64) std::atomic<uint64_t> tail_{0};
  std::atomic_flag producing_;
};

}  // namespace ep::fabric

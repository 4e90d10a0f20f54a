// Emulates properties of production networks that TCP lacks. It is part of the library so that tests can
// enable it. Writes overtake each other. Completions arrive late and in any order. Messages take a while to
// arrive. Memory is addressed by the peer's virtual address and a key that the provider chose. Only
// registered memory may be sent from.
#pragma once

#include <cstdint>
#include <deque>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace ep::fabric {

// Holds items back and returns them in another order. All of them are returned in the end.
template <class T>
class Disorder {
 public:
  explicit Disorder(uint64_t seed) : random_(seed) {}

  void hold(const T& item) { held_.push_back(item); }
  size_t size() const { return held_.size(); }

  // Takes one held item. It may return nothing although items are held; the longer the queue, the less often.
  bool take(T& item) {
    if (held_.empty() || random_() % (held_.size() + 1) == 0) return false;
    std::swap(held_[random_() % held_.size()], held_.back());
    item = held_.back();
    held_.pop_back();
    return true;
  }

 private:
  std::mt19937_64 random_;
  std::vector<T> held_;
};

// Returns items in order, each `delay_ns` after it was held: the latency of a longer line, at its far end.
// The sender never waits, and any number of items may be on their way.
template <class T>
class DelayLine {
 public:
  explicit DelayLine(uint64_t delay_ns) : delay_ns_(delay_ns) {}

  bool delays() const { return delay_ns_ != 0; }
  void hold(const T& item, uint64_t now) { held_.push_back({item, now + delay_ns_}); }

  bool take(T& item, uint64_t now) {
    if (left(now) != 0) return false;
    item = held_.front().item;
    held_.pop_front();
    return true;
  }

  // Until take() returns an item; kNothingHeld if none is held.
  static constexpr uint64_t kNothingHeld = ~0ull;
  uint64_t left(uint64_t now) const {
    if (held_.empty()) return kNothingHeld;
    const uint64_t due = held_.front().due;
    return due > now ? due - now : 0;
  }

 private:
  struct Held {
    T item;
    uint64_t due;
  };

  const uint64_t delay_ns_;
  std::deque<Held> held_;
};

// Emulates the memory management of a NIC on a provider without one. `base` and `key` are made up, and a
// write that does not use exactly these is refused.
struct StrictMemory {
  uint64_t base, bytes, key;

  // Why a write to it is invalid, or "".
  std::string refuse(uint64_t address, uint64_t length, uint64_t given_key) const {
    if (given_key != key) return "key " + std::to_string(given_key) + " is not the peer's";
    if (address < base || address + length > base + bytes)
      return "address " + std::to_string(address) + " is not in the peer's memory";
    return {};
  }
};

}  // namespace ep::fabric

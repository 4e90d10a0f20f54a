// Emulates properties of production networks that TCP lacks. It is part of the library so that tests can
// enable it. Writes overtake each other. Completions arrive late and in any order. Messages take a while to
// arrive. Memory is addressed by the peer's virtual address and a key that the provider chose. Only
// registered memory may be sent from.
#pragma once

#include <algorithm>
#include <cstddef>
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

// The completion data of a write: its immediate, and while a delay is emulated, when it was sent. The second
// half stays 0 otherwise, so providers that carry only 4 bytes will do.
struct CompletionData {
  uint32_t immediate;
  uint32_t sent;  // a SendTime, or 0

  static constexpr size_t bytes(bool stamped) { return stamped ? sizeof(uint64_t) : sizeof(uint32_t); }
  uint64_t encode() const { return uint64_t(sent) << 32 | immediate; }
  static CompletionData decode(uint64_t data) { return {uint32_t(data), uint32_t(data >> 32)}; }
};

// The time of sending in 32 bits: CLOCK_MONOTONIC in units of 1,024 ns, which wraps after 73 minutes. Network
// namespaces share that clock, different machines do not.
struct SendTime {
  static constexpr uint32_t kUnitBits = 10;

  // Rounded up, so that no message seems older than it is. Never 0.
  static uint32_t encode(uint64_t now) {
    const auto units = uint32_t((now + (1u << kUnitBits) - 1) >> kUnitBits);
    return units != 0 ? units : 1;
  }
  // The time nearest to `now` with this encoding, ns.
  static int64_t decode(uint32_t sent, uint64_t now) {
    const auto units = int64_t(now >> kUnitBits);
    return (units + int32_t(sent - uint32_t(units))) << kUnitBits;
  }
};

// Returns each item `delay_ns` after it was sent: the latency of a longer line, at its far end. The sender
// never waits, and any number of items may be on their way. Items of one sender stay in order.
//
// The wait is bounded whatever the clocks say: an item is never returned before it was held, and never held
// longer than `delay_ns`.
template <class T>
class DelayLine {
 public:
  explicit DelayLine(uint64_t delay_ns) : delay_ns_(int64_t(delay_ns)) {}

  bool delays() const { return delay_ns_ != 0; }

  // Whether this is a time of sending by the same clock, as far as can be seen.
  bool can_date(uint32_t sent, uint64_t now) const {
    return sent != 0 && SendTime::decode(sent, now) <= int64_t(now) + (1 << SendTime::kUnitBits);
  }

  // now: of the moment when the item was found.
  void hold(const T& item, uint32_t sent, uint64_t now) {
    const auto arrived = int64_t(now);
    const int64_t due = SendTime::decode(sent, now) + delay_ns_;
    const Held held{item, uint64_t(std::clamp(due, arrived, arrived + delay_ns_))};
    const auto later = [](const Held& a, const Held& b) { return a.due < b.due; };
    held_.insert(std::upper_bound(held_.begin(), held_.end(), held, later), held);
  }

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

  const int64_t delay_ns_;
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

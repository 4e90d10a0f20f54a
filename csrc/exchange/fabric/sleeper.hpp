// Puts a thread to sleep until its bell rings or the network has something to read.
#pragma once

#include <cstdint>

namespace ep::fabric {

constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kPollNs = 50'000;    // between two looks at a provider that cannot be slept on
constexpr uint64_t kRetryNs = 1 * kMs;  // something is queued and the provider takes nothing now

// One thread's; ring_bell(bell()) from any other ends its sleep.
class Sleeper {
 public:
  // bell: an eventfd, the caller's.
  explicit Sleeper(int bell) : bell_(bell) {}

  int bell() const { return bell_; }

  // At most `ns`. network: the provider's descriptor, -1 = it has none: then looks now and then instead.
  void nap(uint64_t ns, int network);
  // At most `ns`, whatever comes from the network.
  void nap(uint64_t ns) { wait(ns, -1); }
  // The network had something: its descriptor may be trusted again.
  void moved() { idle_wakes_ = 0; }

 private:
  void wait(uint64_t ns, int network);

  const int bell_;
  uint32_t idle_wakes_ = 0;  // in a row, with nothing to take in
};

}  // namespace ep::fabric

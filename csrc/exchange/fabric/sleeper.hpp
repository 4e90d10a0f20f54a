// Puts a thread to sleep until its bell rings or the network has something to read.
#pragma once

#include <cstdint>

namespace ep::fabric {

constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kPollNs = 50'000;    // polling interval for a provider without a usable descriptor
constexpr uint64_t kRetryNs = 1 * kMs;  // retry interval while the provider accepts no more writes

// Used by one thread. Any other thread ends its sleep with ring_bell(bell()).
class Sleeper {
 public:
  // bell: an eventfd, owned by the caller.
  explicit Sleeper(int bell) : bell_(bell) {}

  int bell() const { return bell_; }

  // Sleeps at most `ns`. network: the provider's descriptor; -1 = it has none, so the network is polled
  // instead.
  void nap(uint64_t ns, int network);
  // Sleeps at most `ns`, and ignores the network.
  void nap(uint64_t ns) { wait(ns, -1); }
  // Something arrived, so the descriptor may be trusted again.
  void moved() { idle_wakes_ = 0; }

 private:
  void wait(uint64_t ns, int network);

  const int bell_;
  uint32_t idle_wakes_ = 0;  // in a row, with nothing to read
};

}  // namespace ep::fabric

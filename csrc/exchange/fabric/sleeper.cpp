// Sleeps in poll(2) on a bell and the network.
#include "exchange/fabric/sleeper.hpp"

#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace ep::fabric {
namespace {

constexpr uint32_t kIdleWakes = 3;  // in a row; after that, the provider's descriptor is not trusted
constexpr uint32_t kMostDoublings = 4;

}  // namespace

void Sleeper::nap(uint64_t ns, int network) {
  // Some providers leave their descriptor readable, or in error, with nothing to read. Poll these less and
  // less often instead.
  if (network < 0 || idle_wakes_ > kIdleWakes) {
    const uint32_t doublings = std::min(idle_wakes_ - std::min(idle_wakes_, kIdleWakes), kMostDoublings);
    ns = std::min(ns, kPollNs << doublings);
    network = -1;
    ++idle_wakes_;
  }
  wait(ns, network);
}

void Sleeper::wait(uint64_t ns, int network) {
  pollfd waited[] = {{bell_, POLLIN, 0}, {network, POLLIN, 0}};
  const timespec timeout{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
  if (ppoll(waited, network < 0 ? 1 : 2, &timeout, nullptr) <= 0) return;
  if (waited[1].revents != 0) ++idle_wakes_;  // also POLLERR and POLLHUP, which poll(2) reports unasked
  uint64_t rings;
  if ((waited[0].revents & POLLIN) != 0 && read(bell_, &rings, sizeof rings) < 0) return;
}

}  // namespace ep::fabric

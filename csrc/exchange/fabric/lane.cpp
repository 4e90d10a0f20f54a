// Posts one write after the other, and polls for those of the peer.
#include "exchange/fabric/lane.hpp"

#include <poll.h>

#include <iterator>
#include <stdexcept>
#include <string>

#include "exchange/common/cells.hpp"

namespace ep::fabric {
namespace {

constexpr uint32_t kWaiting = 64;
constexpr int kSleepMs = 1;

}  // namespace

Lane::Lane(const Options& options, uint64_t bytes)
    : library_(options),
      memory_(bytes),
      endpoint_(
          library_, options,
          {.inbound = memory(), .outbound = memory(), .device = {}, .peers = 1, .max_arrivals = kWaiting}) {}

void Lane::write(uint64_t at, uint64_t bytes, uint32_t number, uint64_t timeout_ns) {
  if (at > memory_.bytes() || bytes > memory_.bytes() - at)
    throw std::out_of_range("bytes " + std::to_string(at) + " and on: the memory has " +
                            std::to_string(memory_.bytes()));
  const uint64_t deadline = now_ns() + timeout_ns;
  const auto wait = [&] {
    if (now_ns() > deadline) throw FabricError(endpoint_.description() + ": a write took too long");
    look();
  };
  const Write write{memory_.begin() + at, bytes, at, number, 0, false, false};
  Endpoint::Posted posted;
  while ((posted = endpoint_.write(0, write)) == Endpoint::Posted::kAgain) wait();
  if (posted == Endpoint::Posted::kFailed)
    throw FabricError(endpoint_.description() + ": a write failed: " + library_.reason(endpoint_.error()));
  while (endpoint_.in_flight() != 0) wait();
}

bool Lane::await(uint32_t number, uint64_t timeout_ns) {
  const uint64_t deadline = now_ns() + timeout_ns;
  while (arrived_.erase(number) == 0) {
    if (now_ns() > deadline) return false;
    look();
  }
  return true;
}

// Where nothing happens it sleeps, but only a little: some providers make progress only while they are
// polled.
void Lane::look() {
  Event events[16];
  const size_t count = endpoint_.poll(events, std::size(events));
  for (size_t i = 0; i < count; ++i) {
    if (events[i].kind == Event::Kind::kFailed)
      throw FabricError(endpoint_.description() + ": " + library_.reason(events[i].error));
    if (events[i].kind == Event::Kind::kArrived) arrived_.insert(events[i].immediate);
  }
  if (count != 0 || endpoint_.wait_fd() < 0 || !endpoint_.ready_to_sleep()) return;
  pollfd waited{endpoint_.wait_fd(), POLLIN, 0};
  poll(&waited, 1, kSleepMs);
}

}  // namespace ep::fabric

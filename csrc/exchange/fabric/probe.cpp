// Latency and bandwidth loops over one endpoint.
#include "exchange/fabric/probe.hpp"

#include <iterator>
#include <string>

#include "exchange/common/cells.hpp"

namespace ep::fabric {

constexpr uint32_t kWaiting = 4096;

Probe::Probe(const Options& options, uint64_t bytes)
    : library_(options),
      inbound_(bytes),
      outbound_(bytes),
      endpoint_(library_, options,
                {.inbound = {inbound_.begin(), inbound_.bytes()},
                 .outbound = {outbound_.begin(), outbound_.bytes()},
                 .device = {},
                 .peers = 1,
                 .max_arrivals = kWaiting}) {}

std::vector<uint64_t> Probe::latency(uint64_t bytes, uint32_t rounds, bool first, uint64_t timeout_ns) {
  std::vector<uint64_t> times(rounds);
  deadline_ = now_ns() + timeout_ns;
  for (uint32_t i = 0; i < rounds; ++i) {
    const uint64_t start = now_ns();
    if (first) put(bytes, i, 1);
    await(1);
    if (!first) put(bytes, i, 1);
    times[i] = (now_ns() - start) / 2;
  }
  return times;
}

uint64_t Probe::stream(uint64_t bytes, uint32_t writes, uint32_t window, bool first, uint64_t timeout_ns) {
  const uint64_t start = now_ns();
  deadline_ = start + timeout_ns;
  for (uint32_t i = 0; first && i < writes; ++i) put(bytes, i, window);
  await(first ? 1 : writes);
  if (!first) put(1, 0, window);
  const uint64_t took = now_ns() - start;
  while (endpoint_.in_flight() != 0) look();
  return took;
}

void Probe::put(uint64_t bytes, uint32_t number, uint32_t window) {
  while (endpoint_.in_flight() >= window) look();
  const Write write{outbound_.begin(), bytes, 0, number, 0, false, false};
  Endpoint::Posted posted;
  while ((posted = endpoint_.write(0, write)) == Endpoint::Posted::kAgain) look();
  if (posted == Endpoint::Posted::kFailed)
    throw FabricError(endpoint_.description() + ": a write failed: " + library_.reason(endpoint_.error()));
}

void Probe::await(uint64_t arrivals) {
  awaited_ += arrivals;
  while (arrived_ < awaited_) look();
}

void Probe::look() {
  Event events[16];
  const size_t count = endpoint_.poll(events, std::size(events));
  for (size_t i = 0; i < count; ++i) {
    if (events[i].kind == Event::Kind::kFailed)
      throw FabricError(endpoint_.description() + ": " + library_.reason(events[i].error));
    if (events[i].kind == Event::Kind::kArrived) ++arrived_;
  }
  if (count == 0 && now_ns() > deadline_) throw FabricError(endpoint_.description() + ": the peer is silent");
}

}  // namespace ep::fabric

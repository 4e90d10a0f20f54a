// Publishes who waits for whom, and follows the chain of waits to its end.
#include "exchange/common/wait_attribution.hpp"

#include <algorithm>
#include <atomic>
#include <bit>

#include "exchange/common/group.hpp"

namespace ep {
namespace {

constexpr uint64_t kBeatNs = 100'000'000;
constexpr uint64_t kQuietNs = 5 * kBeatNs;  // a peer without a heartbeat for this long is quiet

constexpr uint32_t kWaitsForYou = 1u << 8;  // above a rank + 1

template <class T>
std::atomic_ref<T> word(const T& value) {
  return std::atomic_ref<T>(const_cast<T&>(value));
}

template <class T>
T load(const T& value) {
  return word(value).load(std::memory_order_relaxed);
}

template <class T>
void store(T& value, T what) {
  word(value).store(what, std::memory_order_relaxed);
}

Pulse& own(const Group& group) { return *reinterpret_cast<Pulse*>(group.own() + Head::kHeartbeat); }

}  // namespace

uint64_t last_beat(const Group& group, uint32_t peer) { return load(group.pulses[peer]->beat); }

bool quiet(const Group& group, uint32_t peer, uint64_t now) {
  const uint64_t bearable = std::max(std::min(kQuietNs, group.timing.timeout_ns / 2), 2 * kBeatNs);
  return peer != group.rank && last_beat(group, peer) + bearable < now;
}

uint32_t behind(const Group& group, uint32_t peer, uint64_t now) {
  if (quiet(group, peer, now)) return peer;
  const Pulse& pulse = *group.pulses[peer];
  const uint32_t by = load(pulse.held_up_by);
  const bool lost = load(pulse.waits_for) >> group.rank & 1;
  if (lost || by == 0 || by > group.geometry.num_ranks || by - 1 == group.rank) return peer;
  return group.unmasked() >> (by - 1) & 1 ? by - 1 : peer;
}

uint32_t root(const Group& group, uint64_t peers, uint64_t now) {
  for (uint64_t left = peers; left != 0; left &= left - 1)
    if (quiet(group, std::countr_zero(left), now)) return std::countr_zero(left);
  for (uint64_t left = peers; left != 0; left &= left - 1)
    if (load(group.pulses[std::countr_zero(left)]->held_up_by) == 0) return std::countr_zero(left);
  return behind(group, std::countr_zero(peers), now);
}

void publish_wait(Group& group, uint64_t peers, uint64_t now) {
  Pulse& pulse = own(group);
  store(pulse.waits_for, peers);
  store(pulse.held_up_by, peers == 0 ? 0 : root(group, peers, now) + 1);
}

uint32_t encode_pulse(const Group& group, uint32_t peer) {
  const Pulse& pulse = own(group);
  return load(pulse.held_up_by) | (load(pulse.waits_for) >> peer & 1 ? kWaitsForYou : 0);
}

void decode_pulse(const Group& group, uint32_t value, Pulse& pulse) {
  store(pulse.waits_for, (value & kWaitsForYou) != 0 ? uint64_t(1) << group.rank : 0);
  store(pulse.held_up_by, value % kWaitsForYou);
}

}  // namespace ep

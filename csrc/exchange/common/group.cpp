// Epochs and banks of a group, its votes, and what its regions hold.
#include "exchange/common/group.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <utility>

#include "exchange/common/cells.hpp"

namespace ep {

namespace {
uint32_t count_owned(const Geometry& geometry, uint32_t rank, const int32_t* placement) {
  return uint32_t(std::count(placement, placement + geometry.num_experts, int32_t(rank)));
}

uint64_t new_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}
}  // namespace

Group::Group(const Geometry& g, uint32_t rank_, const int32_t* placement, const Timing& t)
    : id(new_id()),
      geometry(g),
      layout(Layout::of(g)),
      rank(rank_),
      readable(1ull << rank_),
      owner(placement, placement + g.num_experts),
      local_index(g.num_experts, -1),
      local_experts(count_owned(g, rank_, placement)),
      timing(t),
      statistics(local_experts) {
  for (uint32_t r = 0; r < g.num_ranks; ++r) gateways[r] = uint8_t(r);
  int32_t next = 0;
  for (uint32_t e = 0; e < g.num_experts; ++e)
    if (owner[e] == int32_t(rank)) local_index[e] = next++;
}

void Group::add_local(uint32_t peer, std::byte* region) {
  regions[peer] = region;
  places[peer] = rank;
  pulses[peer] = reinterpret_cast<const Pulse*>(region + Head::kHeartbeat);
}

void Group::add_remote(uint32_t peer, std::byte* outbox, const Pulse* pulse) {
  regions[peer] = outbox;
  places[peer] = peer;
  pulses[peer] = pulse;
  remote |= 1ull << peer;
}

void Group::share_rows(const std::vector<uint32_t>& hosts) {
  for (uint32_t r = 0; r < geometry.num_ranks; ++r) {
    mates[r] = 0;
    for (uint32_t other = 0; other < geometry.num_ranks; ++other)
      if (hosts[other] == hosts[r]) mates[r] |= 1ull << other;
    // Neighbours use different gateways. So do hosts that have one rank each.
    turns[r] = hosts[r] + uint32_t(std::popcount(mates[r] & ((1ull << r) - 1)));
  }
  readable = mates[rank];
  const std::byte* first = readable_regions().first;
  for (uint64_t left = readable; left != 0; left &= left - 1) {
    const uint32_t mate = std::countr_zero(left);
    first_rows[mate] = (regions[mate] - first) / int64_t(layout.row_pitch);
  }
  choose_gateways();
}

void Group::choose_gateways() {
  for (uint32_t source = 0; source < geometry.num_ranks; ++source)
    gateways[source] = uint8_t(is_remote(source) ? gateway(source, readable & unmasked()) : source);
}

std::pair<std::byte*, std::byte*> Group::readable_regions() const {
  return {regions[std::countr_zero(readable)], regions[63 - std::countl_zero(readable)]};
}

namespace {

// Waits until no write to `peers` from this bank of the outbox is in flight. The peers may have read the last
// rows while the network still holds the buffer. `late`: the status to return at the deadline.
Status await_lease(Group& group, Op op, uint32_t bank, uint64_t peers, Status late) {
  const uint64_t start = now_ns();
  for (;;) {
    const uint64_t busy = group.carrier->leased(op, bank) & peers & group.unmasked();
    if (busy == 0) return {};
    late.peer = uint32_t(std::countr_zero(busy));
    if (now_ns() - start >= group.timing.timeout_ns) return late;
    if (late.op != Op::kReset)
      if (Status failed = aborted(group)) return failed;
    group.carrier->drive();
    sched_yield();
  }
}

// Waits until all writes of the old generation have completed, so none arrives during the new one.
Status await_leases(Group& group, uint64_t peers, uint32_t generation) {
  const Status late{Code::kTimeout, Op::kReset, Phase::kJoin, group.rank, 0, generation, generation - 1};
  for (Op op : {Op::kDispatch, Op::kCombine, Op::kVote})
    for (uint32_t bank = 0; bank < kMaxBanks; ++bank)
      if (Status failed = await_lease(group, op, bank, peers, late)) return failed;
  return {};
}

// The newest epoch that any rank has written into this rank's region, or `epoch` if that is newer.
uint64_t newest_written(const Group& group, uint64_t epoch) {
  uint32_t newest = uint32_t(epoch);
  const auto look = [&](uint64_t offset) {
    const uint32_t seen = cell_epoch(load_cell(group.own(), offset));
    if (seen != 0 && (newest == 0 || int32_t(seen - newest) > 0)) newest = seen;  // 0: nothing was written
  };
  for (uint32_t peer = 0; peer < group.geometry.num_ranks; ++peer) {
    for (Op op : {Op::kDispatch, Op::kCombine})
      for (uint32_t bank = 0; bank < group.geometry.num_banks; ++bank) look(Head::header(op, bank, peer));
    for (uint32_t bank = 0; bank < kVoteBanks; ++bank) look(Head::vote(bank, peer));
  }
  return epoch + uint32_t(newest - uint32_t(epoch));
}

}  // namespace

Status open_bank(Group& group, Op op, bool many) {
  Banks& banks = group.of(op);
  const uint64_t epoch = banks.next();
  const uint32_t bank = group.bank_of(epoch), num_banks = group.geometry.num_banks;
  if (Status failed = aborted(group)) return failed;
  if (banks.busy(bank))
    return {Code::kHook,
            op,
            Phase::kSendBank,
            group.rank,
            group.rank,
            uint32_t(epoch),
            uint32_t(epoch - num_banks)};
  if (group.opened[uint32_t(op)] == epoch) return {};
  group.faults.at(op, Phase::kSendBank, epoch);
  if (epoch > banks.base() + num_banks) {  // else the bank was never used in this generation
    const Waited waited = wait_for(group, {.op = op,
                                           .phase = Phase::kSendBank,
                                           .first_cell = Head::consumed(op, 0),
                                           .stride = kLine,
                                           .peers = group.all(),
                                           .expected = uint32_t(epoch - num_banks),
                                           .at_least = true,
                                           .many = many});
    if (waited.status) return waited.status;
  }
  if (group.carrier != nullptr) {
    const Status late{Code::kTimeout, op, Phase::kSendBank, group.rank, 0, uint32_t(epoch), 0};
    const Status status = await_lease(group, op, bank, group.all(), late);
    if (status.code == Code::kTimeout) abort_group(group, status);
    if (status) return status;
  }
  group.opened[uint32_t(op)] = epoch;
  return {};
}

void consume(Group& group, Op op, uint64_t epoch) {
  group.faults.at(op, Phase::kRecvConsumed, epoch);
  const uint64_t read = group.of(op).finish(group.bank_of(epoch), group.geometry.num_banks);
  for_each_peer(group.unmasked(), group.rank, group.geometry.num_ranks, [&](uint32_t peer) {
    if (!group.faults.drops(op, Phase::kRecvConsumed, epoch, peer))
      publish(group, peer, {Notice::kConsumed, op}, uint32_t(read), 0);
  });
  if (group.carrier != nullptr) group.carrier->drive();
}

void publish_header(Group& group, Op op, uint64_t epoch, uint32_t peer, uint32_t payload, uint64_t readers) {
  const uint32_t bank = group.bank_of(epoch);
  for (uint64_t left = readers; left != 0; left &= left - 1)
    if (group.faults.drops(op, Phase::kSendHeader, epoch, uint32_t(std::countr_zero(left))))
      readers &= ~(left & -left);
  if (readers == 0) return;
  if (group.is_remote(peer)) {
    std::byte* cell = group.regions[peer] + Head::header(op, bank, group.places[peer]);
    std::memcpy(cell + sizeof(uint64_t), &readers, sizeof readers);
  }
  // After one pass over the banks, every peer has published an epoch of this generation and can predict the
  // next ones.
  const bool near = epoch > group.of(op).base() + group.geometry.num_banks;
  publish(group, peer, {Notice::kHeader, op, bank, near}, uint32_t(epoch), payload);
}

Status all_gather(Group& group, const void* record, uint32_t length, uint64_t limit_ns, std::byte* out,
                  uint32_t* lengths) {
  const uint64_t start = now_ns();
  if (Status failed = aborted(group)) return failed;
  const uint64_t epoch = ++group.vote_epoch;
  const uint32_t bank = uint32_t(epoch) % kVoteBanks;
  const uint64_t peers = group.unmasked();
  group.faults.at(Op::kVote, Phase::kSendHeader, epoch);
  for_each_peer(peers, group.rank, group.geometry.num_ranks, [&](uint32_t peer) {
    const uint64_t slot = Head::vote(bank, group.places[peer]);
    if (length != 0) std::memcpy(group.regions[peer] + slot + kLine, record, length);
    if (!group.faults.drops(Op::kVote, Phase::kSendHeader, epoch, peer))
      publish(group, peer, {.notice = Notice::kVote, .bank = bank}, uint32_t(epoch), length);
  });
  const uint64_t sent = now_ns();
  group.faults.at(Op::kVote, Phase::kGather, epoch);
  const Waited waited = wait_for(group, {.op = Op::kVote,
                                         .phase = Phase::kGather,
                                         .first_cell = Head::vote(bank, 0),
                                         .stride = Head::kVotePitch,
                                         .peers = peers,
                                         .expected = uint32_t(epoch),
                                         .by_liveness = limit_ns == 0,
                                         .limit_ns = limit_ns});
  if (waited.status) return waited.status;
  for (uint32_t peer = 0; peer < group.geometry.num_ranks; ++peer) {
    lengths[peer] = 0;
    if (!(waited.arrived >> peer & 1)) continue;
    const uint64_t slot = Head::vote(bank, peer);
    lengths[peer] = std::min(cell_payload(load_cell(group.own(), slot)), kVoteBytes);
    std::memcpy(out + uint64_t(peer) * kVoteBytes, group.own() + slot + kLine, lengths[peer]);
  }
  const uint64_t end = now_ns();
  group.statistics.time(Op::kVote, Part::kSend).record(sent - start);
  group.statistics.time(Op::kVote, Part::kWait).record(end - sent);
  group.statistics.time(Op::kVote, Part::kTotal).record(end - start);
  return {};
}

Status reset(Group& group, uint64_t dead, uint32_t generation) {
  if (generation == 0) generation = uint32_t(group.generation + 1);
  const uint32_t bank = generation % kVoteBanks;  // a rank may be one reset ahead, never two
  uint64_t epoch =
      std::max({group.of(Op::kDispatch).last(), group.of(Op::kCombine).last(), group.vote_epoch});
  // Another process may have been this rank before: if all ranks are new, nobody knows the last epoch.
  // Read once: if this call is repeated, others may have begun the new generation meanwhile.
  if (!std::exchange(group.was_reset, true)) epoch = group.vote_epoch = newest_written(group, epoch);
  const uint64_t peers = group.all() & ~dead;
  const uint64_t masked = group.masked.exchange(dead, std::memory_order_acq_rel);
  if (group.carrier != nullptr) {
    if (Status late = await_leases(group, peers, generation)) {
      group.masked.store(masked, std::memory_order_release);
      return late;
    }
  }
  for_each_peer(peers, group.rank, group.geometry.num_ranks, [&](uint32_t peer) {
    const uint64_t line = Head::join(bank, group.places[peer]);
    std::memcpy(group.regions[peer] + line + sizeof(uint64_t), &epoch, sizeof epoch);
    publish(group, peer, {.notice = Notice::kJoin, .bank = bank}, generation, 0);
  });
  const bool mask_on_timeout = std::exchange(group.timing.mask_on_timeout, false);
  const Waited waited = wait_for(group, {.op = Op::kReset,
                                         .phase = Phase::kJoin,
                                         .first_cell = Head::join(bank, 0),
                                         .stride = kLine,
                                         .peers = peers,
                                         .expected = generation,
                                         .forming = generation});
  group.timing.mask_on_timeout = mask_on_timeout;
  if (waited.status) {
    group.masked.store(masked, std::memory_order_release);
    return waited.status;
  }
  for (uint32_t peer = 0; peer < group.geometry.num_ranks; ++peer) {
    if (!(peers >> peer & 1)) continue;
    uint64_t theirs;
    std::memcpy(&theirs, group.own() + Head::join(bank, peer) + sizeof(uint64_t), sizeof theirs);
    epoch = std::max(epoch, theirs);
  }
  // Larger than every epoch of the old generation, so no old cell can match. A multiple of all bank counts.
  epoch = align_up(epoch + 2 * kMaxBanks, kMaxBanks);
  for (Banks& banks : group.banks) banks.reset(epoch);
  group.vote_epoch = epoch;
  group.choose_gateways();
  group.generation = generation;
  cell_at(group.own(), Head::kIdentity).store(group.generation, std::memory_order_release);
  return {};
}

}  // namespace ep

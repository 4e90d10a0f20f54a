// Turns queued commands into writes: rows, routing, completion records.
#include "exchange/fabric/outgoing.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

namespace ep::fabric {
namespace {

constexpr uint32_t kNumOps = 4;  // votes and resets too: their cells have leases like the others

Kind kind_of(Notice notice) {
  switch (notice) {
    case Notice::kRows:
      return Kind::kChunk;
    case Notice::kHeader:
      return Kind::kRecord;
    case Notice::kConsumed:
      return Kind::kConsumed;
    case Notice::kVote:
      return Kind::kVote;
    case Notice::kJoin:
      return Kind::kJoin;
    case Notice::kAbort:
      return Kind::kAbort;
  }
  return Kind::kAlive;
}

}  // namespace

Outgoing::Outgoing(Group& group, Endpoint& endpoint, const FabricMemory& memory)
    : group_(group),
      endpoint_(endpoint),
      memory_(memory),
      outbox_(memory.outbound().begin),
      records_(memory.records()),
      inbox_{group.geometry.num_ranks, group.geometry.num_banks},
      consumed_(group.geometry.num_banks),
      leases_(kNumOps * kMaxBanks * kMaxRanks),
      chunks_(kBankedOps * kMaxBanks * kMaxRanks) {
  for (uint32_t i = 0; i < kRecords; ++i) free_records_.push_back(kRecords - 1 - i);
}

uint64_t Outgoing::leased(Op op, uint32_t bank) const {
  uint64_t peers = 0;
  for (uint64_t left = group_.remote; left != 0; left &= left - 1) {
    const uint32_t peer = std::countr_zero(left);
    if (leases_[index(op, bank, peer)].load(std::memory_order_acquire) != 0) peers |= 1ull << peer;
  }
  return peers;
}

void Outgoing::enqueue(const Command& command, uint64_t now) {
  if (peers_[command.peer].forgotten) {
    count(command).fetch_sub(1, std::memory_order_release);
    return;
  }
  if (command.op() != Op::kReset) peers_[command.peer].last_op = command.op();
  if (command.notice == Notice::kConsumed &&
      consumed_.keep(command, last_epoch(command.op(), command.peer), now)) {
    count(command).fetch_sub(1, std::memory_order_release);
    return;
  }
  peers_[command.peer].queue.push_back({command, kind_of(command.notice)});
}

void Outgoing::send_consumed(uint64_t before) {
  for (const Command& command : consumed_.overdue(before)) {
    lease(command);
    peers_[command.peer].queue.push_back({command, Kind::kConsumed});
  }
}

void Outgoing::enqueue_signal(uint32_t peer, Kind kind, uint32_t value) {
  if (peers_[peer].forgotten) return;
  const Command command{Notice::kVote, uint8_t(uint32_t(Op::kReset) << 4), uint8_t(peer), 0, 0, 0, value};
  lease(command);
  peers_[peer].queue.push_back({command, kind});
}

uint64_t Outgoing::post(uint64_t now) {
  uint64_t refused = 0;
  for (uint64_t left = group_.remote; left != 0; left &= left - 1) {
    const uint32_t number = std::countr_zero(left);
    Peer& peer = peers_[number];
    while (!peer.queue.empty()) {
      const Result result = post_front(peer);
      if (result == Result::kDone) {
        peer.stuck_since = 0;
        continue;
      }
      if (result == Result::kFailed) refused |= 1ull << number;
      if (result == Result::kAgain && peer.stuck_since == 0) group_.statistics.traffic[number].retries.add(1);
      if (peer.stuck_since == 0) peer.stuck_since = now;
      break;
    }
  }
  return refused;
}

// Posts the first entry of a peer's queue and removes it.
Outgoing::Result Outgoing::post_front(Peer& peer) {
  Queued& next = peer.queue.front();
  const Command& c = next.command;
  Result result;
  if (next.kind == Kind::kChunk && ends(peer)) {
    const Command header = peer.queue[1].command;
    const Last last{header.epoch, header.first, chunks(c).count + 1};
    result =
        post_rows(next, {Kind::kLast, c.generation, group_.rank, uint32_t(c.op()), last.encode()}, false);
    if (result != Result::kDone) return result;
    told(header);
    done(peer);
  } else if (next.kind == Kind::kChunk) {
    result = post_rows(next, immediate(next), peer.queue.size() > 1);
  } else if (next.kind == Kind::kRecord && c.op() == Op::kDispatch) {
    result = post_routing(next);
  } else {
    result = post_record(next);
  }
  if (result == Result::kDone) done(peer);
  return result;
}

bool Outgoing::ends(const Peer& peer) {
  const Command& rows = peer.queue[0].command;
  if (rows.op() != Op::kCombine || peer.queue.size() < 2) return false;
  const Queued& next = peer.queue[1];
  const Command& header = next.command;
  const bool same = next.kind == Kind::kRecord && header.op() == rows.op() && header.epoch == rows.epoch &&
                    header.generation == rows.generation;
  return same && header.count != 0 && header.first <= 1 && chunks(rows).count < Last::kMaxChunks;
}

// Ends the lease of the first entry, which has been posted, and removes it.
void Outgoing::done(Peer& peer) {
  count(peer.queue.front().command).fetch_sub(1, std::memory_order_release);
  peer.queue.pop_front();
}

// The header of an operation has been posted. A dispatch header is for all ranks of the peer's host.
void Outgoing::told(const Command& c) {
  chunks(c) = {};
  uint64_t readers = c.op() == Op::kDispatch ? group_.mates[c.peer] : 1ull << c.peer;
  for (; readers != 0; readers &= readers - 1)
    last_epochs_[uint32_t(c.op())][std::countr_zero(readers)] = c.epoch;
}

Outgoing::Result Outgoing::post_rows(const Queued& queued, const Immediate& said, bool more) {
  Write wanted = rows(queued.command);
  wanted.immediate = said.encode();
  wanted.more = more;
  const Result result = write(queued, kNoRecord, wanted);
  if (result == Result::kDone) ++chunks(queued.command).count;
  return result;
}

// Where the rows of a command are, and where they are written to.
Write Outgoing::rows(const Command& c) const {
  const Layout& layout = group_.layout;
  const bool dispatch = c.op() == Op::kDispatch;
  const auto at = [&](uint32_t place) {
    return dispatch ? layout.row_at(c.bank(), place, c.first)
                    : layout.choice_at(c.bank(), place, 0, 0) + c.first * layout.combine_pitch;
  };
  Write write{};
  write.bytes = c.count * (dispatch ? layout.row_pitch : layout.combine_pitch);
  write.from = outbox_ + at(c.peer);
  write.to = at(group_.rank);
  if (!group_.rows_on_device) return write;
  const DeviceMemory& device = memory_.device();
  write.device = true;
  write.to -= layout.rows;
  write.from =
      dispatch ? device.inbound.begin + write.to : device.outbound.begin + at(c.peer) - layout.combine;
  return write;
}

// Posts the record, with ids and weights behind it, in one write. Weights far behind the ids need a second
// write.
Outgoing::Result Outgoing::post_routing(Queued& queued) {
  constexpr uint64_t kSmallGap = 4096;
  const Command& c = queued.command;
  const Layout& layout = group_.layout;
  const uint64_t ids = layout.ids_at(c.bank(), c.peer), ids_there = layout.ids_at(c.bank(), group_.rank);
  const uint64_t bytes = uint64_t(c.first & kTokensMask) * layout.top_k * sizeof(int32_t);
  const bool weighted = (c.first & kHasWeights) != 0 && bytes != 0;
  const bool together = layout.meta_weights - bytes <= kSmallGap;
  if (weighted && !together && queued.step == 0) {
    Queued chunk = queued;
    chunk.kind = Kind::kChunk;
    const Result result = write(chunk, kNoRecord,
                                {.from = outbox_ + ids + layout.meta_weights,
                                 .bytes = bytes,
                                 .to = ids_there + layout.meta_weights,
                                 .immediate = immediate(chunk).encode(),
                                 .tag = 0,
                                 .more = true,
                                 .device = false});
    if (result != Result::kDone) return result;
    ++chunks(c).count;
    queued.step = 1;
  }
  const CompletionRecord record = record_of(queued);
  std::memcpy(outbox_ + ids - Layout::kNote, &record, sizeof record);
  const uint64_t routing = weighted && together ? layout.meta_weights + bytes : bytes;
  const Result result = write(queued, kNoRecord,
                              {.from = outbox_ + ids - Layout::kNote,
                               .bytes = Layout::kNote + routing,
                               .to = ids_there - Layout::kNote,
                               .immediate = immediate(queued).encode(),
                               .tag = 0,
                               .more = false,
                               .device = false});
  if (result != Result::kDone) return result;
  told(c);
  consumed_.told(c.peer);
  return result;
}

CompletionRecord Outgoing::record_of(const Queued& queued) {
  const Command& c = queued.command;
  CompletionRecord record{c.epoch, c.first, 0, 0, {}, {}};
  const auto take = [&](uint64_t offset, uint32_t length) {
    std::memcpy(record.data, outbox_ + offset, record.length = length);
  };
  if (queued.kind == Kind::kRecord) {
    record.chunks = chunks(c).count;
    for (uint32_t op = 0; op < kBankedOps; ++op) record.consumed[op] = consumed_.kept(op, c.peer);
    take(Head::header(c.op(), c.bank(), c.peer) + sizeof(uint64_t), sizeof(uint64_t));
  }
  if (queued.kind == Kind::kVote) take(Head::vote(c.bank(), c.peer) + kLine, std::min(c.first, kVoteBytes));
  if (queued.kind == Kind::kJoin) take(Head::join(c.bank(), c.peer) + sizeof(uint64_t), sizeof(uint64_t));
  if (queued.kind == Kind::kAbort) take(Head::abort_status(c.peer), sizeof(Status));
  return record;
}

Outgoing::Result Outgoing::post_record(const Queued& queued) {
  if (free_records_.empty()) return Result::kAgain;
  const uint32_t slot = free_records_.back();
  const CompletionRecord record = record_of(queued);
  std::byte* const from = records_ + slot * kRecordPitch;
  std::memcpy(from, &record, sizeof record);
  const Immediate said = immediate(queued);
  const Result result = write(queued, slot,
                              {.from = from,
                               .bytes = offsetof(CompletionRecord, data) + record.length,
                               .to = memory_.region_bytes() + inbox_.slot(said),
                               .immediate = said.encode(),
                               .tag = 0,
                               .more = false,
                               .device = false});
  if (result != Result::kDone) return result;
  free_records_.pop_back();
  if (queued.kind == Kind::kRecord) told(queued.command);
  return result;
}

Outgoing::Result Outgoing::write(const Queued& queued, uint32_t record, const Write& wanted) {
  const Command& c = queued.command;
  Write posted = wanted;
  posted.tag = record << 16 | index(c.op(), c.bank(), c.peer);
  count(c).fetch_add(1, std::memory_order_relaxed);
  const Endpoint::Posted result = endpoint_.write(c.peer, posted);
  if (result == Endpoint::Posted::kDone) {
    ++peers_[c.peer].in_flight;
    ++writes_;
    group_.statistics.traffic[c.peer].bytes.add(posted.bytes);
    return Result::kDone;
  }
  count(c).fetch_sub(1, std::memory_order_relaxed);
  if (result == Endpoint::Posted::kAgain) return Result::kAgain;
  error_ = endpoint_.error();
  return Result::kFailed;
}

Immediate Outgoing::immediate(const Queued& queued) const {
  const Command& c = queued.command;
  const bool number =
      queued.kind == Kind::kConsumed || queued.kind == Kind::kHello || queued.kind == Kind::kAlive;
  const uint32_t value = number ? c.epoch : c.bank();
  return {queued.kind, c.generation, group_.rank, uint32_t(c.op()) & 1, value};
}

Outgoing::Chunks& Outgoing::chunks(const Command& c) {
  Chunks& chunks = chunks_[index(c.op(), c.bank(), c.peer)];
  if (chunks.generation != c.generation) chunks = {c.generation, 0};
  return chunks;
}

void Outgoing::completed(const Event& event) {
  const uint32_t record = event.tag >> 16;
  if (record != kNoRecord) free_records_.push_back(record);
  --peers_[event.peer].in_flight;
  leases_[event.tag & 0xffff].fetch_sub(1, std::memory_order_release);
}

void Outgoing::forget(uint32_t peer) {
  peers_[peer].forgotten = true;
  for (const Queued& queued : peers_[peer].queue)
    count(queued.command).fetch_sub(1, std::memory_order_release);
  peers_[peer].queue.clear();
  consumed_.forget(peer);
  peers_[peer].stuck_since = 0;
}

bool Outgoing::idle() const {
  for (uint64_t left = group_.remote; left != 0; left &= left - 1)
    if (!peers_[std::countr_zero(left)].queue.empty()) return false;
  return true;
}

bool Outgoing::delivered(uint64_t peers) const {
  for (; peers != 0; peers &= peers - 1)
    if (!idle(uint32_t(std::countr_zero(peers)))) return false;
  return true;
}

uint64_t Outgoing::stuck(uint64_t now, uint64_t limit_ns) const {
  uint64_t late = 0;
  for (uint64_t left = group_.remote; left != 0; left &= left - 1) {
    const uint32_t peer = std::countr_zero(left);
    const uint64_t since = peers_[peer].stuck_since;
    if (since != 0 && now > since && now - since >= limit_ns) late |= 1ull << peer;
  }
  return late;
}

}  // namespace ep::fabric

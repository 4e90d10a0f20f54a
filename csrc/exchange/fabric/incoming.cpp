// Counts arrivals per operation and sets cells.
#include "exchange/fabric/incoming.hpp"

#include <algorithm>
#include <cstring>

#include "exchange/common/cells.hpp"
#include "exchange/common/params.hpp"

namespace ep::fabric {

Incoming::Incoming(Group& group, std::byte* inbox)
    : group_(group),
      inbox_(inbox),
      slots_{group.geometry.num_ranks, group.geometry.num_banks},
      arrivals_(uint64_t(kBankedOps) * group.geometry.num_banks * group.geometry.num_ranks) {}

std::string Incoming::take(const Immediate& immediate, uint32_t last_epoch, uint64_t now) {
  const bool banked = immediate.kind == Kind::kChunk || immediate.kind == Kind::kRecord;
  const bool paired = immediate.kind == Kind::kVote || immediate.kind == Kind::kJoin;
  if (uint32_t(immediate.kind) >= kNumKinds || !group_.is_remote(immediate.source) ||
      (banked && immediate.value >= group_.geometry.num_banks) || (paired && immediate.value >= kVoteBanks))
    return "an immediate of kind " + std::to_string(uint32_t(immediate.kind)) + ", source " +
           std::to_string(immediate.source) + ", value " + std::to_string(immediate.value);
  Pulse& pulse = pulses_[immediate.source];
  std::atomic_ref<uint64_t>(pulse.beat).store(now, std::memory_order_relaxed);
  switch (immediate.kind) {
    case Kind::kChunk:
    case Kind::kRecord:
      count(immediate);
      break;
    case Kind::kLast:
      last(immediate, last_epoch);
      break;
    case Kind::kConsumed:
      consumed(immediate, last_epoch);
      break;
    case Kind::kVote:
      vote(immediate);
      break;
    case Kind::kJoin:
      join(immediate);
      break;
    case Kind::kAbort:
      abort(immediate);
      break;
    case Kind::kHello:
      greeted_ |= 1ull << immediate.source;
      break;
    case Kind::kBye:
      departed_ |= 1ull << immediate.source;
      break;
    case Kind::kAlive:
      decode_pulse(group_, immediate.value, pulse);
      break;
  }
  return {};
}

CompletionRecord Incoming::record(const Immediate& immediate) const {
  CompletionRecord record;
  const bool routing = immediate.kind == Kind::kRecord && Op(immediate.op) == Op::kDispatch;
  const std::byte* from = routing ? group_.own() + group_.layout.note_at(immediate.value, immediate.source)
                                  : inbox_ + slots_.slot(immediate);
  std::memcpy(&record, from, sizeof record);
  record.length = std::min(record.length, kVoteBytes);
  return record;
}

Incoming::Arrival* Incoming::arrival_of(const Immediate& immediate, uint32_t bank) {
  const uint32_t slot = immediate.op * group_.geometry.num_banks + bank;
  Arrival& arrival = arrivals_[slot * group_.geometry.num_ranks + immediate.source];
  const int32_t ahead = later(immediate.generation, arrival.generation);
  if (ahead < 0) return nullptr;
  if (ahead > 0) arrival = {.generation = immediate.generation};
  return &arrival;
}

void Incoming::count(const Immediate& immediate) {
  Arrival* arrival = arrival_of(immediate, immediate.value);
  if (arrival == nullptr) return;
  if (immediate.kind == Kind::kChunk) {
    ++arrival->chunks;
  } else {
    const CompletionRecord said = record(immediate);
    const uint32_t taken_in = Op(immediate.op) == Op::kDispatch ? group_.rank << kGatewayShift : 0;
    arrival->record = true;
    arrival->expected = said.chunks;
    arrival->cell = encode_cell(said.epoch, said.payload | taken_in);
    std::memcpy(&arrival->readers, said.data, sizeof arrival->readers);
    consumed(immediate, said);
  }
  complete(*arrival, immediate, immediate.value);
}

void Incoming::last(const Immediate& immediate, uint32_t last_epoch) {
  const Last said = Last::decode(immediate.value);
  const uint32_t epoch = widen(said.epoch, last_epoch, Last::kEpochBits), bank = group_.bank_of(epoch);
  Arrival* arrival = arrival_of(immediate, bank);
  if (arrival == nullptr) return;
  ++arrival->chunks;
  arrival->record = true;
  arrival->expected = said.chunks;
  arrival->cell = encode_cell(epoch, said.payload);
  arrival->readers = 1ull << group_.rank;
  complete(*arrival, immediate, bank);
}

// Sets the cells of an operation if all of it has arrived.
void Incoming::complete(Arrival& arrival, const Immediate& immediate, uint32_t bank) {
  if (!arrival.record || arrival.chunks != arrival.expected) return;
  const auto [cell, readers] = std::pair(arrival.cell, arrival.readers & group_.readable);
  arrival = {.generation = immediate.generation};
  const uint64_t offset = Head::header(Op(immediate.op), bank, immediate.source);
  for_each_peer(readers, group_.rank, group_.geometry.num_ranks,
                [&, cell = cell](uint32_t reader) { advance(reader, immediate.source, offset, cell); });
}

bool Incoming::newer(uint64_t offset, uint32_t epoch) const {
  return int32_t(epoch - cell_epoch(load_cell(group_.own(), offset))) > 0;
}

void Incoming::advance(uint32_t rank, uint32_t source, uint64_t offset, uint64_t cell) {
  std::byte* region = group_.regions[rank];
  const auto at = cell_at(region, offset);
  uint64_t seen = at.load(std::memory_order_acquire);
  do {
    if (int32_t(cell_epoch(cell) - cell_epoch(seen)) <= 0) return;
  } while (!at.compare_exchange_weak(seen, cell, std::memory_order_acq_rel));
  // This rank itself sleeps in the carrier, where the driving thread reports arrivals.
  if (rank != group_.rank && sleeps_on(region, source)) wake(group_, rank);
}

void Incoming::consumed(const Immediate& immediate, uint32_t last_epoch) {
  if (later(immediate.generation, uint32_t(group_.generation) % Immediate::kGenerations) < 0) return;
  const uint32_t epoch = widen(immediate.value, last_epoch);
  advance(group_.rank, immediate.source, Head::consumed(Op(immediate.op), immediate.source),
          encode_cell(epoch, 0));
}

// Applies the consumed epochs that arrived with the record of another operation.
void Incoming::consumed(const Immediate& immediate, const CompletionRecord& said) {
  if (later(immediate.generation, uint32_t(group_.generation) % Immediate::kGenerations) < 0) return;
  for (uint32_t op = 0; op < kBankedOps; ++op) {
    const uint64_t offset = Head::consumed(Op(op), immediate.source);
    if (said.consumed[op] != 0)
      advance(group_.rank, immediate.source, offset, encode_cell(said.consumed[op], 0));
  }
}

void Incoming::vote(const Immediate& immediate) {
  const CompletionRecord said = record(immediate);
  const uint64_t slot = Head::vote(immediate.value, immediate.source);
  if (!newer(slot, said.epoch)) return;
  std::memcpy(group_.own() + slot + kLine, said.data, said.length);
  advance(group_.rank, immediate.source, slot, encode_cell(said.epoch, said.payload));
}

void Incoming::join(const Immediate& immediate) {
  const CompletionRecord said = record(immediate);
  const uint64_t line = Head::join(immediate.value, immediate.source);
  if (!newer(line, said.epoch)) return;
  std::memcpy(group_.own() + line + sizeof(uint64_t), said.data, sizeof(uint64_t));
  advance(group_.rank, immediate.source, line, encode_cell(said.epoch, 0));
}

void Incoming::abort(const Immediate& immediate) {
  const CompletionRecord said = record(immediate);
  Status status;
  std::memcpy(&status, said.data, sizeof status);
  if (said.epoch == uint32_t(group_.generation) + 1)
    abort_at(group_.own(), immediate.source, said.epoch, status);
}

}  // namespace ep::fabric

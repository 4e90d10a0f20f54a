// Epoch cells between processes of one host: encode, publish, wait with a deadline.
//
// A cell is 8 bytes: the epoch in the low 32 bits, a payload in the high 32. The writer stores its data
// first, then the cell with release. The reader loads the cell with acquire and compares the epoch for
// equality. An older epoch means "not yet". A newer epoch means that the bank was overwritten before it was
// read: a protocol violation.
//
// Sleeping: the reader publishes which rank it waits for next to its futex word, checks the cell once more
// and sleeps. A writer reads that word after it has stored its cell (both sides with a full fence in between)
// and makes a system call only if the reader sleeps on this writer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "exchange/common/carrier.hpp"
#include "exchange/common/status.hpp"

namespace ep {

struct Group;

constexpr uint64_t encode_cell(uint32_t epoch, uint32_t payload) { return uint64_t(payload) << 32 | epoch; }
constexpr uint32_t cell_epoch(uint64_t cell) { return uint32_t(cell); }
constexpr uint32_t cell_payload(uint64_t cell) { return uint32_t(cell >> 32); }

inline std::atomic_ref<uint64_t> cell_at(std::byte* region, uint64_t offset) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(region + offset));
}
inline uint64_t load_cell(std::byte* region, uint64_t offset) {
  return cell_at(region, offset).load(std::memory_order_acquire);
}

uint64_t now_ns();  // CLOCK_MONOTONIC: one clock for all processes of the host

// Which cell of a head; the writer's rank says the rest. `op` and `bank` where the kind has them.
struct CellName {
  Notice notice;
  Op op = Op::kVote;
  uint32_t bank = 0;
  bool near = false;  // the low bits of the epoch suffice: the peer is close enough to complete them
};
uint64_t cell_offset(const CellName& name, uint32_t writer);

// Stores a cell into the region of `peer` with release and wakes the peer if it sleeps on this rank; a remote
// peer's goes to the carrier, and at once on its way, but for kConsumed.
void publish(Group& group, uint32_t peer, const CellName& name, uint32_t epoch, uint32_t payload);

// Whether the owner of a region sleeps on this writer, whose cell has just been stored.
bool sleeps_on(std::byte* region, uint32_t writer);

// Makes a rank of this host look again, whomever it sleeps on.
void wake(Group& group, uint32_t peer);

// The same for this rank's own wait, from any thread.
void wake_self(Group& group);

struct Wait {
  Op op;
  Phase phase;
  uint64_t first_cell;  // offset in this rank's region of the cell of rank 0 ...
  uint64_t stride;      // ... and the distance to the next rank's
  uint64_t peers;       // bit per rank to wait for
  uint32_t expected;
  bool at_least = false;        // a newer epoch has arrived too (consumed counters)
  bool by_liveness = false;     // no deadline: wait as long as the peers' heartbeats go on
  uint64_t limit_ns = 0;        // the deadline; 0 = that of all waits
  bool by_gateways = false;     // what comes from other hosts is taken in by ranks of this one
  bool ignore_abort = false;    // reset only
  uint64_t* wait_ns = nullptr;  // [rank] += how long this wait lasted for each
};

struct Waited {
  Status status;
  uint64_t arrived;  // bit per rank whose cell was seen; masked and timed-out ranks are missing
};

// Spins, yields, then sleeps. On expiry masks the missing peers, or aborts the group and returns kTimeout.
Waited wait_for(Group& group, const Wait& wait);

// Sets the sticky abort of all ranks to `status` (first writer wins) and wakes them.
void abort_group(Group& group, const Status& status);

// The same for one region of this host, in the name of any writer. Wakes no rank.
void abort_at(std::byte* region, uint32_t writer, uint32_t generation, const Status& status);

// kAborted with the origin's fields if the group is aborted, else kOk.
Status aborted(const Group& group);

}  // namespace ep

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

// Identifies a cell of a head, together with the writer's rank. Some kinds also need `op` and `bank`.
struct CellName {
  Notice notice;
  Op op = Op::kVote;
  uint32_t bank = 0;
  bool near = false;  // the low bits of the epoch are enough: the peer can work out the rest
};
uint64_t cell_offset(const CellName& name, uint32_t writer);

// Stores a cell into the region of `peer` with release, and wakes the peer if it sleeps on this rank. Cells
// of a remote peer go to the carrier, which sends all but kConsumed at once.
void publish(Group& group, uint32_t peer, const CellName& name, uint32_t epoch, uint32_t payload);

// Whether the region's owner sleeps on this writer. Call it after the cell was stored.
bool sleeps_on(std::byte* region, uint32_t writer);

// Wakes a rank of this host so that it checks its cells again, whichever rank it sleeps on.
void wake(Group& group, uint32_t peer);

// Wakes this rank's own wait. Any thread may call it.
void wake_self(Group& group);

struct Wait {
  Op op;
  Phase phase;
  uint64_t first_cell;  // offset in this rank's region of the cell of rank 0 ...
  uint64_t stride;      // ... and the distance to the next rank's
  uint64_t peers;       // bit per rank to wait for
  uint32_t expected;
  bool at_least = false;        // a newer epoch also counts as arrived (consumed counters)
  bool by_liveness = false;     // no deadline: wait as long as the peers' heartbeats continue
  uint64_t limit_ns = 0;        // the deadline; 0 = timing.timeout_ns
  bool by_gateways = false;     // ranks of this host receive the data from other hosts
  uint32_t forming = 0;         // reset only: the generation, which alone an abort counts for
  uint64_t* wait_ns = nullptr;  // [rank] += how long this wait lasted for each
  bool many = false;            // of an operation for many rows
};

struct Waited {
  Status status;
  uint64_t arrived;  // bit per rank whose cell was seen; masked and timed-out ranks are missing
};

// Spins, yields, then sleeps. On expiry masks the missing peers, or aborts the group and returns kTimeout.
Waited wait_for(Group& group, const Wait& wait);

// Sets the sticky abort of all ranks to `status` and wakes them. The first writer wins.
void abort_group(Group& group, const Status& status);

// Sets the sticky abort in one region of this host, on behalf of any writer. Wakes no rank.
void abort_at(std::byte* region, uint32_t writer, uint32_t generation, const Status& status);

// Ends every wait of a generation, and its forming, of the rank that owns a region of this host: `lost` has
// ended. From any process of the host.
void report_lost(std::byte* region, uint32_t lost, uint32_t generation);

// kAborted with the origin's fields if the group is aborted, else kOk.
Status aborted(const Group& group);
Status aborted(const Group& group, uint32_t generation);

}  // namespace ep

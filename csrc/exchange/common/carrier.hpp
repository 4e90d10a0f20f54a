// The transport to ranks of other hosts, as the phases see it. The phases write into an outbox, which has the
// layout of a region, then announce what is ready. This interface does not depend on the network.
#pragma once

#include <cstdint>

#include "exchange/common/layout.hpp"

namespace ep {

struct Status;

// What is ready: rows of an operation, or one of the cells of `Head`.
enum class Notice : uint8_t { kRows, kHeader, kConsumed, kVote, kJoin, kAbort };

// One queue entry, 16 bytes. The thread that computes, or a GPU, writes it; the thread that sends reads it.
struct Command {
  Notice notice;
  uint8_t op_bank;  // op << 4 | bank
  uint8_t peer;
  uint8_t generation;  // low bits; commands of an old generation are recognised by them
  uint32_t first;      // kRows: slot of the first row in the peer's block; else the payload of the cell
  uint32_t count;      // kRows: rows; kHeader: 1 if the low bits of the epoch suffice for the peer
  uint32_t epoch;

  Op op() const { return Op(op_bank >> 4); }
  uint32_t bank() const { return op_bank & 15; }
};
static_assert(sizeof(Command) == 16 && kMaxBanks == 16 && kMaxRanks <= 256);

class Carrier {
 public:
  virtual ~Carrier() = default;

  // Queues a command, from any thread. A kConsumed may wait for a later message while the peer does not need
  // it. The caller must not change the data in the outbox until leased() no longer names the peer.
  virtual void push(const Command& command) = 0;

  // Sends what is queued and handles what arrived, unless another thread is doing so. Never waits. Only the
  // thread that runs the phases may call it.
  virtual void drive() = 0;

  // Between waiting(true) and waiting(false) the caller drives the network. No other thread has to be woken.
  virtual void waiting(bool begins) = 0;
  // Sleeps until something arrived since the last drive(), somebody rings, or `ns` have passed.
  virtual void sleep(uint64_t ns) = 0;
  // Wakes another rank of this host.
  virtual void ring(uint32_t rank) = 0;
  // Wakes this rank, and the thread that sends.
  virtual void wake() = 0;

  // Bits of the peers that still have writes in flight from this bank of the outbox.
  virtual uint64_t leased(Op op, uint32_t bank) const = 0;
};

}  // namespace ep

// The transport to ranks of other hosts, as the phases see it. They write into an outbox that is laid out
// like a region, then announce what is ready. Independent of the network.
#pragma once

#include <cstdint>

#include "exchange/common/layout.hpp"

namespace ep {

struct Status;

// What may be ready: rows of an operation, or one of the cells of `Head`.
enum class Notice : uint8_t { kRows, kHeader, kConsumed, kVote, kJoin, kAbort };

// One entry of the queue between the thread that computes, or a GPU, and the one that sends. 16 bytes.
struct Command {
  Notice notice;
  uint8_t op_bank;  // op << 4 | bank
  uint8_t peer;
  uint8_t generation;  // low bits: what an old generation left is not taken for the new one's
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

  // Queues it; kConsumed may travel with a later message, as long as the peer does not need it. The outbox
  // behind it stays as it is until leased() no longer names the peer. Any thread.
  virtual void push(const Command& command) = 0;

  // Sends what is queued and takes in what arrived, if no other thread is at it. Never waits. Only the thread
  // that runs the phases calls it.
  virtual void drive() = 0;

  // Between waiting(true) and waiting(false) the caller drives, and no other thread has to be woken for it.
  virtual void waiting(bool begins) = 0;
  // Sleeps until something arrived since the last drive(), somebody rings or `ns` have passed.
  virtual void sleep(uint64_t ns) = 0;
  // Ends the sleep of a rank of this host.
  virtual void ring(uint32_t rank) = 0;
  // The same for this rank's own, and for the thread that sends.
  virtual void wake() = 0;

  // Bits of the peers to which something of this bank of the outbox is still on its way.
  virtual uint64_t leased(Op op, uint32_t bank) const = 0;
};

}  // namespace ep

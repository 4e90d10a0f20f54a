// The sending half. It turns commands into RDMA writes, peer by peer, and leases the outbox until the writes
// have completed. The driving thread calls it. Any thread may call leased().
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "exchange/common/cells.hpp"
#include "exchange/common/group.hpp"
#include "exchange/common/params.hpp"
#include "exchange/fabric/consumed_epochs.hpp"
#include "exchange/fabric/endpoint.hpp"
#include "exchange/fabric/registered_memory.hpp"
#include "exchange/fabric/wire_format.hpp"

namespace ep::fabric {

constexpr uint32_t kRecords = 1024;  // small messages in flight at once

class Outgoing {
 public:
  // memory: registered with the endpoint. Its outbox has the layout of a region, followed by kRecords slots.
  Outgoing(Group& group, Endpoint& endpoint, const FabricMemory& memory);

  // Begins a lease. Any thread may call it, before it queues the command for this class.
  void lease(const Command& command) { count(command).fetch_add(1, std::memory_order_relaxed); }
  uint64_t leased(Op op, uint32_t bank) const;

  void enqueue(const Command& command, uint64_t now);
  // Sends the consumed epochs that no other message has carried since `before`.
  void send_consumed(uint64_t before);
  // Queues a message that fits into an immediate, for one peer.
  void enqueue_signal(uint32_t peer, Kind kind, uint32_t value = 0);

  // Posts what the provider accepts, without waiting. Returns bits of peers whose connection refused a write.
  // The reason is in error().
  uint64_t post(uint64_t now);
  int error() const { return error_; }

  void completed(const Event& event);
  // Drops what is queued for a peer. Writes in flight no longer count.
  void forget(uint32_t peer);
  void remember(uint32_t peer) { peers_[peer].forgotten = false; }

  bool idle() const;                     // nothing queued
  bool delivered(uint64_t peers) const;  // nothing queued or in flight to any of them
  bool idle(uint32_t peer) const { return peers_[peer].queue.empty() && peers_[peer].in_flight == 0; }
  uint64_t stuck(uint64_t now, uint64_t limit_ns) const;  // bits of peers that accepted nothing for this long
  // The last epoch of an operation that this rank sent to a peer. Epochs that the peer has consumed are near
  // it.
  uint32_t last_epoch(Op op, uint32_t peer) const { return last_epochs_[uint32_t(op)][peer]; }
  // The last operation that this rank had for a peer, except heartbeats and greetings.
  Op last_op(uint32_t peer) const { return peers_[peer].last_op; }
  uint64_t writes() const { return writes_; }

 private:
  static constexpr uint32_t kNoRecord = kRecords;
  struct Queued {
    Command command;
    Kind kind;
    uint32_t step = 0;  // number of its writes that are posted
  };
  struct Peer {
    std::deque<Queued> queue;
    uint32_t in_flight = 0;
    uint64_t stuck_since = 0;  // when the provider first refused a write; 0 = not stuck
    bool forgotten = false;
    Op last_op = Op::kVote;
  };
  // Chunks written for the operation that occupies a bank. Its record will announce their number.
  struct Chunks {
    uint32_t generation = 0, count = 0;
  };
  enum class Result { kDone, kAgain, kFailed };

  std::atomic<uint32_t>& count(const Command& c) { return leases_[index(c.op(), c.bank(), c.peer)]; }
  static uint32_t index(Op op, uint32_t bank, uint32_t peer) {
    return (uint32_t(op) * kMaxBanks + bank) * kMaxRanks + peer;
  }
  Chunks& chunks(const Command& c);
  Result post_front(Peer& peer);
  Result post_rows(const Queued& queued, const Immediate& immediate, bool more);
  Write rows(const Command& command) const;
  Result post_routing(Queued& queued);
  Result post_record(const Queued& queued);
  // Whether the first two entries, rows and their header, end a combine and fit into one immediate.
  bool ends(const Peer& peer);
  CompletionRecord record_of(const Queued& queued);
  void done(Peer& peer);
  void told(const Command& c);
  Result write(const Queued& queued, uint32_t record, const Write& write);
  Immediate immediate(const Queued& queued) const;

  Group& group_;
  Endpoint& endpoint_;
  const FabricMemory& memory_;
  std::byte *const outbox_, *const records_;
  const Inbox inbox_;
  ConsumedEpochs consumed_;
  std::array<Peer, kMaxRanks> peers_;
  std::vector<std::atomic<uint32_t>> leases_;  // [op][bank][peer] commands and writes not yet done
  std::vector<Chunks> chunks_;                 // [op][bank][peer]
  std::array<std::array<uint32_t, kMaxRanks>, kBankedOps> last_epochs_{};
  std::vector<uint32_t> free_records_;
  uint64_t writes_ = 0;
  int error_ = 0;
};

}  // namespace ep::fabric

// One rank's end of a group: mapped regions, epochs, banks, masks. Independent of how memory was shared.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "exchange/common/carrier.hpp"
#include "exchange/common/faults.hpp"
#include "exchange/common/layout.hpp"
#include "exchange/common/statistics.hpp"
#include "exchange/common/status.hpp"
#include "exchange/common/wait_attribution.hpp"

namespace ep {

struct Timing {
  uint64_t timeout_ns;   // deadline of every wait for a peer
  uint64_t liveness_ns;  // how long a barrier believes in a peer whose heartbeat stopped
  uint64_t spin_ns;      // busy wait before yielding
  bool mask_on_timeout;  // go on without the peer instead of failing
};

// Which operations of one kind are in flight here, and up to which epoch all banks were read. Halves may
// finish out of order. Only an epoch with no unread one before it may be published to the senders.
class Banks {
 public:
  void reset(uint64_t epoch) {
    next_ = consumed_ = base_ = epoch;
    busy_ = {};
  }
  uint64_t next() const { return next_ + 1; }  // epoch of the next send
  uint64_t base() const { return base_; }      // epochs of this generation are above it
  uint64_t last() const { return next_; }
  bool busy(uint32_t bank) const { return busy_[bank]; }
  void start(uint32_t bank) {
    ++next_;
    busy_[bank] = true;
  }
  // Returns the newest epoch up to which all banks were read.
  uint64_t finish(uint32_t bank, uint32_t num_banks) {
    busy_[bank] = false;
    while (consumed_ < next_ && !busy_[(consumed_ + 1) & (num_banks - 1)]) ++consumed_;
    return consumed_;
  }

 private:
  uint64_t next_ = 0, consumed_ = 0, base_ = 0;
  std::array<bool, kMaxBanks> busy_{};
};

struct Group {
  const uint64_t id;  // unique in this process, never reused
  Geometry geometry;
  Layout layout;
  uint32_t rank;
  std::array<std::byte*, kMaxRanks> regions{};  // memory that this rank writes for each peer, and its own
  std::array<uint32_t, kMaxRanks> places{};     // this rank's number in the region of each peer
  std::array<const Pulse*, kMaxRanks> pulses{};
  Carrier* carrier = nullptr;  // sends what is written for ranks of other hosts
  uint64_t remote = 0;         // bit per rank on another host
  // Rows are in device memory, which the network reads and writes directly. The phases announce rows but do
  // not touch them.
  bool rows_on_device = false;
  // For each rank: bits of the ranks on its host; its number among them; and the rank of this host that last
  // received its rows. For a rank of this host, that is the rank itself.
  std::array<uint64_t, kMaxRanks> mates{};
  std::array<uint32_t, kMaxRanks> turns{};
  std::array<uint8_t, kMaxRanks> gateways{};
  uint64_t readable;  // bit per rank of this host whose region may hold rows for this one
  std::array<int64_t, kMaxRanks> first_rows{};  // for each: distance in rows from the first region
  std::vector<int32_t> owner;                   // [E] rank
  std::vector<int32_t> local_index;             // [E] position among this rank's experts, -1 elsewhere
  uint32_t local_experts;
  Timing timing;

  std::atomic<uint64_t> masked{0};      // bit per rank; another thread may write it
  std::atomic<uint64_t> generation{0};  // abort() of another thread reads it
  std::mutex aborting;                  // this rank's status lines have one writer at a time
  std::array<Banks, kBankedOps> banks;
  std::array<uint64_t, kBankedOps> opened{};  // epoch for which open_bank() last waited
  uint64_t vote_epoch = 0;
  bool was_reset = false;  // reset() was called

  Statistics statistics;
  FaultPlan faults;
  bool (*interrupted)() = nullptr;  // called now and then during a sleep; true ends the wait

  Group(const Geometry& geometry, uint32_t rank, const int32_t* placement, const Timing& timing);

  std::byte* own() const { return regions[rank]; }
  bool is_remote(uint32_t peer) const { return remote >> peer & 1; }
  void add_local(uint32_t peer, std::byte* region);
  // `outbox`: a region of this host that all remote peers share. Data for `peer` is stored there as if `peer`
  // had sent it.
  void add_remote(uint32_t peer, std::byte* outbox, const Pulse* pulse);
  // hosts: [R] host of each rank. One rank of this host receives rows from other hosts for all ranks here.
  // Add all ranks first. Regions of this host must be a whole number of rows apart.
  void share_rows(const std::vector<uint32_t>& hosts);
  void choose_gateways();                                      // among unmasked ranks
  std::pair<std::byte*, std::byte*> readable_regions() const;  // the first and the last one

  // The rank among `ranks`, all on one other host, that receives the rows of `source` for all of them.
  uint32_t gateway(uint32_t source, uint64_t ranks) const {
    for (uint32_t skip = turns[source] % uint32_t(std::popcount(ranks)); skip != 0; --skip)
      ranks &= ranks - 1;
    return uint32_t(std::countr_zero(ranks));
  }
  // The ranks to write to so that `ranks` get a row: those of this host, and one on each other host.
  uint64_t targets(uint64_t ranks, uint64_t peers) const {
    uint64_t to = ranks & ~remote;
    for (uint64_t far = ranks & remote; far != 0;) {
      const uint64_t host = mates[std::countr_zero(far)];
      to |= 1ull << gateway(rank, host & peers);
      far &= ~host;
    }
    return to;
  }
  uint64_t all() const { return geometry.num_ranks == 64 ? ~0ull : (1ull << geometry.num_ranks) - 1; }
  uint64_t unmasked() const { return all() & ~masked.load(std::memory_order_acquire); }
  uint32_t bank_of(uint64_t epoch) const { return uint32_t(epoch) & (geometry.num_banks - 1); }
  Banks& of(Op op) { return banks[uint32_t(op)]; }

  // Bits of the ranks that own at least one of the K experts of a token.
  uint64_t owners(const int32_t* ids) const {
    uint64_t ranks = 0;
    for (uint32_t k = 0; k < geometry.top_k; ++k)
      if (ids[k] >= 0) ranks |= 1ull << owner[ids[k]];
    return ranks;
  }
};

// Calls fn(peer) for every set bit, starting after `rank` so that not all ranks write to the same peer first.
template <class Fn>
void for_each_peer(uint64_t peers, uint32_t rank, uint32_t num_ranks, Fn&& fn) {
  for (uint32_t i = 1; i <= num_ranks; ++i) {
    const uint32_t peer = (rank + i) % num_ranks;
    if (peers >> peer & 1) fn(peer);
  }
}

// Waits until every receiver has read the bank that the next send of `op` uses. Returns kHook if this rank
// has not read it. A send calls this itself; if a device fills the bank, call it before.
Status open_bank(Group& group, Op op, bool many = false);

// Marks an epoch as read here, and publishes to all senders up to which epoch banks are free.
void consume(Group& group, Op op, uint64_t epoch);

// Writes this rank's header cell of (op, epoch) to a peer. For a peer on another host it adds the bits of the
// ranks there that it is for. Skips peers that an injected fault drops.
void publish_header(Group& group, Op op, uint64_t epoch, uint32_t peer, uint32_t payload, uint64_t readers);

// The vote: one record of up to 64 bytes from every rank. `out`: [R] records of kVoteBytes, `lengths`: [R].
// limit_ns: how long to wait; 0 = as long as the heartbeats of all ranks go on.
Status all_gather(Group& group, const void* record, uint32_t length, uint64_t limit_ns, std::byte* out,
                  uint32_t* lengths);

// Collective. Starts a generation of the group, 0 = the next one: no aborts, no operations in flight, and
// only `dead` masked. All ranks give the same number, if some of them missed or failed to form earlier ones.
Status reset(Group& group, uint64_t dead, uint32_t generation);

}  // namespace ep

// The receiving half. It counts completions until all rows of an operation have arrived. Then it sets the
// operation's cell on behalf of the source: in this rank's region, and in the regions of the ranks of this
// host that read the rows here. The driving thread calls it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "exchange/common/group.hpp"
#include "exchange/fabric/wire_format.hpp"

namespace ep::fabric {

class Incoming {
 public:
  // inbox: the slots behind this rank's region.
  Incoming(Group& group, std::byte* inbox);

  // last_epoch: the last epoch of this operation that this rank sent to the source. The epoch meant by the
  // immediate is near it. Returns "", or why no rank of this group can have sent this immediate.
  std::string take(const Immediate& immediate, uint32_t last_epoch, uint64_t now);

  uint64_t greeted() const { return greeted_; }    // bits of the sources that have greeted
  uint64_t departed() const { return departed_; }  // bits of the sources that have said good-bye
  const Pulse* pulse(uint32_t source) const { return &pulses_[source]; }

 private:
  // For one (op, bank, source): what has arrived of the operation that occupies it.
  struct Arrival {
    uint32_t generation = 0, chunks = 0;
    bool record = false;
    uint32_t expected = 0;
    uint64_t cell = 0;
    uint64_t readers = 0;  // bit per rank that the rows are for
  };

  void count(const Immediate& immediate);
  void consumed(const Immediate& immediate, const CompletionRecord& said);
  void last(const Immediate& immediate, uint32_t last_epoch);
  Arrival* arrival_of(const Immediate& immediate, uint32_t bank);  // null if its generation has ended
  void complete(Arrival& arrival, const Immediate& immediate, uint32_t bank);
  void consumed(const Immediate& immediate, uint32_t last_epoch);
  void vote(const Immediate& immediate);
  void join(const Immediate& immediate);
  void abort(const Immediate& immediate);
  CompletionRecord record(const Immediate& immediate) const;
  // Messages may overtake each other, but a cell never goes back to an older epoch.
  bool newer(uint64_t offset, uint32_t epoch) const;
  // Stores a cell into the region of a rank of this host, unless a newer one is there.
  void advance(uint32_t rank, uint32_t source, uint64_t offset, uint64_t cell);

  Group& group_;
  std::byte* const inbox_;
  const Inbox slots_;
  std::vector<Arrival> arrivals_;
  std::array<Pulse, kMaxRanks> pulses_{};
  uint64_t greeted_ = 0, departed_ = 0;
};

}  // namespace ep::fabric

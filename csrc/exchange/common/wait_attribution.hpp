// Who holds up a wait, which is not always the peer that is waited for.
//
// A rank sends what belongs to a phase before it waits in it. So a rank that is waited for stands in an
// earlier phase than the one that waits, and who is at the end of a chain of waits waits for nobody: it
// computes, hangs or is dead. Each rank that sleeps says, beside its heartbeat, for whom it waits and who
// holds it up as far as it knows; whoever waits for it takes that over. So the end of a chain is known all
// along it, on other hosts after one heartbeat for each rank between. Two that wait for each other have lost
// a message: none excuses the other. A rank that no longer beats was stopped, maybe amid a wait: what it said
// is old, and the chain ends there.
#pragma once

#include <cstdint>

namespace ep {

struct Group;

// What a rank says of itself all the time, at Head::kHeartbeat.
struct Pulse {
  uint64_t beat;        // ns, on the clock of whoever reads it
  uint64_t waits_for;   // bit per rank; of a rank on another host only the reader's own
  uint32_t held_up_by;  // rank + 1, 0 = it waits for nobody
};

// When `peer` last beat, on this host's clock.
uint64_t last_beat(const Group& group, uint32_t peer);

// Whether a peer, which others may depend on, has stopped beating.
bool quiet(const Group& group, uint32_t peer, uint64_t now);

// Who holds `peer` up by its own word; itself where it no longer beats, waits for nobody, or for this rank.
uint32_t behind(const Group& group, uint32_t peer, uint64_t now);

// Who holds up a wait for `peers`, at least one: the first that no longer beats, else that waits for nobody,
// else who is behind the first.
uint32_t root(const Group& group, uint64_t peers, uint64_t now);

// Says that this rank waits for `peers`; 0 = no longer for anybody.
void say_waiting(Group& group, uint64_t peers, uint64_t now);

// What a heartbeat to `peer` says of this rank besides, and its way into what is known there of the sender.
uint32_t encode_pulse(const Group& group, uint32_t peer);
void decode_pulse(const Group& group, uint32_t value, Pulse& pulse);

}  // namespace ep

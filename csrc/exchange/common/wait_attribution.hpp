// Finds the rank that holds up a wait. It is not always the peer that is waited for.
//
// A rank sends everything that belongs to a phase before it waits in that phase. So the rank at the end of a
// chain of waits does not wait itself: it computes, hangs or is dead. Each sleeping rank publishes, next to
// its heartbeat, which ranks it waits for and, if known, which rank holds it up. Ranks that wait for it copy
// the latter, so every rank of the chain learns its end. Each link between hosts adds one heartbeat of delay.
//
// Two ranks that wait for each other have lost a message, and neither is excused. If a rank's heartbeat has
// stopped, it may have died during a wait. Its published data is then stale, and the chain ends there.
#pragma once

#include <cstdint>

namespace ep {

struct Group;

// What a rank publishes about itself, at Head::kHeartbeat.
struct Pulse {
  uint64_t beat;        // ns, on the reader's clock
  uint64_t waits_for;   // bit per rank; for a rank on another host only the reader's bit
  uint32_t held_up_by;  // rank + 1; 0 = it does not wait
};

// The time of the last heartbeat of `peer`, on this host's clock.
uint64_t last_beat(const Group& group, uint32_t peer);

// Whether the heartbeat of a peer has stopped.
bool quiet(const Group& group, uint32_t peer, uint64_t now);

// The rank that holds `peer` up, as published. It is `peer` itself if its heartbeat stopped, if it does not
// wait, or if it waits for this rank.
uint32_t behind(const Group& group, uint32_t peer, uint64_t now);

// The rank that holds up a wait for `peers` (at least one). It is the first whose heartbeat stopped, else the
// first that does not wait, else the one that holds up the first.
uint32_t root(const Group& group, uint64_t peers, uint64_t now);

// Publishes that this rank waits for `peers`; 0 = it no longer waits.
void publish_wait(Group& group, uint64_t peers, uint64_t now);

// Encodes what a heartbeat to `peer` says about this rank. The peer decodes it into the sender's pulse.
uint32_t encode_pulse(const Group& group, uint32_t peer);
void decode_pulse(const Group& group, uint32_t value, Pulse& pulse);

}  // namespace ep

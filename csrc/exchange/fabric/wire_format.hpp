// The wire format between hosts: RDMA writes. The 4 bytes of completion data of a write (its immediate) say
// what it is. With an emulated delay, 4 more say when it was sent: CompletionData in network_emulation.hpp.
//
// Rows and routing are written to their place in `Layout`, in any number of writes and in any order. Each
// write carries an immediate, and the receiver counts them. A completion record announces their number. It is
// written to its own slot, behind the region or in front of the routing. If its content fits into an
// immediate, the last write's immediate replaces it. Only then does the receiver set the cell that the phases
// wait for: only a rank's own host ever writes its cells.
#pragma once

#include <cstdint>

#include "exchange/common/layout.hpp"

namespace ep::fabric {

enum class Kind : uint32_t { kHello, kChunk, kRecord, kConsumed, kVote, kJoin, kAbort, kAlive, kBye, kLast };
constexpr uint32_t kNumKinds = 10;

// kind 4 bits, generation 4, source 6, op 1, value 17: the bank, or the low bits of an epoch.
struct Immediate {
  Kind kind;
  uint32_t generation, source, op, value;

  static constexpr uint32_t kValueBits = 17;
  static constexpr uint32_t kGenerations = 16;

  uint32_t encode() const {
    return uint32_t(kind) << 28 | (generation % kGenerations) << 24 | source << 18 | op << 17 |
           (value & ((1u << kValueBits) - 1));
  }
  static Immediate decode(uint32_t bits) {
    return {Kind(bits >> 28), bits >> 24 & 15, bits >> 18 & 63, bits >> 17 & 1,
            bits & ((1u << kValueBits) - 1)};
  }
};

// The value of kLast: the last chunk of a combine, if its header says no more than this.
struct Last {
  static constexpr uint32_t kEpochBits = 11, kMaxChunks = 31;
  uint32_t epoch;    // low bits
  uint32_t payload;  // of the header: 0 or 1
  uint32_t chunks;   // how many writes belong to it

  uint32_t encode() const { return epoch << 6 | payload << 5 | chunks; }
  static Last decode(uint32_t value) { return {value >> 6, value >> 5 & 1, value & 31}; }
};
static_assert(Last::kEpochBits + 6 == Immediate::kValueBits && 1u << Last::kEpochBits > 4 * kMaxBanks);

// The 32-bit epoch with these low bits that is nearest to `near`.
inline uint32_t widen(uint32_t value, uint32_t near, uint32_t bits = Immediate::kValueBits) {
  const uint32_t shift = 32 - bits;
  return near + uint32_t(int32_t((value - near) << shift) >> shift);
}

// The sign of (a - b) where both count modulo 16.
inline int32_t later(uint32_t a, uint32_t b) { return int32_t((a - b) << 28) >> 28; }

// The message behind a cell.
struct CompletionRecord {
  uint32_t epoch, payload;
  uint32_t chunks;                // kRecord: number of writes of the operation
  uint32_t length;                // bytes used in data
  uint32_t consumed[kBankedOps];  // kRecord: epochs up to which the sender has read the receiver's data
  uint8_t data[kVoteBytes];
};
constexpr uint64_t kRecordPitch = 128;
static_assert(sizeof(CompletionRecord) <= kRecordPitch && sizeof(CompletionRecord) <= Layout::kNote);

// Where records arrive, behind a rank's region. Records of a dispatch arrive in front of the routing instead.
// There is a slot for each (kind, op, bank, source). It is written again only after this rank has read it and
// published that, as the protocol above demands.
struct Inbox {
  uint32_t num_ranks, num_banks;

  uint64_t slot(const Immediate& immediate) const {
    return (first(immediate.kind, immediate.op, immediate.value) * num_ranks + immediate.source) *
           kRecordPitch;
  }
  uint64_t bytes() const { return (kBankedOps * num_banks + 2 * kVoteBanks + 2) * num_ranks * kRecordPitch; }

 private:
  uint64_t first(Kind kind, uint32_t op, uint32_t bank) const {
    const uint64_t banked = uint64_t(kBankedOps) * num_banks;
    switch (kind) {
      case Kind::kRecord:
        return uint64_t(op) * num_banks + bank;
      case Kind::kVote:
        return banked + bank;
      case Kind::kJoin:
        return banked + kVoteBanks + bank;
      case Kind::kAbort:
        return banked + 2 * kVoteBanks;
      default:  // the immediate says it all; the written bytes are never read
        return banked + 2 * kVoteBanks + 1;
    }
  }
};

}  // namespace ep::fabric

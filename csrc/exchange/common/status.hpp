// A failure as data: one record, from the wait that failed to the exception that Python raises.
#pragma once

#include <cstdint>

#include "exchange/common/layout.hpp"

namespace ep {

enum class Code : uint32_t {
  kOk,
  kTimeout,      // PeerTimeout
  kHook,         // HookNotCalled
  kViolation,    // ProtocolViolation
  kAborted,      // GroupAborted; the fields describe the first error
  kInterrupted,  // a signal handler raised in Python
  kRequested,    // abort() was called
  kLost,         // PeerLost: `rank` noticed it; the launcher did if it is `peer`, too
};

// Where an operation can wait, fail, or have a fault injected.
enum class Phase : uint32_t {
  kSendBank,      // wait until the receivers have read the bank
  kSendRows,      // write rows and routing
  kSendHeader,    // publish the header cells
  kRecvHeader,    // wait for the headers of the peers
  kRecvExpand,    // unpack rows into the view
  kRecvReduce,    // sum the returned rows
  kRecvConsumed,  // publish to the senders that the bank is free
  kGather,        // vote: wait for the records
  kJoin,          // reset: wait for all ranks
};

// `expected` and `seen` are the low 32 bits of epochs.
struct Status {
  Code code = Code::kOk;
  Op op = Op::kDispatch;
  Phase phase = Phase::kSendBank;
  uint32_t rank = 0, peer = 0, expected = 0, seen = 0;

  explicit operator bool() const { return code != Code::kOk; }  // true = failed
};

inline const char* name(Op op) {
  switch (op) {
    case Op::kDispatch:
      return "dispatch";
    case Op::kCombine:
      return "combine";
    case Op::kVote:
      return "vote";
    case Op::kReset:
      return "reset";
  }
  return "?";
}

inline const char* name(Phase phase) {
  switch (phase) {
    case Phase::kSendBank:
      return "send_bank";
    case Phase::kSendRows:
      return "send_rows";
    case Phase::kSendHeader:
      return "send_header";
    case Phase::kRecvHeader:
      return "recv_header";
    case Phase::kRecvExpand:
      return "recv_expand";
    case Phase::kRecvReduce:
      return "recv_reduce";
    case Phase::kRecvConsumed:
      return "recv_consumed";
    case Phase::kGather:
      return "gather";
    case Phase::kJoin:
      return "join";
  }
  return "?";
}
constexpr uint32_t kNumPhases = 9;

}  // namespace ep

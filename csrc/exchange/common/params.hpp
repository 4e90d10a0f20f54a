// One parameter struct per phase, and the state that an operation carries between its halves. Pointers are
// not owned. T tokens of this rank, K choices, H channels, R ranks, E_local local experts.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "exchange/common/layout.hpp"

namespace ep {

// The payload of a dispatch header: number of tokens, gateway, and whether there are weights. The gateway is
// the rank of this host whose region holds the rows: if the source is on this host too, the reader or the
// source itself.
constexpr uint32_t kHasWeights = 1u << 31, kGatewayShift = 25, kTokensMask = (1u << kGatewayShift) - 1;
constexpr uint32_t gateway_of(uint32_t payload) { return payload >> kGatewayShift & (kMaxRanks - 1); }

// Set in the payload of a combine header, above the reduction, if its dispatch never arrived here.
constexpr uint32_t kNoDispatch = 1u << 31;

enum class View : uint32_t { kCompact, kPadded, kIndex };

// A mistake of the caller. Nothing has been sent. Becomes InvalidArgument.
struct BadArgument : std::runtime_error {
  std::string field, value, allowed;
  BadArgument(std::string f, std::string v, std::string a)
      : std::runtime_error(f + " = " + v + ": must be " + a), field(f), value(v), allowed(a) {}
};

// The group and generation of an operation. Row numbers in a state are trusted, so another group must not use
// it.
struct Origin {
  uint64_t group = 0, generation = 0;
};

// One (token, k) that a local expert computes. `row` counts in COMPACT order.
struct Entry {
  uint32_t row;
  uint32_t expert;  // local
  uint32_t k;
  float weight;
};

// The entries [first, first + count) of one received token, in top-k order.
struct TokenRun {
  uint32_t source, token, first, count;
};

struct DispatchState {
  Origin origin;
  uint64_t epoch = 0;
  uint32_t bank = 0;
  bool received = false, bank_held = false;
  View view = View::kCompact;
  // source side
  uint32_t tokens = 0;
  bool has_weights = false, many = false;  // many: of an operation for many rows
  uint64_t sent_to = 0;                    // bit per rank that was unmasked
  std::vector<int32_t> ids;                // [T, K]
  std::vector<float> weights;              // [T, K], empty without weights
  // receiving side
  uint64_t arrived = 0;
  std::array<uint8_t, kMaxRanks> gateways{};  // rank of this host whose region holds the rows of each source
  bool sources_have_weights = true;
  std::vector<Entry> entries;    // (source, token, k) order
  std::vector<TokenRun> runs;    // (source, token) order
  std::vector<int32_t> counts;   // [E_local]
  std::vector<int64_t> offsets;  // [E_local + 1]
  std::array<uint64_t, kMaxRanks> wait_ns{};
  uint64_t send_ns = 0, recv_ns = 0;
};

struct CombineState {
  Origin origin;
  uint64_t epoch = 0;
  uint32_t bank = 0;
  bool received = false, bank_held = false;
  Reduction reduction = Reduction::kRank;
  uint64_t returned = 0;  // bit per rank that may have returned
  std::shared_ptr<DispatchState> dispatch;
  std::vector<float> weights;  // [T, K], SOURCE only
  std::array<uint64_t, kMaxRanks> wait_ns{};
  uint64_t send_ns = 0;
};

struct DispatchSendParams {
  const void* x;         // [T, H] float (FP32) or bf16
  const int64_t* ids;    // [T, K]
  const float* weights;  // [T, K] or null
  uint32_t tokens;
  bool once_per_host;  // ranks of this host read the rows in the region of this rank
};

struct ExpandParams {
  void* rows;        // [N, H] or [E_local, R * max_tokens, H]; null for INDEX
  void* scales;      // COMPACT [N, G]; PADDED [E_local, G, R * max_tokens] in memory; FP8 only
  int64_t* row_ids;  // [N], INDEX only
  int32_t* counts;   // [E_local]
  int64_t* offsets;  // [E_local + 1]
  View view;
};

struct CombineSendParams {
  const void* expert_out;  // rows in the dispatch's layout
  const float* weights;    // [T, K] of this rank's tokens, or null
  Reduction reduction;
};

struct CombineRecvParams {
  void* out;  // [T, H] float (FP32) or bf16
};

}  // namespace ep

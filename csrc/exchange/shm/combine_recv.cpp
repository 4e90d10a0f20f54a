// [8] combine_recv, CPU.
//
// Afterwards out[t] = RANK:   sum over the ranks that own experts of t, ascending, of the rows they returned
//                     SOURCE: sum over k, ascending, of weights[t, k] * combine[bank][owner][t][k]
// in float32 from +0, rounded once. Ranks that are masked or never arrived contribute nothing.
#include "exchange/common/cells.hpp"
#include "exchange/common/row_tables.hpp"
#include "exchange/shm/phases.hpp"
#include "exchange/shm/rows.hpp"

namespace ep::cpu {
namespace {

// The rows of one token, for SOURCE with their weights; returns how many.
uint32_t gather(const Group& group, const CombineState& state, uint32_t token, const void** rows,
                float* weights) {
  uint32_t count = 0;
  for_each_output(group, state, token, [&](uint64_t slot, float weight) {
    rows[count] =
        group.own() + group.layout.choice_at(state.bank, 0, 0, 0) + slot * group.layout.combine_pitch;
    weights[count++] = weight;
  });
  return count;
}

void sum(const Group& group, const CombineState& state, void* out) {
  const void* rows[kMaxRanks];
  float weights[kMaxRanks];
  for (uint32_t t = 0; t < state.dispatch->tokens; ++t) {
    const uint32_t count = gather(group, state, t, rows, weights);
    weighted_sum(group.geometry.payload == Payload::kFp32,
                 {.rows = rows,
                  .weights = state.reduction == Reduction::kRank ? nullptr : weights,
                  .count = count,
                  .hidden = group.geometry.hidden,
                  .out = static_cast<std::byte*>(out) + t * group.layout.combine_bytes});
  }
}

}  // namespace

Status combine_recv(Group& group, const CombineRecvParams& params, CombineState& state) {
  const uint64_t start = now_ns();
  check_place(group, "out", params.out);
  group.faults.at(Op::kCombine, Phase::kRecvHeader, state.epoch);

  // 1. All headers; a peer that reduces in another place is a bug of the callers.
  const Waited waited = wait_for(group, {.op = Op::kCombine,
                                         .phase = Phase::kRecvHeader,
                                         .first_cell = Head::header(Op::kCombine, state.bank, 0),
                                         .stride = kLine,
                                         .peers = group.all(),
                                         .expected = uint32_t(state.epoch),
                                         .wait_ns = state.wait_ns.data(),
                                         .many = state.dispatch->many});
  if (waited.status) return waited.status;
  const uint64_t arrived_at = now_ns();
  uint64_t returned = waited.arrived & state.dispatch->sent_to;
  for (uint64_t left = waited.arrived; left != 0; left &= left - 1) {
    const uint32_t peer = std::countr_zero(left);
    const uint64_t cell = load_cell(group.own(), Head::header(Op::kCombine, state.bank, peer));
    if ((cell_payload(cell) & kNoDispatch) != 0) returned &= ~(1ull << peer);
    if ((cell_payload(cell) & ~kNoDispatch) == uint32_t(state.reduction)) continue;
    const Status status{Code::kViolation,      Op::kCombine,    Phase::kRecvHeader, group.rank, peer,
                        uint32_t(state.epoch), cell_epoch(cell)};
    abort_group(group, status);
    return status;
  }

  // 2. One sum per token. Only ranks that got the token in this dispatch may have returned a row.
  group.faults.at(Op::kCombine, Phase::kRecvReduce, state.epoch);
  state.returned = returned;
  if (!group.rows_on_device) sum(group, state, params.out);

  // 3. Give the bank back to the experts' ranks, unless a device still has to read it.
  state.received = true;
  state.bank_held = true;
  if (!group.rows_on_device) combine_release(group, state);
  const uint64_t end = now_ns();
  const auto time = [&](Part part) -> Histogram& {
    return group.statistics.time(Op::kCombine, part, state.dispatch->many);
  };
  time(Part::kWait).record(arrived_at - start);
  time(Part::kReduce).record(end - arrived_at);
  time(Part::kTotal).record(state.send_ns + end - start);
  return {};
}

void combine_release(Group& group, CombineState& state) {
  if (!state.bank_held) return;
  state.bank_held = false;
  if (state.epoch > group.of(Op::kCombine).base()) consume(group, Op::kCombine, state.epoch);
}

}  // namespace ep::cpu

// [8] combine_send, CPU.
//
// Afterwards, for every unmasked source s and every row it sent here:
//   RANK    s.combine[bank][this rank][token] = sum over its local experts, in top-k order, of
//           weight * output
//   SOURCE  s.combine[bank][this rank][token][k] = output, unweighted
//   both    s.header[combine][bank][this rank] = (epoch, reduction), stored last with release
// Reads the experts' output in the layout of the dispatch's receive, without a staging copy. If rows are on a
// device, the outputs are already in the slots (row_tables.hpp).
#include <algorithm>
#include <cstring>

#include "exchange/common/cells.hpp"
#include "exchange/common/row_runs.hpp"
#include "exchange/common/row_tables.hpp"
#include "exchange/shm/phases.hpp"
#include "exchange/shm/rows.hpp"

namespace ep::cpu {
namespace {

class RowsOut {
 public:
  RowsOut(const Group& group, const DispatchState& dispatch, const void* base)
      : dispatch_(dispatch),
        base_(static_cast<const std::byte*>(base)),
        bytes_(group.layout.combine_bytes),
        padded_(uint64_t(group.layout.num_ranks) * group.layout.max_tokens) {}

  const void* operator[](const Entry& entry) const {
    const uint64_t row =
        dispatch_.view == View::kPadded
            ? entry.expert * padded_ + (entry.row - uint64_t(dispatch_.offsets[entry.expert]))
            : entry.row;
    return base_ + row * bytes_;
  }

 private:
  const DispatchState& dispatch_;
  const std::byte* base_;
  uint64_t bytes_, padded_;
};

void write_sum(const Group& group, const RowsOut& out, const TokenRun& run, const Entry* entries,
               std::byte* to) {
  const void* rows[kMaxTopK];
  float weights[kMaxTopK];
  for (uint32_t i = 0; i < run.count; ++i) {
    rows[i] = out[entries[i]];
    weights[i] = entries[i].weight;
  }
  weighted_sum(
      group.geometry.payload == Payload::kFp32,
      {.rows = rows, .weights = weights, .count = run.count, .hidden = group.geometry.hidden, .out = to});
}

// Writes one token's output into its source's region. Returns the number of rows written.
uint32_t write_output(const Group& group, const CombineState& state, const RowsOut& out, const TokenRun& run,
                      RowRuns& sent) {
  const Layout& layout = group.layout;
  const uint32_t place = group.places[run.source];
  const bool far = group.is_remote(run.source);
  const Entry* entries = state.dispatch->entries.data() + run.first;
  std::byte* region = group.regions[run.source];
  if (state.reduction == Reduction::kSource) {
    for (uint32_t i = 0; i < run.count; ++i) {
      const uint32_t k = entries[i].k;
      if (!group.rows_on_device)
        std::memcpy(region + layout.choice_at(state.bank, place, run.token, k), out[entries[i]],
                    layout.combine_bytes);
      if (far) sent.add(run.source, run.token * layout.choices_per_token + k);
    }
    return run.count;
  }
  if (!group.rows_on_device)
    write_sum(group, out, run, entries, region + layout.rank_sum_at(state.bank, place, run.token));
  if (far) sent.add(run.source, run.token);
  return 1;
}

}  // namespace

Status combine_send(Group& group, const CombineSendParams& params, CombineState& state) {
  const uint64_t start = now_ns();
  DispatchState& dispatch = *state.dispatch;
  Banks& banks = group.of(Op::kCombine);

  // 1. Check the arguments.
  check_place(group, "expert_out", params.expert_out);
  state.reduction = params.reduction;
  if (params.reduction == Reduction::kRank && !dispatch.sources_have_weights)
    throw BadArgument("topk_weights", "None",
                      "given at dispatch by every rank where rows are summed before they return");
  if (params.reduction == Reduction::kSource) {
    if (params.weights != nullptr) {
      state.weights.assign(params.weights, params.weights + dispatch.ids.size());
    } else {
      state.weights = dispatch.weights;
    }
    if (state.weights.size() != dispatch.ids.size())
      throw BadArgument("topk_weights", "None", "given at dispatch or at combine");
  }

  // 2. Wait for a bank that every source has read.
  if (Status failed = open_bank(group, Op::kCombine, dispatch.many)) return failed;
  state.epoch = banks.next();
  state.bank = group.bank_of(state.epoch);
  banks.start(state.bank);

  // 3. Write the rows of each source, then its header, so that early sources need not wait for late ones.
  const RowsOut out(group, dispatch, params.expert_out);
  uint64_t remote = 0, local = 0;
  const uint32_t num_ranks = group.geometry.num_ranks;
  std::array<size_t, kMaxRanks + 1> begin{};
  for (const TokenRun& run : dispatch.runs) begin[run.source + 1] = size_t(&run - dispatch.runs.data()) + 1;
  for (uint32_t source = 0; source < num_ranks; ++source)
    begin[source + 1] = std::max(begin[source + 1], begin[source]);
  RowRuns sent(group, Op::kCombine, state.bank, state.epoch, group.layout.combine_pitch);
  group.faults.at(Op::kCombine, Phase::kSendRows, state.epoch);
  for_each_peer(group.unmasked(), group.rank, num_ranks, [&](uint32_t source) {
    uint64_t rows = 0;
    for (size_t i = begin[source]; i < begin[source + 1]; ++i)
      rows += write_output(group, state, out, dispatch.runs[i], sent);
    (source == group.rank ? local : remote) += rows * group.layout.combine_bytes;
    group.faults.at(Op::kCombine, Phase::kSendHeader, state.epoch);
    sent.flush(source);
    const uint32_t nothing = dispatch.arrived >> source & 1 ? 0 : kNoDispatch;
    publish_header(group, Op::kCombine, state.epoch, source, uint32_t(state.reduction) | nothing,
                   1ull << source);
  });

  // 4. An in-place view has been read: give its bank back to the senders.
  dispatch_release(group, dispatch);
  state.send_ns = now_ns() - start;
  group.statistics.time(Op::kCombine, Part::kSend, dispatch.many).record(state.send_ns);
  group.statistics.bytes[timed(Op::kCombine, dispatch.many)].add(remote);
  group.statistics.bytes_local[timed(Op::kCombine, dispatch.many)].add(local);
  return {};
}

}  // namespace ep::cpu

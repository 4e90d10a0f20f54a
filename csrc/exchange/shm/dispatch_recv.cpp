// [7] dispatch_recv, CPU: wait, then expand.
//
// After dispatch_wait, this rank has seen the header of every unmasked rank with acquire. A prefix sum over
// (local expert, source, token) numbers the entries, so two runs give identical bytes. After dispatch_expand:
//   COMPACT rows[entry.row] = region.rows[bank][source][token]
//   PADDED  the same at [expert, entry.row - offsets[expert]]
//   INDEX   row_ids[entry.row] = source * max_tokens + token, no copy
// Cost: one row read per received row, one written per entry (INDEX: none). Rows from another host are read
// where the source wrote them, in the region of one rank of this host. So are rows that a source of this host
// has written once for all ranks here, in its own region. Row ids count from the first of these
// regions.
#include <algorithm>
#include <cstring>

#include "exchange/common/cells.hpp"
#include "exchange/common/row_tables.hpp"
#include "exchange/shm/phases.hpp"

namespace ep::cpu {
namespace {

// Records whose region holds the rows of a source. Returns false if this rank may not read that region.
bool find_rows(Group& group, DispatchState& state, uint32_t source, uint32_t payload) {
  const uint32_t gateway = gateway_of(payload);
  state.gateways[source] = uint8_t(group.rank);
  if (!group.is_remote(source)) {
    if (gateway != group.rank && gateway != source) return false;
    state.gateways[source] = uint8_t(gateway);
    return true;
  }
  if (!(group.readable >> gateway & 1)) return false;
  state.gateways[source] = group.gateways[source] = uint8_t(gateway);
  return true;
}

// Appends the entries of one source's tokens with their experts but without rows. Returns false if the
// routing is invalid: an expert has room for R * max_tokens rows only if the ids of a token are distinct.
bool read_source(const Group& group, DispatchState& state, uint32_t source, uint32_t tokens,
                 bool has_weights) {
  const Layout& layout = group.layout;
  const uint32_t top_k = layout.top_k;
  const std::byte* region = group.regions[state.gateways[source]];
  const auto* ids = reinterpret_cast<const int32_t*>(region + layout.ids_at(state.bank, source));
  const auto* weights = reinterpret_cast<const float*>(region + layout.weights_at(state.bank, source));
  for (uint32_t t = 0; t < tokens; ++t) {
    const uint32_t first = uint32_t(state.entries.size());
    for (uint32_t k = 0; k < top_k; ++k) {
      const size_t at = size_t(t) * top_k + k;
      const int32_t id = ids[at];
      if (id < 0) continue;
      if (uint32_t(id) >= group.geometry.num_experts) return false;
      const int32_t expert = group.local_index[id];
      if (expert < 0) continue;
      for (size_t i = first; i < state.entries.size(); ++i)
        if (state.entries[i].expert == uint32_t(expert)) return false;
      state.entries.push_back({0, uint32_t(expert), k, has_weights ? weights[at] : 0.0f});
      ++state.counts[expert];
    }
    const uint32_t count = uint32_t(state.entries.size()) - first;
    if (count != 0) state.runs.push_back({source, t, first, count});
  }
  return true;
}

// Drops the entries that were appended behind these sizes.
void forget(DispatchState& state, size_t entries, size_t runs) {
  for (size_t i = entries; i < state.entries.size(); ++i) --state.counts[state.entries[i].expert];
  state.entries.resize(entries);
  state.runs.resize(runs);
}

void number_entries(const Group& group, DispatchState& state) {
  for (uint32_t e = 0; e < group.local_experts; ++e) {
    state.offsets[e + 1] = state.offsets[e] + state.counts[e];
    state.counts[e] = 0;
  }
  for (Entry& entry : state.entries)
    entry.row = uint32_t(state.offsets[entry.expert]) + state.counts[entry.expert]++;
}

void copy_scales(const Group& group, const std::byte* from, void* scales, View view, uint64_t row,
                 uint64_t expert, uint64_t position) {
  const uint64_t width = group.layout.scale_bytes / sizeof(uint32_t);
  auto* to = static_cast<uint32_t*>(scales);
  if (view == View::kCompact) {
    std::memcpy(to + row * width, from, group.layout.scale_bytes);
    return;
  }
  // Tokens are the contiguous dimension, as grouped GEMMs expect.
  const uint64_t padded = uint64_t(group.layout.num_ranks) * group.layout.max_tokens;
  for (uint64_t g = 0; g < width; ++g)
    std::memcpy(to + (expert * width + g) * padded + position, from + g * sizeof(uint32_t), sizeof(uint32_t));
}

}  // namespace

Status dispatch_wait(Group& group, DispatchState& state) {
  const uint64_t start = now_ns();
  group.faults.at(Op::kDispatch, Phase::kRecvHeader, state.epoch);

  // 1. Wait for all headers.
  const Waited waited = wait_for(group, {.op = Op::kDispatch,
                                         .phase = Phase::kRecvHeader,
                                         .first_cell = Head::header(Op::kDispatch, state.bank, 0),
                                         .stride = kLine,
                                         .peers = group.all(),
                                         .expected = uint32_t(state.epoch),
                                         .by_gateways = true,
                                         .wait_ns = state.wait_ns.data(),
                                         .many = state.many});
  if (waited.status) return waited.status;
  const uint64_t arrived = now_ns();

  // 2. Count rows per expert, then a prefix sum, in (source, token, k) order.
  state.arrived = waited.arrived;
  state.sources_have_weights = true;
  state.entries.clear();  // left by an earlier attempt that found an invalid header or routing
  state.runs.clear();
  state.counts.assign(group.local_experts, 0);
  state.offsets.assign(group.local_experts + 1, 0);
  state.entries.reserve(size_t(state.tokens) * group.geometry.top_k);
  state.runs.reserve(size_t(state.tokens) * group.geometry.num_ranks);  // ranks usually send similar numbers
  for (uint32_t source = 0; source < group.geometry.num_ranks; ++source) {
    if (!(state.arrived >> source & 1)) continue;
    const uint64_t cell = load_cell(group.own(), Head::header(Op::kDispatch, state.bank, source));
    const uint32_t tokens = cell_payload(cell) & kTokensMask;
    const bool has_weights = cell_payload(cell) & kHasWeights;
    const size_t entries = state.entries.size(), runs = state.runs.size();
    if (!find_rows(group, state, source, cell_payload(cell)) || tokens > group.geometry.max_tokens ||
        !read_source(group, state, source, tokens, has_weights)) {
      if (group.timing.mask_on_timeout && group.is_remote(source)) {
        // The peer has masked this rank and overwrites slots that ranks of this host read, so mask it here
        // too.
        forget(state, entries, runs);
        state.arrived &= ~(1ull << source);
        group.masked.fetch_or(1ull << source, std::memory_order_acq_rel);
        continue;
      }
      const Status status{Code::kViolation, Op::kDispatch,         Phase::kRecvHeader, group.rank,
                          source,           uint32_t(state.epoch), cell_epoch(cell)};
      abort_group(group, status);
      return status;
    }
    state.sources_have_weights &= has_weights || tokens == 0;
  }
  number_entries(group, state);
  group.statistics.rows.add(state.runs.size());
  for (uint32_t e = 0; e < group.local_experts; ++e) group.statistics.expert_tokens[e].add(state.counts[e]);
  group.statistics.time(Op::kDispatch, Part::kWait, state.many).record(arrived - start);
  state.recv_ns = now_ns() - start;
  return {};
}

void dispatch_expand(Group& group, DispatchState& state, const ExpandParams& params) {
  const uint64_t start = now_ns();
  check_place(group, "rows", params.rows);
  group.faults.at(Op::kDispatch, Phase::kRecvExpand, state.epoch);
  const Layout& layout = group.layout;
  const uint64_t padded = uint64_t(layout.num_ranks) * layout.max_tokens;
  auto* out = static_cast<std::byte*>(params.rows);

  // 3. Give every entry its row, in the order of the rows in memory.
  for (const TokenRun& run : state.runs) {
    const uint32_t gateway = state.gateways[run.source];
    const std::byte* row = group.regions[gateway] + layout.row_at(state.bank, run.source, run.token);
    for (uint32_t i = run.first; i < run.first + run.count; ++i) {
      const Entry& entry = state.entries[i];
      if (params.view == View::kIndex) {
        params.row_ids[entry.row] =
            group.first_rows[gateway] + int64_t(run.source) * layout.max_tokens + run.token;
        continue;
      }
      const uint64_t position = entry.row - uint64_t(state.offsets[entry.expert]);
      const uint64_t to = params.view == View::kCompact ? entry.row : entry.expert * padded + position;
      std::memcpy(out + to * layout.row_bytes, row, layout.row_bytes);
      if (params.scales != nullptr)
        copy_scales(group, row + layout.scale_offset, params.scales, params.view, to, entry.expert, position);
    }
  }

  std::copy(state.counts.begin(), state.counts.end(), params.counts);
  std::copy(state.offsets.begin(), state.offsets.end(), params.offsets);

  // 4. Give the bank back to the senders, unless the view reads it in place.
  state.view = params.view;
  state.received = true;
  state.bank_held = true;
  if (params.view != View::kIndex) dispatch_release(group, state);
  const uint64_t expand_ns = now_ns() - start;
  const auto time = [&](Part part) -> Histogram& {
    return group.statistics.time(Op::kDispatch, part, state.many);
  };
  time(Part::kExpand).record(expand_ns);
  time(Part::kTotal).record(state.send_ns + state.recv_ns + expand_ns);
}

void dispatch_release(Group& group, DispatchState& state) {
  if (!state.bank_held) return;
  state.bank_held = false;
  if (state.epoch > group.of(Op::kDispatch).base()) consume(group, Op::kDispatch, state.epoch);
}

}  // namespace ep::cpu

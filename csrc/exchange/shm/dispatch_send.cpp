// [7] dispatch_send, CPU.
//
// Afterwards, for every unmasked rank d and token t of this rank s with an expert on d:
//   d.rows[bank][s][t] = x[t] (quantised for FP8), d.meta[bank][s] = ids and weights of all tokens of s,
//   d.header[bank][s] = (epoch, T), stored last with release.
// Only one rank of another host gets rows and meta, for all ranks there. Each rank gets its own header. With
// `once_per_host`, rows and meta for all ranks of this host are in d = s instead. Host obligations: none.
// x, ids and weights may be overwritten at once. If rows are on a device, the rows of this bank are already
// in d = s, and are sent to the other ranks from there. Cost: one read of x, one row written per (token,
// rank), T * K * 8 bytes of routing per rank; or per host.
#include <bit>
#include <cstring>
#include <string>

#include "exchange/common/cells.hpp"
#include "exchange/common/row_runs.hpp"
#include "exchange/common/row_tables.hpp"
#include "exchange/shm/phases.hpp"
#include "exchange/shm/rows.hpp"

namespace ep::cpu {
namespace {

[[noreturn]] void refuse(uint32_t token, uint32_t k, int64_t id, const std::string& allowed) {
  const std::string at = "topk_ids[" + std::to_string(token) + ", " + std::to_string(k) + "]";
  throw BadArgument(at, std::to_string(id), allowed);
}

// Copies the ids into the state. Throws BadArgument if an id is out of range or repeated within its token.
void read_ids(const Group& group, const DispatchSendParams& params, DispatchState& state) {
  const uint32_t top_k = group.geometry.top_k;
  const int64_t num_experts = group.geometry.num_experts;
  state.ids.resize(size_t(params.tokens) * top_k);
  for (uint32_t t = 0; t < params.tokens; ++t) {
    const int64_t* ids = params.ids + size_t(t) * top_k;
    for (uint32_t k = 0; k < top_k; ++k) {
      if (ids[k] < -1 || ids[k] >= num_experts)
        refuse(t, k, ids[k], "-1 to " + std::to_string(num_experts - 1));
      for (uint32_t j = 0; j < k; ++j)
        if (ids[k] >= 0 && ids[j] == ids[k]) refuse(t, k, ids[k], "distinct within its token");
      state.ids[size_t(t) * top_k + k] = int32_t(ids[k]);
    }
  }
}

void write_row(const Group& group, const DispatchSendParams& params, uint32_t bank, uint32_t token,
               uint64_t ranks) {
  const Layout& layout = group.layout;
  const auto slot = [&](uint32_t peer) {
    return group.regions[peer] + layout.row_at(bank, group.places[peer], token);
  };
  if (!is_fp8(group.geometry.payload)) {
    const auto* row = static_cast<const std::byte*>(params.x) + token * layout.row_bytes;
    for (; ranks != 0; ranks &= ranks - 1) std::memcpy(slot(std::countr_zero(ranks)), row, layout.row_bytes);
    return;
  }
  // Quantise once, into the first receiver's slot, then copy that to the others.
  std::byte* first = slot(std::countr_zero(ranks));
  const auto* row = static_cast<const uint16_t*>(params.x) + size_t(token) * group.geometry.hidden;
  quantise_row(row, group.geometry.hidden, group.geometry.payload, reinterpret_cast<uint8_t*>(first),
               first + layout.scale_offset);
  for (ranks &= ranks - 1; ranks != 0; ranks &= ranks - 1)
    std::memcpy(slot(std::countr_zero(ranks)), first, layout.row_bytes + layout.scale_bytes);
}

}  // namespace

Status dispatch_send(Group& group, const DispatchSendParams& params, DispatchState& state) {
  const uint64_t start = now_ns();
  const Layout& layout = group.layout;
  const uint32_t top_k = group.geometry.top_k;
  Banks& banks = group.of(Op::kDispatch);

  // 1. Check the arguments.
  check_place(group, "x", params.x);
  read_ids(group, params, state);
  state.tokens = params.tokens;
  state.has_weights = params.weights != nullptr;
  state.many = params.once_per_host;
  if (state.has_weights) state.weights.assign(params.weights, params.weights + size_t(params.tokens) * top_k);

  // 2. Wait for a bank that every receiver has read.
  if (Status failed = open_bank(group, Op::kDispatch, state.many)) return failed;
  state.epoch = banks.next();
  state.bank = group.bank_of(state.epoch);
  banks.start(state.bank);
  const uint64_t peers = state.sent_to = group.unmasked();
  const uint64_t targets = group.targets(peers, peers);
  const bool once = params.once_per_host && !group.rows_on_device;
  const uint64_t mine = 1ull << group.rank;
  const auto holders = [&](uint64_t ranks) {
    return once && (ranks & ~group.remote) != 0 ? (ranks & group.remote) | mine : ranks;
  };

  // 3. Write the routing of all tokens to all ranks, and each row to the ranks that own one of its experts.
  // On other hosts, write to one rank per host.
  const uint64_t id_bytes = state.ids.size() * sizeof(int32_t);
  uint64_t remote = 0, local = 0;
  for_each_peer(holders(targets), group.rank, layout.num_ranks, [&](uint32_t peer) {
    std::byte* region = group.regions[peer];
    const uint32_t place = group.places[peer];
    if (id_bytes != 0) std::memcpy(region + layout.ids_at(state.bank, place), state.ids.data(), id_bytes);
    if (state.has_weights && id_bytes != 0)
      std::memcpy(region + layout.weights_at(state.bank, place), state.weights.data(), id_bytes);
    (peer == group.rank ? local : remote) += id_bytes * (state.has_weights ? 2 : 1);
  });
  RowRuns runs(group, Op::kDispatch, state.bank, state.epoch, layout.row_pitch);
  for (uint32_t t = 0; t < params.tokens; ++t) {
    if (t == params.tokens / 2) group.faults.at(Op::kDispatch, Phase::kSendRows, state.epoch);
    const uint64_t owners = group.owners(state.ids.data() + size_t(t) * top_k) & peers;
    if (owners == 0) continue;
    const uint64_t ranks = holders(group.targets(owners, peers));
    if (!group.rows_on_device) write_row(group, params, state.bank, t, ranks);
    for (uint64_t far = ranks & group.remote; far != 0; far &= far - 1) runs.add(std::countr_zero(far), t);
    const uint64_t own = ranks >> group.rank & 1, bytes = layout.row_bytes + layout.scale_bytes;
    local += own * bytes;
    remote += (uint64_t(std::popcount(ranks)) - own) * bytes;
  }

  // 4. Write one header to every rank, with or without rows.
  group.faults.at(Op::kDispatch, Phase::kSendHeader, state.epoch);
  const uint32_t payload = params.tokens | (state.has_weights ? kHasWeights : 0);
  for_each_peer(targets, group.rank, layout.num_ranks, [&](uint32_t peer) {
    runs.flush(peer);
    const uint64_t readers = group.is_remote(peer) ? group.mates[peer] & peers : 1ull << peer;
    const uint32_t holder = group.is_remote(peer) ? 0 : once ? group.rank : peer;  // remote: added there
    publish_header(group, Op::kDispatch, state.epoch, peer, payload | holder << kGatewayShift, readers);
  });

  state.send_ns = now_ns() - start;
  group.statistics.time(Op::kDispatch, Part::kSend, state.many).record(state.send_ns);
  group.statistics.bytes[timed(Op::kDispatch, state.many)].add(remote);
  group.statistics.bytes_local[timed(Op::kDispatch, state.many)].add(local);
  group.statistics.tokens.add(params.tokens);
  return {};
}

}  // namespace ep::cpu

// Exposes the exchange of ranks on one host: unwraps pointers, releases the GIL and calls.
//
// ep_server/exchange/host.py has checked shapes and dtypes. Sizes that memory safety depends on are checked
// again here.
#include "bindings/exchange.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/pointer.hpp"
#include "exchange/common/cells.hpp"
#include "exchange/common/row_tables.hpp"
#include "exchange/shm/phases.hpp"
#include "exchange/shm/segment.hpp"

namespace {

using namespace ep;
using FaultTuple = std::tuple<uint32_t, uint32_t, uint32_t, uint64_t, int64_t, uint64_t>;

std::shared_ptr<Exchange> on_segment(int fd, const Geometry& geometry, uint32_t rank,
                                     const std::vector<int32_t>& placement, const Timing& timing) {
  auto segment = std::make_shared<shm::Segment>(fd);
  if (segment->page().regions != geometry.num_ranks)
    throw std::invalid_argument("the segment has " + std::to_string(segment->page().regions) + " regions");
  auto exchange = std::make_shared<Exchange>(geometry, rank, placement, timing);
  Group& group = exchange->group();
  for (uint32_t r = 0; r < geometry.num_ranks; ++r) group.add_local(r, segment->region(r));
  group.generation = load_cell(group.own(), Head::kIdentity);
  exchange->attach(segment, std::make_shared<shm::Heartbeat>(segment, group.own()));
  return exchange;
}

template <class State>
std::vector<uint64_t> wait_ns(const State& state, size_t num_ranks) {
  return {state.wait_ns.begin(), state.wait_ns.begin() + std::min(num_ranks, state.wait_ns.size())};
}

py::typing::Dict<py::str, py::object> statistics(Exchange& exchange) {
  static constexpr const char* kParts[kNumParts] = {"send", "wait", "expand", "reduce", "total"};
  const Group& group = exchange.group();
  py::dict histograms, sums, counters, peers, experts;
  for (uint32_t op = 0; op < kTimedOps; ++op) {
    const std::string op_name = timed_name(op);
    if (op >= kFirstOfMany && group.statistics.times[op][uint32_t(Part::kSend)].sum.get() == 0) continue;
    for (uint32_t part = 0; part < kNumParts; ++part) {
      const Histogram& h = group.statistics.times[op][part];
      py::tuple counts(kNumBuckets);
      uint64_t total = 0;
      for (uint32_t b = 0; b < kNumBuckets; ++b) {
        counts[b] = h.counts[b].get();
        total += h.counts[b].get();
      }
      if (total == 0) continue;
      histograms[py::str(op_name + "/" + kParts[part])] = counts;
      sums[py::str(op_name + "/" + kParts[part])] = h.sum.get();
    }
    counters[py::str("bytes/" + op_name)] = group.statistics.bytes[op].get();
    counters[py::str("bytes_local/" + op_name)] = group.statistics.bytes_local[op].get();
    for (uint32_t peer = 0; peer < group.geometry.num_ranks; ++peer)
      peers[py::make_tuple(op_name, peer)] = group.statistics.peer_wait_ns[op][peer].get();
  }
  for (uint64_t left = group.remote; left != 0; left &= left - 1) {
    const int peer = std::countr_zero(left);
    const std::string to = "/" + std::to_string(peer) + "/" + group.statistics.domain;
    counters[py::str("network_bytes" + to)] = group.statistics.traffic[peer].bytes.get();
    const uint64_t retries = group.statistics.traffic[peer].retries.get();
    if (retries != 0) counters[py::str("network_retries" + to)] = retries;
  }
  counters["exchange_tokens"] = group.statistics.tokens.get();
  counters["exchange_rows"] = group.statistics.rows.get();
  counters["exchange_timeouts"] = group.statistics.timeouts.get();
  counters["exchange_sleeps"] = group.statistics.sleeps.get();
  for (uint32_t e = 0; e < group.geometry.num_experts; ++e)
    if (const int32_t local = group.local_index[e]; local >= 0)
      experts[py::int_(e)] = group.statistics.expert_tokens[local].get();
  py::typing::Dict<py::str, py::object> all;
  all["histograms"] = histograms;
  all["sums"] = sums;
  all["counters"] = counters;
  all["peer_wait_ns"] = peers;
  all["expert_tokens"] = experts;
  return all;
}

py::typing::List<py::bytes> gather_records(Exchange& exchange, const py::bytes& record, uint64_t limit_ns) {
  const std::string_view bytes = record;
  if (bytes.size() > kVoteBytes)
    throw BadArgument("record", std::to_string(bytes.size()) + " bytes",
                      "at most " + std::to_string(kVoteBytes));
  std::array<std::byte, kMaxRanks * kVoteBytes> records;
  std::array<uint32_t, kMaxRanks> lengths;
  run(exchange, [&](Group& g) {
    return ep::all_gather(g, bytes.data(), uint32_t(bytes.size()), limit_ns, records.data(), lengths.data());
  });
  py::typing::List<py::bytes> list;
  for (uint32_t r = 0; r < exchange.group().geometry.num_ranks; ++r)
    list.append(py::bytes(reinterpret_cast<const char*>(records.data()) + r * kVoteBytes, lengths[r]));
  return list;
}

// Fills DeepEP's handle: the source token of every padded row, and where each source's rows begin.
void source_map(Exchange& exchange, const DispatchState& state, uintptr_t src_info, uintptr_t layout_range) {
  const SingleCaller caller(exchange);
  const Group& group = exchange.group();
  check_origin(group, state, "received");
  const uint64_t padded = uint64_t(group.layout.num_ranks) * group.layout.max_tokens;
  auto* info = pointer<int32_t>(src_info);
  auto* range = pointer<int64_t>(layout_range);
  for (const TokenRun& run : state.runs) {
    for (uint32_t i = run.first; i < run.first + run.count; ++i) {
      const Entry& entry = state.entries[i];
      const int64_t position = entry.row - state.offsets[entry.expert];
      info[entry.expert * padded + position] = int32_t(run.token);
      int64_t& packed = range[uint64_t(entry.expert) * group.layout.num_ranks + run.source];
      packed = packed == 0 ? position << 32 | 1 : packed + 1;
    }
  }
}

// Waits until the next bank of an operation may be filled. Returns its number.
uint32_t open_next(Exchange& exchange, uint32_t op) {
  run(exchange, [&](Group& g) { return open_bank(g, Op(op)); });
  Group& group = exchange.group();
  return group.bank_of(group.of(Op(op)).next());
}

uint32_t outputs(Exchange& exchange, const DispatchState& state, uint32_t reduction, uintptr_t slots,
                 uintptr_t terms, uintptr_t weights, uint32_t width) {
  const SingleCaller caller(exchange);
  check_origin(exchange.group(), state, "received");
  return output_table(exchange.group(), state, Reduction(reduction),
                      {pointer<int64_t>(slots), pointer<int64_t>(terms), pointer<float>(weights), width});
}

void sums(Exchange& exchange, const CombineState& state, uintptr_t terms, uintptr_t weights, uint32_t width) {
  const SingleCaller caller(exchange);
  check_origin(exchange.group(), state, "combine");
  sum_table(exchange.group(), state, {nullptr, pointer<int64_t>(terms), pointer<float>(weights), width});
}

std::shared_ptr<DispatchState> dispatch_send(Exchange& exchange, uintptr_t x, uintptr_t ids,
                                             uintptr_t weights, uint32_t tokens, bool once_per_host) {
  const uint32_t most = exchange.group().geometry.max_tokens;
  if (tokens > most) throw BadArgument("tokens", std::to_string(tokens), "at most " + std::to_string(most));
  auto state = std::make_shared<DispatchState>();
  run(exchange, [&](Group& g) {
    state->origin = {g.id, g.generation};
    const DispatchSendParams params{pointer<void>(x), pointer<int64_t>(ids), pointer<float>(weights), tokens,
                                    once_per_host};
    return cpu::dispatch_send(g, params, *state);
  });
  return state;
}

void dispatch_wait(Exchange& exchange, DispatchState& state) {
  run(exchange, [&](Group& g) {
    check_origin(g, state, "dispatch");
    return cpu::dispatch_wait(g, state);
  });
}

void dispatch_expand(Exchange& exchange, DispatchState& state, uint32_t view, uintptr_t rows,
                     uintptr_t scales, uintptr_t row_ids, uintptr_t counts, uintptr_t offsets) {
  run(exchange, [&](Group& g) {
    check_origin(g, state, "dispatch");
    cpu::dispatch_expand(g, state,
                         {pointer<void>(rows), pointer<void>(scales), pointer<int64_t>(row_ids),
                          pointer<int32_t>(counts), pointer<int64_t>(offsets), View(view)});
    return Status{};
  });
}

void dispatch_release(Exchange& exchange, DispatchState& state) {
  run(exchange, [&](Group& g) {
    check_origin(g, state, "received");
    cpu::dispatch_release(g, state);
    return Status{};
  });
}

std::shared_ptr<CombineState> combine_send(Exchange& exchange, std::shared_ptr<DispatchState> dispatch,
                                           uintptr_t expert_out, uintptr_t weights, uint32_t reduction) {
  auto state = std::make_shared<CombineState>();
  state->dispatch = std::move(dispatch);
  run(exchange, [&](Group& g) {
    check_origin(g, *state->dispatch, "received");
    state->origin = {g.id, g.generation};
    return cpu::combine_send(g, {pointer<void>(expert_out), pointer<float>(weights), Reduction(reduction)},
                             *state);
  });
  return state;
}

void combine_recv(Exchange& exchange, CombineState& state, uintptr_t out) {
  run(exchange, [&](Group& g) {
    check_origin(g, state, "combine");
    return cpu::combine_recv(g, {pointer<void>(out)}, state);
  });
}

void combine_release(Exchange& exchange, CombineState& state) {
  run(exchange, [&](Group& g) {
    check_origin(g, state, "combine");
    cpu::combine_release(g, state);
    return Status{};
  });
}

void abort_exchange(Exchange& exchange) {
  Group& group = exchange.group();
  abort_group(group, {Code::kRequested, Op::kVote, Phase::kGather, group.rank, group.rank, 0, 0});
}

void mask(Exchange& exchange, uint64_t ranks) {
  exchange.group().masked.fetch_or(ranks);
  wake_self(exchange.group());
}

void set_faults(Exchange& exchange, const std::vector<FaultTuple>& faults) {
  std::vector<Fault> plan;
  for (const auto& [op, phase, action, epoch, peer, delay_ns] : faults)
    plan.push_back({Op(op), Phase(phase), Action(action), epoch, peer, delay_ns});
  const SingleCaller caller(exchange);
  exchange.group().faults.set(std::move(plan));
}

// A Python memoryview of the rows that this rank has received; it keeps the memory alive.
py::memoryview rows_region(Exchange& exchange) {
  const Group& g = exchange.group();
  if (g.rows_on_device)
    throw BadArgument("rows_region", "on a device", "asked for where rows are on the host");
  const auto [first, last] = g.readable_regions();
  const uint64_t bytes = uint64_t(last - first) + g.layout.combine - g.layout.rows;
  return py::memoryview(py::cast(RegionView{exchange.memory(), first + g.layout.rows, bytes}));
}

template <class Values>
py::tuple names_of(const Values& values) {
  py::list names;
  for (const auto value : values) names.append(name(value));
  return py::tuple(names);
}

}  // namespace

void bind_exchange(py::module_& m) {
  using py::arg;
  py::class_<RegionView>(m, "RegionView", py::buffer_protocol(), "Memory of one rank, as a buffer of bytes.")
      .def_buffer([](RegionView& view) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(view.begin), py::ssize_t(view.bytes));
      });

  py::class_<DispatchState, std::shared_ptr<DispatchState>>(
      m, "DispatchState", "One dispatch, between its halves and until the handle is dropped.")
      .def_readonly("epoch", &DispatchState::epoch)
      .def_readonly("bank", &DispatchState::bank)
      .def_readonly("received", &DispatchState::received)
      .def_readonly("tokens", &DispatchState::tokens)
      .def_readonly("has_weights", &DispatchState::has_weights)
      .def_readonly("arrived", &DispatchState::arrived)
      .def_property_readonly("num_rows", [](const DispatchState& s) { return s.entries.size(); })
      .def("wait_ns", &wait_ns<DispatchState>, arg("num_ranks"));

  py::class_<CombineState, std::shared_ptr<CombineState>>(m, "CombineState",
                                                          "One combine, between its halves.")
      .def_readonly("epoch", &CombineState::epoch)
      .def_readonly("bank", &CombineState::bank)
      .def_readonly("received", &CombineState::received)
      .def("wait_ns", &wait_ns<CombineState>, arg("num_ranks"));

  py::class_<Exchange, std::shared_ptr<Exchange>>(
      m, "Exchange", "One rank's end of a group. Calls release the GIL; one thread at a time may call.")
      .def(py::init([](int fd, const Geometry& geometry, uint32_t rank, const std::vector<int32_t>& placement,
                       uint64_t timeout_ns, uint64_t liveness_ns, uint64_t spin_ns, bool mask_on_timeout) {
             return on_segment(fd, geometry, rank, placement,
                               Timing{timeout_ns, liveness_ns, spin_ns, mask_on_timeout});
           }),
           py::kw_only(), arg("fd"), arg("geometry"), arg("rank"), arg("placement"), arg("timeout_ns"),
           arg("liveness_ns"), arg("spin_ns"), arg("mask_on_timeout"))
      .def("dispatch_send", &dispatch_send, arg("x"), arg("ids"), arg("weights"), arg("tokens"),
           arg("once_per_host") = false)
      .def("dispatch_wait", &dispatch_wait, arg("state"))
      .def("dispatch_expand", &dispatch_expand, arg("state"), arg("view"), arg("rows"), arg("scales"),
           arg("row_ids"), arg("counts"), arg("offsets"))
      .def("dispatch_release", &dispatch_release, arg("state"))
      .def("combine_send", &combine_send, arg("dispatch"), arg("expert_out"), arg("weights"),
           arg("reduction"))
      .def("combine_recv", &combine_recv, arg("state"), arg("out"))
      .def("combine_release", &combine_release, arg("state"))
      .def("open_bank", &open_next, arg("op"), "Waits until the operation's next bank is free; its number.")
      .def("output_table", &outputs, arg("state"), arg("reduction"), arg("slots"), arg("terms"),
           arg("weights"), arg("width"), "Which rows combine_send returns; see row_tables.hpp.")
      .def("sum_table", &sums, arg("state"), arg("terms"), arg("weights"), arg("width"),
           "Which rows combine_recv sums; see row_tables.hpp.")
      .def("all_gather", &gather_records, arg("record"), arg("limit_ns") = 0,
           "Gathers a record from every rank. limit_ns: how long to wait for a peer that is alive; 0 = for "
           "ever.")
      .def("abort", &abort_exchange, "Ends all waits of the group with GroupAborted.")
      .def(
          "reset",
          [](Exchange& self, uint64_t dead, uint32_t generation) {
            run(self, [&](Group& g) { return reset(g, dead, generation); });
          },
          arg("dead"), arg("generation") = 0,
          "Starts a generation, 0 = the next one, without the ranks whose bits are set in `dead`.")
      .def_property_readonly("masked", [](Exchange& self) { return self.group().masked.load(); })
      .def("mask", &mask, arg("ranks"))
      .def_property_readonly("generation", [](Exchange& self) { return self.group().generation.load(); })
      .def_property_readonly("head",
                             [](Exchange& self) { return reinterpret_cast<uintptr_t>(self.group().own()); })
      .def("statistics", &statistics)
      .def("source_map", &source_map, arg("state"), arg("src_info"), arg("layout_range"))
      .def("set_faults", &set_faults, arg("faults"))
      .def("rows_region", &rows_region);

  std::vector<Phase> phases;
  for (uint32_t p = 0; p < kNumPhases; ++p) phases.push_back(Phase(p));
  m.attr("PHASES") = names_of(phases);
  m.attr("OPS") = names_of(std::vector{Op::kDispatch, Op::kCombine, Op::kVote, Op::kReset});
}

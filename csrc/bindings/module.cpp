// The Python face of the exchange: unwraps pointers, releases the GIL, calls, turns a Status into an
// exception. Shapes and dtypes were checked by ep/native.py; sizes that memory safety hangs on are checked
// here again.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <mutex>
#include <system_error>

#include "bindings/exchange.hpp"
#include "bindings/pointer.hpp"
#include "exchange/shm/phases.hpp"
#include "exchange/common/cells.hpp"
#include "exchange/common/row_tables.hpp"
#include "exchange/shm/segment.hpp"

void bind_fabric(py::module_& module);  // csrc/bindings/fabric.cpp: the transport between hosts
void bind_layout(py::module_& module);  // csrc/bindings/layout.cpp: sizes, offsets, segments
void bind_model(py::module_& module);   // csrc/bindings/cpu_kernels.cpp: the model's kernels

namespace {

using namespace ep;

std::string describe(const Status& s) {
  return std::string(name(s.op)) + "/" + name(s.phase) + ", rank " + std::to_string(s.rank) + ", peer " +
         std::to_string(s.peer) + ", expected epoch " + std::to_string(s.expected) + ", saw " +
         std::to_string(s.seen);
}

void raise(const char* type, const std::string& message) {
  py::object error = py::module_::import("ep_server.errors").attr(type);
  PyErr_SetString(error.ptr(), message.c_str());
}

void raise_status(const Status& s) {
  switch (s.code) {
    case Code::kTimeout: {
      py::object error = py::module_::import("ep_server.errors").attr("PeerTimeout");
      PyErr_SetObject(error.ptr(),
                      py::make_tuple(name(s.op), name(s.phase), s.rank, s.peer, s.expected, s.seen).ptr());
      return;
    }
    case Code::kHook:
      return raise("HookNotCalled", "rank " + std::to_string(s.rank) + ": " + name(s.op) + " of epoch " +
                                        std::to_string(s.expected) + " takes the bank of epoch " +
                                        std::to_string(s.seen) + ", which was not received or released here");
    case Code::kViolation:
      return raise("ProtocolViolation", "a cell is newer than expected or invalid: " + describe(s));
    case Code::kAborted:
      return raise("GroupAborted", s.seen == uint32_t(Code::kRequested) && s.expected == 0
                                       ? "rank " + std::to_string(s.rank) + " aborted the group"
                                       : "the group was aborted after an error in " + describe(s));
    case Code::kLost: {
      py::object error = py::module_::import("ep_server.errors").attr("PeerLost");
      PyErr_SetObject(error.ptr(), py::make_tuple(name(s.op), name(s.phase), s.rank, s.peer).ptr());
      return;
    }
    case Code::kInterrupted:
      return;  // the signal handler's own exception is set
    default:
      return raise("InternalError", "unexpected status: " + describe(s));
  }
}

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

template <class T, size_t N>
py::list numbers(const std::array<T, N>& values, size_t count) {
  py::list list;
  for (size_t i = 0; i < count; ++i) list.append(values[i]);
  return list;
}

py::dict statistics(Exchange& exchange) {
  static constexpr const char* kParts[kNumParts] = {"send", "wait", "expand", "reduce", "total"};
  const Group& group = exchange.group();
  py::dict histograms, sums, counters, peers, experts;
  for (uint32_t op = 0; op < kTimedOps; ++op) {
    const std::string op_name = name(Op(op));
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
  counters["exchange_tokens"] = group.statistics.tokens.get();
  counters["exchange_rows"] = group.statistics.rows.get();
  counters["exchange_timeouts"] = group.statistics.timeouts.get();
  counters["exchange_sleeps"] = group.statistics.sleeps.get();
  for (uint32_t e = 0; e < group.geometry.num_experts; ++e)
    if (const int32_t local = group.local_index[e]; local >= 0)
      experts[py::int_(e)] = group.statistics.expert_tokens[local].get();
  py::dict all;
  all["histograms"] = histograms;
  all["sums"] = sums;
  all["counters"] = counters;
  all["peer_wait_ns"] = peers;
  all["expert_tokens"] = experts;
  return all;
}

py::list gather_records(Exchange& exchange, const py::bytes& record, uint64_t limit_ns) {
  const std::string_view bytes = record;
  if (bytes.size() > kVoteBytes)
    throw BadArgument("record", std::to_string(bytes.size()) + " bytes",
                      "at most " + std::to_string(kVoteBytes));
  std::array<std::byte, kMaxRanks * kVoteBytes> records;
  std::array<uint32_t, kMaxRanks> lengths;
  run(exchange, [&](Group& g) {
    return ep::all_gather(g, bytes.data(), uint32_t(bytes.size()), limit_ns, records.data(), lengths.data());
  });
  py::list list;
  for (uint32_t r = 0; r < exchange.group().geometry.num_ranks; ++r)
    list.append(py::bytes(reinterpret_cast<const char*>(records.data()) + r * kVoteBytes, lengths[r]));
  return list;
}

// DeepEP's handle: which source token every padded row came from, and where each source's rows begin.
void source_map(Exchange& exchange, const DispatchState& state, uintptr_t src_info, uintptr_t layout_range) {
  const Turn turn(exchange);
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

// Waits until the next bank of an operation may be filled; which one that is.
uint32_t open_next(Exchange& exchange, uint32_t op) {
  run(exchange, [&](Group& g) { return open_bank(g, Op(op)); });
  Group& group = exchange.group();
  return group.bank_of(group.of(Op(op)).next());
}

uint32_t answers(Exchange& exchange, const DispatchState& state, uint32_t reduction, uintptr_t slots,
                 uintptr_t terms, uintptr_t weights, uint32_t width) {
  const Turn turn(exchange);
  check_origin(exchange.group(), state, "received");
  return answer_table(exchange.group(), state, Reduction(reduction),
                      {pointer<int64_t>(slots), pointer<int64_t>(terms), pointer<float>(weights), width});
}

void sums(Exchange& exchange, const CombineState& state, uintptr_t terms, uintptr_t weights, uint32_t width) {
  const Turn turn(exchange);
  check_origin(exchange.group(), state, "combine");
  sum_table(exchange.group(), state, {nullptr, pointer<int64_t>(terms), pointer<float>(weights), width});
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native exchange and compute kernels of ep_server.";

  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const ExchangeFailure& failure) {
      raise_status(failure.status);
    } catch (const BadArgument& bad) {
      py::object error = py::module_::import("ep_server.errors").attr("InvalidArgument");
      PyErr_SetObject(error.ptr(), py::make_tuple(bad.field, bad.value, bad.allowed).ptr());
    } catch (const std::system_error& os) {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(os.code().value(), os.what()).ptr());
    }
  });

  bind_layout(m);

  py::class_<RegionView>(m, "RegionView", py::buffer_protocol()).def_buffer([](RegionView& view) {
    return py::buffer_info(reinterpret_cast<uint8_t*>(view.begin), py::ssize_t(view.bytes));
  });

  py::class_<DispatchState, std::shared_ptr<DispatchState>>(m, "DispatchState")
      .def_readonly("epoch", &DispatchState::epoch)
      .def_readonly("bank", &DispatchState::bank)
      .def_readonly("received", &DispatchState::received)
      .def_readonly("tokens", &DispatchState::tokens)
      .def_readonly("has_weights", &DispatchState::has_weights)
      .def_readonly("arrived", &DispatchState::arrived)
      .def_property_readonly("num_rows", [](const DispatchState& s) { return s.entries.size(); })
      .def("wait_ns", [](const DispatchState& s, size_t n) { return numbers(s.wait_ns, n); });

  py::class_<CombineState, std::shared_ptr<CombineState>>(m, "CombineState")
      .def_readonly("epoch", &CombineState::epoch)
      .def_readonly("bank", &CombineState::bank)
      .def_readonly("received", &CombineState::received)
      .def("wait_ns", [](const CombineState& s, size_t n) { return numbers(s.wait_ns, n); });

  py::class_<Exchange, std::shared_ptr<Exchange>>(m, "Exchange")
      .def(py::init([](int fd, const Geometry& geometry, uint32_t rank, const std::vector<int32_t>& placement,
                       uint64_t timeout_ns, uint64_t liveness_ns, uint64_t spin_ns, bool mask_on_timeout) {
             return on_segment(fd, geometry, rank, placement,
                               Timing{timeout_ns, liveness_ns, spin_ns, mask_on_timeout});
           }),
           py::kw_only(), py::arg("fd"), py::arg("geometry"), py::arg("rank"), py::arg("placement"),
           py::arg("timeout_ns"), py::arg("liveness_ns"), py::arg("spin_ns"), py::arg("mask_on_timeout"))
      .def("dispatch_send",
           [](Exchange& self, uintptr_t x, uintptr_t ids, uintptr_t weights, uint32_t tokens) {
             if (tokens > self.group().geometry.max_tokens)
               throw BadArgument("tokens", std::to_string(tokens),
                                 "at most " + std::to_string(self.group().geometry.max_tokens));
             auto state = std::make_shared<DispatchState>();
             run(self, [&](Group& g) {
               state->origin = {g.id, g.generation};
               return cpu::dispatch_send(
                   g, {pointer<void>(x), pointer<int64_t>(ids), pointer<float>(weights), tokens}, *state);
             });
             return state;
           })
      .def("dispatch_wait",
           [](Exchange& self, DispatchState& state) {
             run(self, [&](Group& g) {
               check_origin(g, state, "dispatch");
               return cpu::dispatch_wait(g, state);
             });
           })
      .def("dispatch_expand",
           [](Exchange& self, DispatchState& state, uint32_t view, uintptr_t rows, uintptr_t scales,
              uintptr_t row_ids, uintptr_t counts, uintptr_t offsets) {
             run(self, [&](Group& g) {
               check_origin(g, state, "dispatch");
               cpu::dispatch_expand(g, state,
                                    {pointer<void>(rows), pointer<void>(scales), pointer<int64_t>(row_ids),
                                     pointer<int32_t>(counts), pointer<int64_t>(offsets), View(view)});
               return Status{};
             });
           })
      .def("dispatch_release",
           [](Exchange& self, DispatchState& state) {
             run(self, [&](Group& g) {
               check_origin(g, state, "received");
               cpu::dispatch_release(g, state);
               return Status{};
             });
           })
      .def("combine_send",
           [](Exchange& self, std::shared_ptr<DispatchState> dispatch, uintptr_t expert_out,
              uintptr_t weights, uint32_t reduction) {
             auto state = std::make_shared<CombineState>();
             state->dispatch = std::move(dispatch);
             run(self, [&](Group& g) {
               check_origin(g, *state->dispatch, "received");
               state->origin = {g.id, g.generation};
               return cpu::combine_send(
                   g, {pointer<void>(expert_out), pointer<float>(weights), Reduction(reduction)}, *state);
             });
             return state;
           })
      .def("combine_recv",
           [](Exchange& self, CombineState& state, uintptr_t out) {
             run(self, [&](Group& g) {
               check_origin(g, state, "combine");
               return cpu::combine_recv(g, {pointer<void>(out)}, state);
             });
           })
      .def("combine_release",
           [](Exchange& self, CombineState& state) {
             run(self, [&](Group& g) {
               check_origin(g, state, "combine");
               cpu::combine_release(g, state);
               return Status{};
             });
           })
      .def("open_bank", &open_next)
      .def("answer_table", &answers)
      .def("sum_table", &sums)
      .def("all_gather", &gather_records, py::arg("record"), py::arg("limit_ns") = 0)
      .def("abort",
           [](Exchange& self) {
             Status status{
                 Code::kRequested, Op::kVote, Phase::kGather, self.group().rank, self.group().rank, 0, 0};
             abort_group(self.group(), status);
           })
      .def("reset",
           [](Exchange& self, uint64_t dead) { run(self, [&](Group& g) { return reset(g, dead); }); })
      .def_property_readonly("masked", [](Exchange& self) { return self.group().masked.load(); })
      .def("mask",
           [](Exchange& self, uint64_t ranks) {
             self.group().masked.fetch_or(ranks);
             wake_self(self.group());
           })
      .def_property_readonly("generation", [](Exchange& self) { return self.group().generation.load(); })
      .def("statistics", &statistics)
      .def("source_map", &source_map)
      .def("set_faults",
           [](Exchange& self,
              const std::vector<std::tuple<uint32_t, uint32_t, uint32_t, uint64_t, int64_t, uint64_t>>&
                  faults) {
             std::vector<Fault> plan;
             for (const auto& [op, phase, action, epoch, peer, delay_ns] : faults)
               plan.push_back({Op(op), Phase(phase), Action(action), epoch, peer, delay_ns});
             Turn turn(self);
             self.group().faults.set(std::move(plan));
           })
      .def("rows_region", [](Exchange& self) {
        const Group& g = self.group();
        if (g.rows_on_device)
          throw BadArgument("rows_region", "on a device", "asked for where rows are on the host");
        const auto [first, last] = g.readable_regions();
        return RegionView{self.memory(), first + g.layout.rows,
                          uint64_t(last - first) + g.layout.combine - g.layout.rows};
      });

  py::list phases;
  for (uint32_t p = 0; p < kNumPhases; ++p) phases.append(name(Phase(p)));
  m.attr("PHASES") = py::tuple(phases);
  py::list ops;
  for (Op op : {Op::kDispatch, Op::kCombine, Op::kVote, Op::kReset}) ops.append(name(op));
  m.attr("OPS") = py::tuple(ops);

  bind_model(m);
  bind_fabric(m);
}

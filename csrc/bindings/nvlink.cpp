// Exposes the exchange between the GPUs of a host: unwraps pointers and a stream, enqueues and returns.
// ep_server/exchange/nvlink has checked the tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/pointer.hpp"
#include "exchange/nvlink/await_stream.hpp"
#include "exchange/nvlink/group.hpp"
#include "exchange/nvlink/many_rows.hpp"
#include "exchange/nvlink/peer_memory.hpp"
#include "exchange/nvlink/phases.hpp"

namespace py = pybind11;

namespace {

using namespace ep;
using cuda::Group;

// op, phase, drops, epoch, delay_ns
using FaultTuple = std::tuple<uint32_t, uint32_t, uint32_t, uint64_t, uint64_t>;
// code, op, phase, rank, peer, expected, seen
using StatusTuple = std::tuple<uint32_t, std::string, std::string, uint32_t, uint32_t, uint64_t, uint64_t>;

// The first failure.
std::optional<StatusTuple> status(const Group& group) {
  const Status s = group.status();
  if (!s) return std::nullopt;
  return StatusTuple{uint32_t(s.code), name(s.op), name(s.phase), s.rank, s.peer, s.expected, s.seen};
}

py::typing::Dict<py::str, py::typing::Dict<py::object, py::object>> statistics(Group& group) {
  static constexpr const char* kParts[kNumParts] = {"send", "wait", "expand", "reduce", "total"};
  std::vector<uint64_t> by_expert;
  cuda::DeviceState state;
  {
    py::gil_scoped_release release;
    state = group.flushed(&by_expert);
  }
  const cuda::Totals& t = state.totals;
  py::dict histograms, sums, counters, peers, longest, experts;
  py::typing::Dict<py::str, py::typing::Dict<py::object, py::object>> all;
  for (uint32_t op = 0; op < cuda::kKinds; ++op) {
    const bool many = op >= kBankedOps;
    const std::string op_name = timed_name(timed(Op(op % kBankedOps), many));
    if (many && t.sums[op][uint32_t(Part::kTotal)] == 0) continue;
    for (uint32_t part = 0; part < kNumParts; ++part) {
      py::tuple counts(kNumBuckets);
      uint64_t total = 0;
      for (uint32_t b = 0; b < kNumBuckets; ++b) {
        counts[b] = t.times[op][part][b];
        total += t.times[op][part][b];
      }
      if (total == 0) continue;
      histograms[py::str(op_name + "/" + kParts[part])] = counts;
      sums[py::str(op_name + "/" + kParts[part])] = t.sums[op][part];
    }
    counters[py::str("bytes/" + op_name)] = many ? t.bulk_bytes[op % kBankedOps] : state.tally[op].bytes;
    counters[py::str("bytes_local/" + op_name)] =
        many ? t.bulk_bytes_local[op % kBankedOps] : state.tally[op].bytes_local;
    for (uint32_t peer = 0; peer < group.device().num_ranks; ++peer) {
      peers[py::make_tuple(op_name, peer)] = t.peer_wait_ns[op][peer];
      longest[py::make_tuple(op_name, peer)] = t.peer_wait_max_ns[op][peer];
    }
  }
  counters["exchange_tokens"] = t.tokens;
  counters["exchange_rows"] = state.tally[0].rows + t.bulk_rows;
  counters["exchange_timeouts"] = t.timeouts;
  for (size_t e = 0; e < by_expert.size(); ++e) experts[py::int_(e)] = by_expert[e];
  all["histograms"] = histograms;
  all["sums"] = sums;
  all["counters"] = counters;
  all["peer_wait_ns"] = peers;
  all["peer_wait_max_ns"] = longest;
  all["local_expert_tokens"] = experts;
  return all;
}

void dispatch(Group& group, uintptr_t stream, uint32_t halves, uint32_t num_sms, uint32_t tokens, bool narrow,
              const cuda::DispatchSendArgs& send, const cuda::DispatchRecvArgs& recv, uintptr_t handle) {
  const cuda::OnDevice here(group.ordinal());
  const cuda::Launch launch{pointer<CUstream_st>(stream), num_sms, tokens, narrow, group.overlaps()};
  cuda::check(
      cuda::dispatch(launch, cuda::Halves(halves), group.device(), send, recv, pointer<std::byte>(handle)),
      "dispatch");
}

void combine(Group& group, uintptr_t stream, uint32_t halves, uint32_t num_sms, uint32_t tokens, bool narrow,
             const cuda::CombineSendArgs& send, const cuda::CombineRecvArgs& recv, uintptr_t handle) {
  const cuda::OnDevice here(group.ordinal());
  const cuda::Launch launch{pointer<CUstream_st>(stream), num_sms, tokens, narrow, group.overlaps()};
  cuda::check(
      cuda::combine(launch, cuda::Halves(halves), group.device(), send, recv, pointer<std::byte>(handle)),
      "combine");
}

void release(Group& group, uintptr_t stream, uintptr_t handle) {
  const cuda::OnDevice here(group.ordinal());
  cuda::check(cuda::release(pointer<CUstream_st>(stream), group.device(), pointer<std::byte>(handle)),
              "release");
}

void publish(Group& group, uintptr_t stream) {
  const cuda::OnDevice here(group.ordinal());
  cuda::check(cuda::publish(pointer<CUstream_st>(stream), group.device()), "publish");
}

// Runs one kernel of bulk.hpp on `num_sms` multiprocessors.
template <auto kLaunch, class Args>
void run_bulk(Group& group, uintptr_t stream, uint32_t num_sms, const Args& args) {
  const cuda::OnDevice here(group.ordinal());
  cuda::check(kLaunch({pointer<CUstream_st>(stream), num_sms}, group.device(), args), "bulk");
}

// The plan's ticket becomes the one awaited, and its kernel reports to the host.
void bulk_plan(Group& group, uintptr_t stream, cuda::BulkPlanArgs args) {
  args.report = args.ticket == 0 ? nullptr : const_cast<cuda::BulkReport*>(group.report());
  run_bulk<cuda::bulk_plan>(group, stream, 0, args);
}

// Rows and rows of each local expert, once the plan of this ticket has reported; None = not within limit_ns.
std::optional<std::tuple<uint32_t, std::vector<int32_t>>> bulk_report(const Group& group, uint64_t ticket,
                                                                      uint32_t local_experts,
                                                                      uint64_t limit_ns) {
  const volatile cuda::BulkReport* report = group.report();
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(limit_ns);
  while (report->ticket != ticket)
    if (std::chrono::steady_clock::now() > end) return std::nullopt;
  __sync_synchronize();
  std::vector<int32_t> rows(local_experts);
  for (uint32_t e = 0; e < local_experts; ++e) rows[e] = report->expert_rows[e];
  return std::tuple{uint32_t(report->rows), std::move(rows)};
}

void bulk_stores(Group& group, uintptr_t stream, uint32_t num_sms, uint32_t peer, uint64_t bytes) {
  const cuda::OnDevice here(group.ordinal());
  cuda::check(cuda::bulk_stores({pointer<CUstream_st>(stream), num_sms}, group.device(), peer, bytes),
              "bulk_stores");
}

uint64_t bulk_operations(Group& group) {
  std::vector<uint64_t> unused;
  return group.snapshot(&unused).bulk_operations >> cuda::kTicketShift;
}

// See delay.hpp. op: 0 = dispatch, 1 = combine.
void delay(Group& group, uintptr_t stream, uint32_t op, uint32_t halves, bool next_reads_ahead,
           uintptr_t handle) {
  const cuda::OnDevice here(group.ordinal());
  const cuda::Delayed delayed{Op(op), cuda::Halves(halves), next_reads_ahead, pointer<DeviceHandle>(handle)};
  cuda::check(cuda::delay(pointer<CUstream_st>(stream), group.overlaps(), group.device(), group.delay_state(),
                          delayed),
              "delay");
}

void compare_clocks(Group& group, uintptr_t stream) {
  const cuda::OnDevice here(group.ordinal());
  cuda::check(cuda::compare_clocks(pointer<CUstream_st>(stream), group.device(), group.delay_state()),
              "compare_clocks");
}

void set_faults(Group& group, const std::vector<FaultTuple>& faults) {
  std::vector<cuda::DeviceFault> plan;
  for (const auto& [op, phase, drops, epoch, delay_ns] : faults)
    plan.push_back({Op(op), Phase(phase), drops, 0, epoch, delay_ns});
  group.set_faults(plan);
}

// Epochs of the last dispatch and combine sent, and the masked ranks.
std::tuple<uint64_t, uint64_t, uint32_t> epochs(Group& group) {
  std::vector<uint64_t> unused;
  const cuda::DeviceState state = group.snapshot(&unused);
  return {state.tally[0].sends >> cuda::kTicketShift, state.tally[1].sends >> cuda::kTicketShift,
          state.control.masked | state.control.masked_by_host};
}

void bind_many(py::module_& m) {
  py::class_<cuda::ManyRouteArgs>(m, "ManyRouteArgs")
      .def(py::init([](uintptr_t x, uintptr_t ids, uintptr_t in_rank, uintptr_t placed, uintptr_t codes,
                       uintptr_t scales, uint32_t tokens, uint32_t stride) {
             return cuda::ManyRouteArgs{pointer<void>(x),
                                        pointer<int64_t>(ids),
                                        pointer<uint8_t>(in_rank),
                                        pointer<int64_t>(placed),
                                        pointer<void>(codes),
                                        pointer<uint32_t>(scales),
                                        tokens,
                                        stride};
           }),
           py::kw_only(), py::arg("x"), py::arg("ids"), py::arg("in_rank"), py::arg("placed"),
           py::arg("codes"), py::arg("scales"), py::arg("tokens"), py::arg("stride"));
  py::class_<cuda::ManyOrderArgs>(m, "ManyOrderArgs")
      .def(py::init([](uintptr_t ids, uintptr_t prefix, uintptr_t sums, uintptr_t counts, uintptr_t offsets,
                       uintptr_t row_ids, uintptr_t places, uintptr_t expert_stats, uint32_t rows,
                       uint32_t top_k, uint32_t capacity) {
             return cuda::ManyOrderArgs{pointer<int64_t>(ids),
                                        pointer<int32_t>(prefix),
                                        pointer<int32_t>(sums),
                                        pointer<int32_t>(counts),
                                        pointer<int64_t>(offsets),
                                        pointer<int64_t>(row_ids),
                                        pointer<int32_t>(places),
                                        pointer<int32_t>(expert_stats),
                                        rows,
                                        top_k,
                                        capacity};
           }),
           py::kw_only(), py::arg("ids"), py::arg("prefix"), py::arg("sums"), py::arg("counts"),
           py::arg("offsets"), py::arg("row_ids"), py::arg("places"), py::arg("expert_stats"),
           py::arg("rows"), py::arg("top_k"), py::arg("capacity"));
  py::class_<cuda::ManySumArgs>(m, "ManySumArgs")
      .def(py::init([](uintptr_t expert_out, uintptr_t ids, uintptr_t weights, uintptr_t places,
                       uintptr_t prefix, uintptr_t out, uint32_t rows, uint32_t top_k, uint32_t capacity) {
             return cuda::ManySumArgs{pointer<void>(expert_out),
                                      pointer<int64_t>(ids),
                                      pointer<float>(weights),
                                      pointer<int32_t>(places),
                                      pointer<int32_t>(prefix),
                                      pointer<void>(out),
                                      rows,
                                      top_k,
                                      capacity};
           }),
           py::kw_only(), py::arg("expert_out"), py::arg("ids"), py::arg("weights"), py::arg("places"),
           py::arg("prefix"), py::arg("out"), py::arg("rows"), py::arg("top_k"), py::arg("capacity"));
  m.def("order_blocks", &cuda::order_blocks, py::arg("rows"));
}

void bind_bulk(py::module_& m) {
  py::class_<cuda::BulkPlanArgs>(m, "BulkPlanArgs")
      .def(py::init([](uintptr_t in_rank, uintptr_t expert_tokens, uintptr_t places, uintptr_t prefix,
                       uint64_t ticket, uint32_t tokens, uint32_t local_experts, uint32_t alignment) {
             return cuda::BulkPlanArgs{pointer<uint8_t>(in_rank),
                                       pointer<int32_t>(expert_tokens),
                                       pointer<int32_t>(places),
                                       pointer<int32_t>(prefix),
                                       nullptr,
                                       ticket,
                                       tokens,
                                       local_experts,
                                       alignment};
           }),
           py::kw_only(), py::arg("in_rank"), py::arg("expert_tokens"), py::arg("places"), py::arg("prefix"),
           py::arg("ticket"), py::arg("tokens"), py::arg("local_experts"), py::arg("alignment"));
  py::class_<cuda::BulkDispatchArgs>(m, "BulkDispatchArgs")
      .def(py::init([](uintptr_t x, uintptr_t scales, uintptr_t ids, uintptr_t weights, uintptr_t places,
                       uintptr_t prefix, uint64_t offset, uint32_t capacity, uint32_t tokens,
                       uint32_t row_bytes, uint32_t scale_words, uint32_t top_k, uint32_t local_experts,
                       uint32_t scale_row, uint32_t scale_column, bool sources, bool fill) {
             return cuda::BulkDispatchArgs{pointer<void>(x),
                                           pointer<uint32_t>(scales),
                                           pointer<int64_t>(ids),
                                           pointer<float>(weights),
                                           pointer<int32_t>(places),
                                           pointer<int32_t>(prefix),
                                           {offset, capacity},
                                           tokens,
                                           row_bytes,
                                           scale_words,
                                           top_k,
                                           local_experts,
                                           scale_row,
                                           scale_column,
                                           sources,
                                           fill};
           }),
           py::kw_only(), py::arg("x"), py::arg("scales") = 0, py::arg("ids") = 0, py::arg("weights") = 0,
           py::arg("places"), py::arg("prefix"), py::arg("offset"), py::arg("capacity"), py::arg("tokens"),
           py::arg("row_bytes"), py::arg("scale_words") = 0, py::arg("top_k") = 0,
           py::arg("local_experts") = 0, py::arg("scale_row") = 0, py::arg("scale_column") = 0,
           py::arg("sources") = false, py::arg("fill") = false);
  py::class_<cuda::BulkCombineArgs>(m, "BulkCombineArgs")
      .def(py::init([](uintptr_t x, uintptr_t weights, uintptr_t first_bias, uintptr_t second_bias,
                       uintptr_t places, uintptr_t prefix, uintptr_t out, uintptr_t out_weights,
                       uint64_t offset, uint32_t capacity, uint32_t tokens, uint32_t row_bytes,
                       uint32_t top_k) {
             return cuda::BulkCombineArgs{pointer<void>(x),
                                          pointer<float>(weights),
                                          {pointer<void>(first_bias), pointer<void>(second_bias)},
                                          pointer<int32_t>(places),
                                          pointer<int32_t>(prefix),
                                          pointer<void>(out),
                                          pointer<float>(out_weights),
                                          {offset, capacity},
                                          tokens,
                                          row_bytes,
                                          top_k};
           }),
           py::kw_only(), py::arg("x"), py::arg("weights") = 0, py::arg("first_bias") = 0,
           py::arg("second_bias") = 0, py::arg("places"), py::arg("prefix"), py::arg("out"),
           py::arg("out_weights") = 0, py::arg("offset"), py::arg("capacity"), py::arg("tokens"),
           py::arg("row_bytes"), py::arg("top_k") = 0);
}

}  // namespace

void bind_nvlink(py::module_& m) {
  bind_bulk(m);
  bind_many(m);
  py::class_<cuda::DispatchSendArgs>(m, "DispatchSendArgs")
      .def(py::init([](uintptr_t x, uintptr_t ids, uintptr_t weights, uintptr_t tokens_on_device,
                       uint32_t tokens) {
             return cuda::DispatchSendArgs{pointer<void>(x),
                                           pointer<int64_t>(ids),
                                           pointer<float>(weights),
                                           pointer<int32_t>(tokens_on_device),
                                           tokens,
                                           0};
           }),
           py::kw_only(), py::arg("x") = 0, py::arg("ids") = 0, py::arg("weights") = 0,
           py::arg("tokens_on_device") = 0, py::arg("tokens") = 0);
  py::class_<cuda::DispatchRecvArgs>(m, "DispatchRecvArgs")
      .def(py::init([](uint32_t view, uint32_t capacity, uint32_t scale_pitch, uintptr_t rows,
                       uintptr_t scales, uintptr_t row_ids, uintptr_t counts, uintptr_t offsets,
                       uintptr_t src_info, uintptr_t layout_range, uintptr_t expert_stats,
                       uintptr_t wait_stats, bool next_reads_ahead) {
             return cuda::DispatchRecvArgs{View(view),
                                           capacity,
                                           scale_pitch,
                                           pointer<void>(rows),
                                           pointer<uint32_t>(scales),
                                           pointer<int64_t>(row_ids),
                                           pointer<int32_t>(counts),
                                           pointer<int64_t>(offsets),
                                           pointer<int32_t>(src_info),
                                           pointer<int64_t>(layout_range),
                                           pointer<int32_t>(expert_stats),
                                           pointer<int64_t>(wait_stats),
                                           next_reads_ahead};
           }),
           py::kw_only(), py::arg("view") = 0, py::arg("capacity") = 0, py::arg("scale_pitch") = 0,
           py::arg("rows") = 0, py::arg("scales") = 0, py::arg("row_ids") = 0, py::arg("counts") = 0,
           py::arg("offsets") = 0, py::arg("src_info") = 0, py::arg("layout_range") = 0,
           py::arg("expert_stats") = 0, py::arg("wait_stats") = 0, py::arg("next_reads_ahead") = false);
  py::class_<cuda::CombineSendArgs>(m, "CombineSendArgs")
      .def(py::init([](uintptr_t expert_out, uintptr_t weights, uint32_t reduction, uint32_t wire,
                       bool pushes_weights, bool frees_dispatch) {
             return cuda::CombineSendArgs{pointer<void>(expert_out),
                                          pointer<float>(weights),
                                          Reduction(reduction),
                                          cuda::Wire(wire),
                                          pushes_weights,
                                          frees_dispatch,
                                          0};
           }),
           py::kw_only(), py::arg("expert_out") = 0, py::arg("weights") = 0, py::arg("reduction") = 0,
           py::arg("wire") = 0, py::arg("pushes_weights") = false, py::arg("frees_dispatch") = false);
  py::class_<cuda::AddNorm>(m, "AddNorm")
      .def(py::init([](uintptr_t residual, uintptr_t shared, uintptr_t weight, float eps) {
             return cuda::AddNorm{pointer<void>(residual), pointer<void>(shared), pointer<void>(weight), eps};
           }),
           py::kw_only(), py::arg("residual") = 0, py::arg("shared") = 0, py::arg("weight") = 0,
           py::arg("eps") = 0.0f);
  py::class_<cuda::CombineRecvArgs>(m, "CombineRecvArgs")
      .def(py::init([](uintptr_t out, uintptr_t weights, uint32_t reduction, uint32_t wire,
                       uintptr_t wait_stats, bool next_reads_ahead, const cuda::AddNorm& norm) {
             return cuda::CombineRecvArgs{pointer<void>(out),
                                          pointer<float>(weights),
                                          Reduction(reduction),
                                          cuda::Wire(wire),
                                          pointer<int64_t>(wait_stats),
                                          0,
                                          next_reads_ahead,
                                          norm};
           }),
           py::kw_only(), py::arg("out") = 0, py::arg("weights") = 0, py::arg("reduction") = 0,
           py::arg("wire") = 0, py::arg("wait_stats") = 0, py::arg("next_reads_ahead") = false,
           py::arg("norm") = cuda::AddNorm{});

  py::class_<nvlink::Region>(m, "PeerMemory", "Zeroed GPU memory that other processes of this host can map.")
      .def(py::init(&nvlink::Region::create), py::arg("device"), py::arg("bytes"), py::arg("seconds"),
           py::call_guard<py::gil_scoped_release>(), "seconds: for the GPU to zero it.")
      .def_static(
          "attach",
          [](int device, uint64_t bytes, int fd) {
            auto region = nvlink::Region::reserve(device, bytes);
            region->attach(device, fd);
            return region;
          },
          py::arg("device"), py::arg("bytes"), py::arg("fd"), py::call_guard<py::gil_scoped_release>())
      .def("export_fd", &nvlink::Region::export_fd)
      .def_property_readonly(
          "address", [](const nvlink::Region& region) { return reinterpret_cast<uintptr_t>(region.data()); });

  py::class_<Group>(m, "Group", "One rank's end of a group of GPUs.")
      .def(py::init([](uint32_t num_ranks, uint32_t max_tokens, uint32_t hidden, uint32_t top_k,
                       uint32_t num_banks, uint32_t payload, uint32_t reduction, uint32_t rank,
                       const std::vector<int32_t>& placement, int device, uint64_t timeout_ns,
                       bool mask_on_timeout, uint64_t heap_bytes, double idle_seconds) {
             const Geometry geometry{
                 num_ranks, uint32_t(placement.size()), max_tokens,           hidden, top_k,
                 num_banks, Payload(payload),           Reduction(reduction), 0};
             return std::make_unique<Group>(
                 geometry, rank, placement,
                 cuda::Options{device, timeout_ns, mask_on_timeout, heap_bytes, idle_seconds});
           }),
           py::kw_only(), py::arg("num_ranks"), py::arg("max_tokens"), py::arg("hidden"), py::arg("top_k"),
           py::arg("num_banks"), py::arg("payload"), py::arg("reduction"), py::arg("rank"),
           py::arg("placement"), py::arg("device"), py::arg("timeout_ns"), py::arg("mask_on_timeout"),
           py::arg("heap_bytes"), py::arg("idle_seconds"))
      .def("export_fd", &Group::export_fd)
      .def("attach", &Group::attach, py::arg("rank"), py::arg("fd"))
      .def("abort", &Group::abort, py::call_guard<py::gil_scoped_release>())
      .def(
          "watch",
          [](Group& self, uintptr_t head, const py::object&) { self.watch(pointer<std::byte>(head)); },
          py::arg("head"), py::arg("owner"), py::keep_alive<1, 3>(),
          "head: see AbortWatch. owner: of its memory, kept alive.")
      .def("dispatch", &dispatch, py::arg("stream"), py::arg("halves"), py::arg("num_sms"), py::arg("tokens"),
           py::arg("narrow"), py::arg("send"), py::arg("recv"), py::arg("handle"),
           py::call_guard<py::gil_scoped_release>())
      .def("combine", &combine, py::arg("stream"), py::arg("halves"), py::arg("num_sms"), py::arg("tokens"),
           py::arg("narrow"), py::arg("send"), py::arg("recv"), py::arg("handle"),
           py::call_guard<py::gil_scoped_release>())
      .def("release", &release, py::arg("stream"), py::arg("handle"),
           py::call_guard<py::gil_scoped_release>())
      .def("publish", &publish, py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def("bulk_plan", &bulk_plan, py::arg("stream"), py::arg("args"),
           py::call_guard<py::gil_scoped_release>())
      .def("bulk_report", &bulk_report, py::arg("ticket"), py::arg("local_experts"), py::arg("limit_ns"),
           py::call_guard<py::gil_scoped_release>())
      .def("bulk_dispatch", &run_bulk<cuda::bulk_dispatch, cuda::BulkDispatchArgs>, py::arg("stream"),
           py::arg("num_sms"), py::arg("args"), py::call_guard<py::gil_scoped_release>())
      .def("bulk_combine", &run_bulk<cuda::bulk_combine, cuda::BulkCombineArgs>, py::arg("stream"),
           py::arg("num_sms"), py::arg("args"), py::call_guard<py::gil_scoped_release>())
      .def("many_route", &run_bulk<cuda::many_route, cuda::ManyRouteArgs>, py::arg("stream"),
           py::arg("num_sms"), py::arg("args"))
      .def("many_order", &run_bulk<cuda::many_order, cuda::ManyOrderArgs>, py::arg("stream"),
           py::arg("num_sms"), py::arg("args"))
      .def("many_sum", &run_bulk<cuda::many_sum, cuda::ManySumArgs>, py::arg("stream"), py::arg("num_sms"),
           py::arg("args"))
      .def("bulk_stores", &bulk_stores, py::arg("stream"), py::arg("num_sms"), py::arg("peer"),
           py::arg("bytes"), py::call_guard<py::gil_scoped_release>())
      .def("bulk_operations", &bulk_operations, py::call_guard<py::gil_scoped_release>())
      .def("heap", [](const Group& self) { return reinterpret_cast<uintptr_t>(self.heap()); })
      .def("delay", &delay, py::arg("stream"), py::arg("op"), py::arg("halves"), py::arg("next_reads_ahead"),
           py::arg("handle"), py::call_guard<py::gil_scoped_release>())
      .def("set_delay", &Group::set_delay, py::arg("ns"), py::call_guard<py::gil_scoped_release>())
      .def("empty_clock_cells", &Group::empty_clock_cells, py::call_guard<py::gil_scoped_release>())
      .def("compare_clocks", &compare_clocks, py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def("clocks_ahead", &Group::clocks_ahead, py::call_guard<py::gil_scoped_release>())
      .def("set_faults", &set_faults, py::arg("faults"), py::call_guard<py::gil_scoped_release>())
      .def("status", &status)
      .def("statistics", &statistics)
      .def("epochs", &epochs, py::call_guard<py::gil_scoped_release>())
      .def("reset", &Group::reset, py::arg("base"), py::arg("masked"),
           py::call_guard<py::gil_scoped_release>())
      .def("mask", &Group::mask, py::arg("ranks"), py::call_guard<py::gil_scoped_release>())
      .def(
          "rows_at",
          [](const Group& self, uint32_t bank) {
            return reinterpret_cast<uintptr_t>(self.device().own() +
                                               self.device().layout.slot_at(bank, 0, 0));
          },
          py::arg("bank"))
      .def_property_readonly("row_pitch", [](const Group& self) { return self.device().layout.slot_pitch; })
      .def_property_readonly("scale_offset",
                             [](const Group& self) { return self.device().layout.scale_offset; })
      .def_property_readonly("handle_bytes",
                             [](const Group& self) { return DeviceHandle::bytes(self.device().layout); })
      .def_property_readonly("bytes", &Group::bytes)
      .def_property_readonly("num_sms", &Group::num_sms);

  m.attr("MAX_RANKS") = cuda::kMaxPeers;
  m.attr("BAD_IDS") = uint32_t(cuda::kBadIds);
  m.attr("CAPACITY") = uint32_t(cuda::kCapacity);
  m.attr("REQUESTED") = uint32_t(Code::kRequested);
}

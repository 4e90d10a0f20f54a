// Exposes the exchange between the GPUs of a host: unwraps pointers and a stream, enqueues and returns.
// ep_server/exchange/nvlink has checked the tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/pointer.hpp"
#include "exchange/nvlink/group.hpp"
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
  for (uint32_t op = 0; op < kBankedOps; ++op) {
    const std::string op_name = name(Op(op));
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
    counters[py::str("bytes/" + op_name)] = state.tally[op].bytes;
    counters[py::str("bytes_local/" + op_name)] = state.tally[op].bytes_local;
    for (uint32_t peer = 0; peer < group.device().num_ranks; ++peer) {
      peers[py::make_tuple(op_name, peer)] = t.peer_wait_ns[op][peer];
      longest[py::make_tuple(op_name, peer)] = t.peer_wait_max_ns[op][peer];
    }
  }
  counters["exchange_tokens"] = t.tokens;
  counters["exchange_rows"] = state.tally[0].rows;
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

}  // namespace

void bind_nvlink(py::module_& m) {
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

  py::class_<Group>(m, "Group", "One rank's end of a group of GPUs.")
      .def(py::init([](uint32_t num_ranks, uint32_t max_tokens, uint32_t hidden, uint32_t top_k,
                       uint32_t num_banks, uint32_t payload, uint32_t reduction, uint32_t rank,
                       const std::vector<int32_t>& placement, int device, uint64_t timeout_ns,
                       bool mask_on_timeout) {
             const Geometry geometry{
                 num_ranks, uint32_t(placement.size()), max_tokens,           hidden, top_k,
                 num_banks, Payload(payload),           Reduction(reduction), 0};
             return std::make_unique<Group>(geometry, rank, placement,
                                            cuda::Options{device, timeout_ns, mask_on_timeout});
           }),
           py::kw_only(), py::arg("num_ranks"), py::arg("max_tokens"), py::arg("hidden"), py::arg("top_k"),
           py::arg("num_banks"), py::arg("payload"), py::arg("reduction"), py::arg("rank"),
           py::arg("placement"), py::arg("device"), py::arg("timeout_ns"), py::arg("mask_on_timeout"))
      .def("export_fd", &Group::export_fd)
      .def("attach", &Group::attach, py::arg("rank"), py::arg("fd"))
      .def("dispatch", &dispatch, py::arg("stream"), py::arg("halves"), py::arg("num_sms"), py::arg("tokens"),
           py::arg("narrow"), py::arg("send"), py::arg("recv"), py::arg("handle"),
           py::call_guard<py::gil_scoped_release>())
      .def("combine", &combine, py::arg("stream"), py::arg("halves"), py::arg("num_sms"), py::arg("tokens"),
           py::arg("narrow"), py::arg("send"), py::arg("recv"), py::arg("handle"),
           py::call_guard<py::gil_scoped_release>())
      .def("release", &release, py::arg("stream"), py::arg("handle"),
           py::call_guard<py::gil_scoped_release>())
      .def("publish", &publish, py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def("set_faults", &set_faults, py::arg("faults"))
      .def("status", &status)
      .def("statistics", &statistics)
      .def("epochs", &epochs)
      .def("reset", &Group::reset, py::arg("base"), py::arg("masked"))
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
}

// The Python face of the exchange on GPUs: unwraps pointers and a stream, enqueues, returns. Tensors were
// checked by ep/cuda.py. A module of its own: it is imported only where a driver is.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>

#include "bindings/pointer.hpp"
#include "exchange/nvlink/group.hpp"
#include "exchange/nvlink/phases.hpp"

namespace py = pybind11;

namespace {

using namespace ep;
using cuda::Group;

// (code, op, phase, rank, peer, expected, seen) of the first failure, or None.
py::object status(const Group& group) {
  const Status s = group.status();
  if (!s) return py::none();
  return py::make_tuple(uint32_t(s.code), name(s.op), name(s.phase), s.rank, s.peer, s.expected, s.seen);
}

py::dict statistics(Group& group) {
  static constexpr const char* kParts[kNumParts] = {"send", "wait", "expand", "reduce", "total"};
  std::vector<uint64_t> by_expert;
  cuda::DeviceState state;
  {
    py::gil_scoped_release release;
    state = group.with_running_times(&by_expert);
  }
  const cuda::Totals& t = state.totals;
  py::dict histograms, sums, counters, peers, longest, experts, all;
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

}  // namespace

void bind_experts(py::module_& m);    // bindings_experts.cpp
void bind_attention(py::module_& m);  // bindings_attention.cpp
void bind_latent(py::module_& m);     // bindings_latent.cpp
void bind_products(py::module_& m);   // bindings_products.cpp

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "The exchange of ep_server over NVLink, and products on Hopper.";
  bind_experts(m);
  bind_attention(m);
  bind_latent(m);
  bind_products(m);

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

  py::class_<Group>(m, "Group")
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
      .def(
          "dispatch",
          [](Group& self, uintptr_t stream, uint32_t halves, uint32_t num_sms, uint32_t tokens, bool narrow,
             const cuda::DispatchSendArgs& send, const cuda::DispatchRecvArgs& recv, uintptr_t handle) {
            const cuda::OnDevice here(self.ordinal());
            cuda::check(
                cuda::dispatch({pointer<CUstream_st>(stream), num_sms, tokens, narrow, self.overlaps()},
                               cuda::Halves(halves), self.device(), send, recv, pointer<std::byte>(handle)),
                "dispatch");
          },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "combine",
          [](Group& self, uintptr_t stream, uint32_t halves, uint32_t num_sms, uint32_t tokens, bool narrow,
             const cuda::CombineSendArgs& send, const cuda::CombineRecvArgs& recv, uintptr_t handle) {
            const cuda::OnDevice here(self.ordinal());
            cuda::check(
                cuda::combine({pointer<CUstream_st>(stream), num_sms, tokens, narrow, self.overlaps()},
                              cuda::Halves(halves), self.device(), send, recv, pointer<std::byte>(handle)),
                "combine");
          },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "release",
          [](Group& self, uintptr_t stream, uintptr_t handle) {
            const cuda::OnDevice here(self.ordinal());
            cuda::check(
                cuda::release(pointer<CUstream_st>(stream), self.device(), pointer<std::byte>(handle)),
                "release");
          },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "publish",
          [](Group& self, uintptr_t stream) {
            const cuda::OnDevice here(self.ordinal());
            cuda::check(cuda::publish(pointer<CUstream_st>(stream), self.device()), "publish");
          },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "set_faults",
          [](Group& self,
             const std::vector<std::tuple<uint32_t, uint32_t, uint32_t, uint64_t, uint64_t>>& all) {
            std::vector<cuda::DeviceFault> faults;
            for (const auto& [op, phase, drops, epoch, delay_ns] : all)
              faults.push_back({Op(op), Phase(phase), drops, 0, epoch, delay_ns});
            self.set_faults(faults);
          },
          py::arg("faults"))
      .def("status", &status)
      .def("statistics", &statistics)
      .def("epochs",
           [](Group& self) {
             std::vector<uint64_t> unused;
             const cuda::DeviceState state = self.snapshot(&unused);
             return py::make_tuple(state.tally[0].sends >> cuda::kTicketShift,
                                   state.tally[1].sends >> cuda::kTicketShift,
                                   state.control.masked | state.control.masked_by_host);
           })
      .def("reset", &Group::reset, py::arg("base"), py::arg("masked"))
      .def("mask", &Group::mask, py::call_guard<py::gil_scoped_release>())
      .def("rows_at",
           [](const Group& self, uint32_t bank) {
             return reinterpret_cast<uintptr_t>(self.device().own() +
                                                self.device().layout.slot_at(bank, 0, 0));
           })
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

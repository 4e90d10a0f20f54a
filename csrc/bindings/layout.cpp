// Exposes layout.hpp, segments and row arithmetic. Python asks here for sizes and offsets. It never computes
// one itself.
#include "exchange/common/layout.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "exchange/common/status.hpp"
#include "exchange/shm/rows.hpp"
#include "exchange/shm/segment.hpp"

namespace py = pybind11;

namespace {

using namespace ep;
using RegionTuple = std::tuple<std::string, uint64_t, uint64_t>;

// Returns (name, begin, end) of every range that is written in one rank's region. A test checks that no two
// overlap.
std::vector<RegionTuple> regions(const Layout& l) {
  std::vector<RegionTuple> all;
  auto add = [&](const std::string& what, uint64_t begin, uint64_t bytes) {
    all.emplace_back(what, begin, begin + bytes);
  };
  add("identity", Head::kIdentity, 8);
  add("doorbell", Head::kDoorbell, 8);
  add("heartbeat", Head::kHeartbeat, 24);
  add("abort", Head::kAbort, 8);
  for (uint32_t r = 0; r < kMaxRanks; ++r) {
    const std::string who = "[" + std::to_string(r) + "]";
    add("abort_status" + who, Head::abort_status(r), sizeof(Status));
    for (uint32_t b = 0; b < kVoteBanks; ++b) {
      add("join" + who, Head::join(b, r), 16);
      add("vote" + who, Head::vote(b, r), Head::kVotePitch);
    }
    for (Op op : {Op::kDispatch, Op::kCombine}) {
      add("consumed" + who, Head::consumed(op, r), 8);
      for (uint32_t b = 0; b < kMaxBanks; ++b) add("header" + who, Head::header(op, b, r), 8);
    }
  }
  const uint64_t choices = uint64_t(l.max_tokens) * l.top_k;
  for (uint32_t b = 0; b < l.num_banks; ++b) {
    for (uint32_t r = 0; r < l.num_ranks; ++r) {
      add("note", l.note_at(b, r), Layout::kNote);
      add("ids", l.ids_at(b, r), choices * sizeof(int32_t));
      add("weights", l.weights_at(b, r), choices * sizeof(float));
      for (uint32_t t = 0; t < l.max_tokens; ++t) add("row", l.row_at(b, r, t), l.row_bytes + l.scale_bytes);
    }
  }
  return all;
}

// Offsets of scales, ids, weights and token numbers in a block of a heap, and its size.
std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t> bulk_block(uint64_t rows, uint64_t row_bytes,
                                                                        uint32_t scale_words, uint32_t top_k,
                                                                        bool with_ids, bool with_sources) {
  const BulkBlock b = BulkBlock::of(rows, row_bytes, scale_words, top_k, with_ids, with_sources);
  return {b.scales, b.ids, b.weights, b.sources, b.total};
}

}  // namespace

void bind_layout(py::module_& m) {
  py::class_<Geometry>(m, "Geometry",
                       "What all ranks agree on. payload and reduction are positions in exchange.Payload and "
                       ".Reduction.")
      .def(py::init([](uint32_t num_ranks, uint32_t num_experts, uint32_t max_tokens, uint32_t hidden,
                       uint32_t top_k, uint32_t num_banks, uint32_t payload, uint32_t reduction,
                       uint64_t placement_hash) {
             return Geometry{num_ranks, num_experts,      max_tokens,           hidden,        top_k,
                             num_banks, Payload(payload), Reduction(reduction), placement_hash};
           }),
           py::kw_only(), py::arg("num_ranks"), py::arg("num_experts"), py::arg("max_tokens"),
           py::arg("hidden"), py::arg("top_k"), py::arg("num_banks"), py::arg("payload"),
           py::arg("reduction"), py::arg("placement_hash"))
      .def_readonly("num_ranks", &Geometry::num_ranks)
      .def_readonly("num_experts", &Geometry::num_experts)
      .def_readonly("max_tokens", &Geometry::max_tokens)
      .def_readonly("hidden", &Geometry::hidden)
      .def_readonly("top_k", &Geometry::top_k)
      .def_readonly("num_banks", &Geometry::num_banks)
      .def_property_readonly("payload", [](const Geometry& g) { return uint32_t(g.payload); })
      .def_property_readonly("reduction", [](const Geometry& g) { return uint32_t(g.reduction); })
      .def_readonly("placement_hash", &Geometry::placement_hash);

  py::class_<Layout>(m, "Layout", "Byte offsets in one rank's region. Indices are not checked.")
      .def(py::init([](const Geometry& g) { return Layout::of(g); }), py::arg("geometry"))
      .def_readonly("row_bytes", &Layout::row_bytes)
      .def_readonly("scale_offset", &Layout::scale_offset)
      .def_readonly("scale_bytes", &Layout::scale_bytes)
      .def_readonly("row_pitch", &Layout::row_pitch)
      .def_readonly("combine_bytes", &Layout::combine_bytes)
      .def_readonly("combine_pitch", &Layout::combine_pitch)
      .def_readonly("choices_per_token", &Layout::choices_per_token)
      .def_readonly("meta", &Layout::meta)
      .def_readonly("rows", &Layout::rows)
      .def_readonly("combine", &Layout::combine)
      .def_readonly("total", &Layout::total)
      .def_property_readonly("device_in", &Layout::device_in)
      .def_property_readonly("device_out", &Layout::device_out)
      .def_property_readonly("group_bytes", [](const Layout& l) { return GroupPage::bytes(l); })
      .def(
          "region", [](const Layout& l, uint32_t rank) { return GroupPage::region(l, rank); },
          py::arg("rank"), "Where a rank's region begins in the group's segment.")
      .def("ids_at", &Layout::ids_at, py::arg("bank"), py::arg("source"))
      .def("weights_at", &Layout::weights_at, py::arg("bank"), py::arg("source"))
      .def("row_at", &Layout::row_at, py::arg("bank"), py::arg("source"), py::arg("token"))
      .def("rank_sum_at", &Layout::rank_sum_at, py::arg("bank"), py::arg("expert_rank"), py::arg("token"))
      .def("choice_at", &Layout::choice_at, py::arg("bank"), py::arg("expert_rank"), py::arg("token"),
           py::arg("k"))
      .def("regions", &regions);

  m.def(
      "device_region",
      [](const Geometry& g, uint64_t heap_bytes) {
        return BulkLayout::of(DeviceLayout::of(g).total, heap_bytes).total;
      },
      py::arg("geometry"), py::arg("heap_bytes") = 0, "Size of a rank's region on a GPU.");
  m.def("bulk_block", &bulk_block, py::kw_only(), py::arg("rows"), py::arg("row_bytes"),
        py::arg("scale_words") = 0, py::arg("top_k") = 0, py::arg("with_ids") = false,
        py::arg("with_sources") = false);
  m.attr("BULK_UNIT") = BulkLayout::kUnit;
  m.attr("BULK_MAX_ROWS") = BulkLayout::kMaxRows;
  m.attr("BULK_MAX_LOCAL_EXPERTS") = BulkLayout::kMaxLocalExperts;

  py::class_<shm::Segment, std::shared_ptr<shm::Segment>>(m, "Segment", "A mapped group segment.")
      .def(py::init<int>(), py::arg("fd"))
      .def_property_readonly("geometry", [](const shm::Segment& s) { return s.page().geometry; })
      .def_property_readonly("regions",
                             [](const shm::Segment& s) {  // where each region begins
                               std::vector<uint64_t> begins;
                               for (uint32_t i = 0; i < s.page().regions; ++i)
                                 begins.push_back(uint64_t(s.region(i) - s.base()));
                               return begins;
                             })
      .def_property_readonly("bytes", &shm::Segment::bytes)
      .def("abort_without", &shm::abort_without, py::arg("lost"), py::arg("generation"),
           "Ends every wait of the group; all ranks but `lost`, which has ended, report that it is lost.");
  m.def(
      "create_segment", [](const Geometry& g) { return shm::create(g, shm::whole_group(g)); },
      py::arg("geometry"), py::call_guard<py::gil_scoped_release>());

  py::class_<cpu::RowKernels>(m, "RowKernels", "Row arithmetic for one instruction set.")
      .def_property_readonly("name", [](const cpu::RowKernels& k) { return std::string(k.name); })
      .def(
          "weighted_sum",
          [](const cpu::RowKernels& k, bool fp32, const std::vector<uintptr_t>& rows, uintptr_t weights,
             uint32_t hidden, uintptr_t out) {
            std::vector<const void*> pointers;
            for (uintptr_t row : rows) pointers.push_back(reinterpret_cast<const void*>(row));
            (fp32 ? k.sum_fp32 : k.sum_bf16)({.rows = pointers.data(),
                                              .weights = reinterpret_cast<const float*>(weights),
                                              .count = uint32_t(rows.size()),
                                              .hidden = hidden,
                                              .out = reinterpret_cast<void*>(out)});
          },
          py::arg("fp32"), py::arg("rows"), py::arg("weights"), py::arg("hidden"), py::arg("out"))
      .def(
          "quantise",
          [](const cpu::RowKernels& k, uintptr_t x, uint32_t hidden, uint32_t payload, uintptr_t q,
             uintptr_t scales) {
            k.quantise(reinterpret_cast<const uint16_t*>(x), hidden, Payload(payload),
                       reinterpret_cast<uint8_t*>(q), reinterpret_cast<void*>(scales));
          },
          py::arg("x"), py::arg("hidden"), py::arg("payload"), py::arg("q"), py::arg("scales"));
  m.def("row_kernels", &cpu::row_kernels);

  m.attr("MAX_RANKS") = kMaxRanks;
  m.attr("MAX_TOP_K") = kMaxTopK;
  m.attr("MAX_BANKS") = kMaxBanks;
  m.attr("VOTE_BYTES") = kVoteBytes;
  m.attr("LINE_BYTES") = kLine;
  m.attr("HEAD_BYTES") = Head::kBytes;
}

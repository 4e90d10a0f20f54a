// Exposes the Hopper kernel of the experts: unwraps pointers and a stream.
// ep_server/backends/gpu/kernels/hopper/experts.py checks the arguments.
#include "kernels/hopper/experts/experts.hpp"

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/pointer.hpp"

namespace py = pybind11;

using namespace ep::experts;
using ep::pointer;

void bind_experts(py::module_& m) {
  py::class_<Work>(m, "ExpertsWork")
      .def(py::init([](uintptr_t rows, int64_t pitch, uintptr_t row_scales, int64_t scale_row,
                       int64_t scale_group, uintptr_t row_ids, uintptr_t counts, uintptr_t offsets,
                       uintptr_t scratch, uintptr_t out, uint32_t most, uint32_t held) {
             return Work{pointer<void>(rows),
                         pitch,
                         pointer<float>(row_scales),
                         scale_row,
                         scale_group,
                         pointer<int64_t>(row_ids),
                         pointer<int32_t>(counts),
                         pointer<int64_t>(offsets),
                         pointer<std::byte>(scratch),
                         pointer<void>(out),
                         most,
                         held};
           }),
           py::kw_only(), py::arg("rows") = 0, py::arg("pitch") = 0, py::arg("row_scales") = 0,
           py::arg("scale_row") = 0, py::arg("scale_group") = 0, py::arg("row_ids") = 0,
           py::arg("counts") = 0, py::arg("offsets") = 0, py::arg("scratch") = 0, py::arg("out") = 0,
           py::arg("most") = 0, py::arg("held") = 0);
  py::class_<Experts>(m, "Experts")
      .def(py::init([](int device, uintptr_t gate_up, uintptr_t down, uintptr_t gate_up_scale,
                       uintptr_t down_scale, uint32_t experts, uint32_t width, uint32_t ffn) {
             const Stored stored{pointer<void>(gate_up), pointer<void>(down), pointer<float>(gate_up_scale),
                                 pointer<float>(down_scale)};
             return std::make_unique<Experts>(device, stored, Sizes{experts, width, ffn});
           }),
           py::kw_only(), py::arg("device"), py::arg("gate_up"), py::arg("down"),
           py::arg("gate_up_scale") = 0, py::arg("down_scale") = 0, py::arg("experts"), py::arg("width"),
           py::arg("ffn"))
      .def("wide", &Experts::wide)
      .def("scratch_bytes", &Experts::scratch_bytes, py::arg("most"))
      .def(
          "run",
          [](const Experts& self, uintptr_t stream, const Work& work, uint32_t rows_of_tile, bool wide,
             bool reads_ahead) {
            self.run(pointer<CUstream_st>(stream), work, {rows_of_tile, wide, reads_ahead});
          },
          py::arg("stream"), py::arg("work"), py::kw_only(), py::arg("rows_of_tile"), py::arg("wide"),
          py::arg("reads_ahead"), py::call_guard<py::gil_scoped_release>());
}

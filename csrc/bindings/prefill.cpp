// Exposes the Hopper kernel for attention of chunks: unwraps pointers and a stream.
// ep_server/backends/gpu/kernels/hopper/prefill.py checks the arguments.
#include "kernels/hopper/prefill/prefill.hpp"

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/pointer.hpp"

namespace py = pybind11;

using namespace ep::prefill;
using ep::pointer;

void bind_prefill(py::module_& m) {
  py::class_<Prefill>(m, "Prefill", py::module_local())  // tests load the emulated one beside it
      .def(py::init([](int device, uintptr_t k, uintptr_t v, uintptr_t rotary, uint64_t positions,
                       uint32_t kv_heads, uint32_t group, uint32_t block_size, float scale,
                       uintptr_t scratch) {
             return std::make_unique<Prefill>(device,
                                              Shape{pointer<void>(k), pointer<void>(v), pointer<void>(rotary),
                                                    positions, kv_heads, group, block_size},
                                              scale, pointer<void>(scratch));
           }),
           py::kw_only(), py::arg("device"), py::arg("k"), py::arg("v"), py::arg("rotary"),
           py::arg("positions"), py::arg("kv_heads"), py::arg("group"), py::arg("block_size"),
           py::arg("scale"), py::arg("scratch"))
      .def_static("scratch_bytes", &Prefill::scratch_bytes, py::kw_only(), py::arg("device"))
      .def(
          "run",
          [](const Prefill& self, uintptr_t stream, uintptr_t q, uint64_t q_pitch, uintptr_t out,
             uint32_t row_heads, uintptr_t query_start, uintptr_t lengths, uintptr_t blocks,
             uint32_t blocks_pitch, uint32_t tokens, uint32_t sequences, uintptr_t k_scale,
             uintptr_t v_scale) {
            self.run(pointer<CUstream_st>(stream),
                     {pointer<void>(q), q_pitch, pointer<void>(out), row_heads, pointer<int32_t>(query_start),
                      pointer<int32_t>(lengths), pointer<int32_t>(blocks), blocks_pitch, tokens, sequences,
                      pointer<float>(k_scale), pointer<float>(v_scale)});
          },
          py::kw_only(), py::arg("stream"), py::arg("q"), py::arg("q_pitch"), py::arg("out"),
          py::arg("row_heads"), py::arg("query_start"), py::arg("lengths"), py::arg("blocks"),
          py::arg("blocks_pitch"), py::arg("tokens"), py::arg("sequences"), py::arg("k_scale"),
          py::arg("v_scale"), py::call_guard<py::gil_scoped_release>());
}

// Exposes the Hopper kernel of multi-head latent attention (MLA): unwraps pointers and a stream.
// ep_server/backends/gpu/kernels/hopper/mla.py checks the arguments.
#include "kernels/hopper/mla/mla.hpp"

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/pointer.hpp"

namespace py = pybind11;

using namespace ep::mla;
using ep::pointer;

void bind_mla(py::module_& m) {
  py::class_<Work>(m, "MlaWork")
      .def(py::init([](uint32_t count, uintptr_t lengths, uintptr_t blocks, uint32_t blocks_pitch,
                       uintptr_t sums, uintptr_t stats) {
             return Work{nullptr,      count,   pointer<int32_t>(lengths), pointer<int32_t>(blocks),
                         blocks_pitch, nullptr, pointer<float>(sums),      pointer<float>(stats)};
           }),
           py::kw_only(), py::arg("count"), py::arg("lengths"), py::arg("blocks"), py::arg("blocks_pitch"),
           py::arg("sums"), py::arg("stats"));
  py::class_<LaunchConfig>(m, "MlaLaunchConfig")
      .def(py::init<uint32_t, uint32_t, uint32_t>(), py::kw_only(), py::arg("team"), py::arg("blocks"),
           py::arg("splits"));
  py::class_<Mla>(m, "Mla")
      .def(py::init([](int device, uintptr_t cache, uint64_t positions, uint32_t heads, uint32_t block_size,
                       float scale) {
             return std::make_unique<Mla>(device, Shape{pointer<void>(cache), positions, heads, block_size},
                                          scale);
           }),
           py::kw_only(), py::arg("device"), py::arg("cache"), py::arg("positions"), py::arg("heads"),
           py::arg("block_size"), py::arg("scale"))
      .def(
          "run",
          [](const Mla& self, uintptr_t stream, const Work& step, const LaunchConfig& config, uintptr_t q,
             uintptr_t out) {
            Work work = step;
            work.q = pointer<void>(q), work.out = pointer<void>(out);
            self.run(pointer<CUstream_st>(stream), work, config);
          },
          py::kw_only(), py::arg("stream"), py::arg("step"), py::arg("config"), py::arg("q"), py::arg("out"),
          py::call_guard<py::gil_scoped_release>());
}

// Exposes the Hopper attention kernel: unwraps pointers and a stream.
// ep_server/backends/gpu/kernels/hopper/attention.py checks the arguments.
#include "kernels/hopper/attention/attention.hpp"

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/pointer.hpp"

namespace py = pybind11;

using namespace ep::attention;
namespace shares = ep::shares;
using ep::pointer;

void bind_attention(py::module_& m) {
  py::class_<Work>(m, "AttentionWork")
      .def(py::init([](uint32_t count, const shares::Shares& shares, uintptr_t blocks, uint32_t blocks_pitch,
                       uintptr_t sums, uintptr_t stats) {
             return Work{nullptr,
                         0,
                         0,
                         0,
                         count,
                         shares,
                         pointer<int32_t>(blocks),
                         blocks_pitch,
                         nullptr,
                         pointer<float>(sums),
                         pointer<float>(stats)};
           }),
           py::kw_only(), py::arg("count"), py::arg("shares"), py::arg("blocks"), py::arg("blocks_pitch"),
           py::arg("sums"), py::arg("stats"));
  py::class_<LaunchConfig>(m, "AttentionLaunchConfig")
      .def(py::init<uint32_t, uint32_t>(), py::kw_only(), py::arg("team"), py::arg("blocks"));
  py::class_<Attention>(m, "Attention")
      .def(py::init([](int device, uintptr_t k, uintptr_t v, uint64_t positions, uint32_t kv_heads,
                       uint32_t group, uint32_t block_size, uintptr_t norm, uintptr_t turns, float eps,
                       float scale) {
             return std::make_unique<Attention>(
                 device, Shape{pointer<void>(k), pointer<void>(v), positions, kv_heads, group, block_size},
                 Rule{pointer<void>(norm), pointer<void>(turns), eps, scale});
           }),
           py::kw_only(), py::arg("device"), py::arg("k"), py::arg("v"), py::arg("positions"),
           py::arg("kv_heads"), py::arg("group"), py::arg("block_size"), py::arg("norm"), py::arg("turns"),
           py::arg("eps"), py::arg("scale"))
      .def(
          "run",
          [](const Attention& self, uintptr_t stream, const Work& step, const LaunchConfig& config,
             uintptr_t qkv, uint64_t pitch, uint64_t part, uint32_t parts, uintptr_t out) {
            Work work = step;
            work.qkv = pointer<void>(qkv), work.pitch = pitch, work.part = part, work.parts = parts;
            work.out = pointer<void>(out);
            self.run(pointer<CUstream_st>(stream), work, config);
          },
          py::kw_only(), py::arg("stream"), py::arg("step"), py::arg("config"), py::arg("qkv"),
          py::arg("pitch"), py::arg("part"), py::arg("parts"), py::arg("out"),
          py::call_guard<py::gil_scoped_release>());
}

// Exposes the cuts of contexts into shares: unwraps pointers and a stream.
// ep_server/backends/gpu/kernels/hopper/shares.py allocates what it fills.
#include "kernels/hopper/shares/shares.hpp"

#include <pybind11/pybind11.h>

#include "bindings/pointer.hpp"

namespace py = pybind11;

using namespace ep::shares;
using ep::pointer;

void bind_shares(py::module_& m) {
  py::class_<Shares>(m, "Shares")
      .def(py::init([](uintptr_t at, uint32_t most, uintptr_t total, uintptr_t finished) {
             return Shares{pointer<Share>(at), most, pointer<uint32_t>(total), pointer<uint32_t>(finished)};
           }),
           py::kw_only(), py::arg("at"), py::arg("most"), py::arg("total"), py::arg("finished"))
      .def(
          "cut",
          [](const Shares& self, uintptr_t stream, int device, uintptr_t lengths, uintptr_t slots,
             uint32_t sequences, uint32_t heads, uint32_t teams, uint32_t tile, uint32_t least) {
            cut(pointer<CUstream_st>(stream), device,
                {pointer<int32_t>(lengths), pointer<int32_t>(slots), sequences, heads, teams, tile, least},
                self);
          },
          py::kw_only(), py::arg("stream"), py::arg("device"), py::arg("lengths"), py::arg("slots"),
          py::arg("sequences"), py::arg("heads"), py::arg("teams"), py::arg("tile"), py::arg("least"),
          py::call_guard<py::gil_scoped_release>());
}

// Exposes the Hopper kernel of skinny products: unwraps pointers and a stream.
// ep_server/backends/gpu/kernels/hopper/products.py checks the arguments.
#include "kernels/hopper/products/products.hpp"

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/pointer.hpp"

namespace py = pybind11;

using namespace ep::products;
using ep::pointer;

void bind_products(py::module_& m) {
  py::class_<Linear>(m, "Linear")
      .def(py::init([](int device, uintptr_t weight, uint32_t n, uint32_t k, uint32_t tile, uint32_t splits) {
             return std::make_unique<Linear>(device, pointer<void>(weight), n, k, SplitK{tile, splits});
           }),
           py::kw_only(), py::arg("device"), py::arg("weight"), py::arg("n"), py::arg("k"), py::arg("tile"),
           py::arg("splits"))
      .def(
          "run",
          [](const Linear& self, uintptr_t stream, uintptr_t rows, uint64_t pitch, uint32_t count,
             uintptr_t sums, uint32_t rows_of_tile, bool lets_next_start) {
            self.run(pointer<CUstream_st>(stream), {pointer<void>(rows), pitch, count, pointer<float>(sums)},
                     {rows_of_tile, lets_next_start});
          },
          py::kw_only(), py::arg("stream"), py::arg("rows"), py::arg("pitch"), py::arg("count"),
          py::arg("sums"), py::arg("rows_of_tile"), py::arg("lets_next_start"),
          py::call_guard<py::gil_scoped_release>());
}

// The module ep_server._cuda: the NVLink exchange, the Hopper kernels and the loader of files. It is apart
// from ep_server._C because it is built only where nvcc is; it links no driver, so it can be imported without
// one.
#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_nvlink(py::module_& m);     // nvlink.cpp
void bind_experts(py::module_& m);    // experts.cpp
void bind_attention(py::module_& m);  // attention.cpp
void bind_shares(py::module_& m);     // shares.cpp
void bind_mla(py::module_& m);        // mla.cpp
void bind_prefill(py::module_& m);    // prefill.cpp
void bind_products(py::module_& m);   // products.cpp
void bind_loading(py::module_& m);    // loading.cpp

PYBIND11_MODULE(_cuda, m) {
  m.doc() =
      "NVLink exchange, Hopper kernels and loader of files. Addresses are Tensor.data_ptr(); 0 means absent.";
  bind_nvlink(m);
  bind_experts(m);
  bind_shares(m);
  bind_attention(m);
  bind_mla(m);
  bind_prefill(m);
  bind_products(m);
  bind_loading(m);
}

// The module's bindings in one piece: each file alone would spend most of its time on pybind11's headers.
// The Hopper kernels are not part of it; for attention of chunks see tests/support/gpu/emulated_hopper.
#include "bindings/cuda_module.cpp"
#include "bindings/nvlink.cpp"

void bind_experts(pybind11::module_&) {}
void bind_attention(pybind11::module_&) {}
void bind_mla(pybind11::module_&) {}
void bind_prefill(pybind11::module_&) {}
void bind_shares(pybind11::module_&) {}
void bind_products(pybind11::module_&) {}
void bind_loading(pybind11::module_&) {}

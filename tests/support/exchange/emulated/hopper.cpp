// The kernels of products are for Hopper's instructions alone: not emulated.
#include <pybind11/pybind11.h>

void bind_experts(pybind11::module_&) {}
void bind_attention(pybind11::module_&) {}
void bind_mla(pybind11::module_&) {}
void bind_prefill(pybind11::module_&) {}
void bind_products(pybind11::module_&) {}

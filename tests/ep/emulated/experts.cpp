// The experts' kernel is for Hopper's instructions alone: not emulated.
#include <pybind11/pybind11.h>

void bind_experts(pybind11::module_&) {}

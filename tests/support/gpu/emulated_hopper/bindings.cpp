// Attention of chunks as a module of its own.
#include "bindings/prefill.cpp"

extern "C" __attribute__((visibility("default"))) void emulated_multiprocessors(int count);
extern "C" __attribute__((visibility("default"))) void emulated_late_blocks(uint32_t us);

PYBIND11_MODULE(emulated_hopper, m) {
  bind_prefill(m);
  m.def("multiprocessors", &emulated_multiprocessors);
  m.def("late_blocks", &emulated_late_blocks);
}

// Exposes the CPU kernels. They take addresses and sizes; ep_server/backends/cpu checks shapes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "kernels/cpu/kernel_table.hpp"
#include "kernels/cpu/pack_weights.hpp"

namespace py = pybind11;
using namespace ep::model;

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Dtype dtype_of(bool bfloat16) { return bfloat16 ? Dtype::kBfloat16 : Dtype::kFloat32; }

// The kernels of one rank: an instruction set, threads and scratch memory. One caller at a time.
class Compute {
 public:
  Compute(int threads, const std::string& isa) : kernels_(find(isa)), pool_(threads) {}

  std::string isa() const { return kernels_.name; }
  int threads() const { return pool_.threads(); }

  void linear(const LinearParams& p) { kernels_.linear(p, pool_); }
  void expert_ffn(const ExpertFfnParams& p) { kernels_.expert_ffn(p, pool_); }
  void attention(const AttentionParams& p) { kernels_.attention(p, pool_); }
  void norm(const NormParams& p) { kernels_.norm(p, pool_); }

 private:
  const Kernels& kernels_;
  Pool pool_;
};

// Checks the one input whose wrong values would make the kernels write out of bounds.
void check_offsets(const int64_t* offsets, int64_t experts, int64_t rows) {
  bool ascending = offsets[0] == 0 && offsets[experts] == rows;
  for (int64_t e = 0; e < experts; ++e) ascending = ascending && offsets[e] <= offsets[e + 1];
  if (!ascending) throw std::invalid_argument("offsets: must ascend from 0 to " + std::to_string(rows));
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Kernels* kernels : supported()) names.emplace_back(kernels->name);
  return names;
}

}  // namespace

void bind_cpu_kernels(py::module_& m) {
  using py::arg;
  m.def("compute_isas", &isa_names, "Names of the instruction sets that run here, best first.");
  m.def(
      "packed_linear_words",
      [](bool bfloat16, int64_t n, int64_t k) { return packed_words(dtype_of(bfloat16), n, k); },
      arg("bfloat16"), arg("n"), arg("k"));
  m.def(
      "packed_gated_words",
      [](bool bfloat16, int64_t ffn, int64_t k) { return packed_gated_words(dtype_of(bfloat16), ffn, k); },
      arg("bfloat16"), arg("ffn"), arg("k"));
  m.def(
      "pack_linear",
      [](bool bfloat16, uintptr_t weight, int64_t n, int64_t k, uintptr_t out) {
        pack_linear(dtype_of(bfloat16), at<const void>(weight), n, k, at<uint32_t>(out));
      },
      py::call_guard<py::gil_scoped_release>(), arg("bfloat16"), arg("weight"), arg("n"), arg("k"),
      arg("out"));
  m.def(
      "pack_gated",
      [](bool bfloat16, uintptr_t gate_up, int64_t ffn, int64_t k, uintptr_t out) {
        pack_gated(dtype_of(bfloat16), at<const void>(gate_up), ffn, k, at<uint32_t>(out));
      },
      py::call_guard<py::gil_scoped_release>(), arg("bfloat16"), arg("gate_up"), arg("ffn"), arg("k"),
      arg("out"));

  py::class_<Compute>(m, "Compute",
                      "Kernels, threads and scratch memory of one rank. One caller at a time. bfloat16=False "
                      "means float32.")
      .def(py::init<int, const std::string&>(), arg("threads") = 1, arg("isa") = "auto")
      .def_property_readonly("isa", &Compute::isa)
      .def_property_readonly("threads", &Compute::threads)
      .def(
          "linear",
          [](Compute& self, bool bfloat16, uintptr_t x, int64_t rows, int64_t x_stride, int64_t x_batch,
             uintptr_t weight, uintptr_t bias, int64_t batch, int64_t n, int64_t k, uintptr_t out,
             int64_t out_stride, int64_t out_batch, bool out_float) {
            self.linear({.type = dtype_of(bfloat16),
                         .x = at<const void>(x),
                         .rows = rows,
                         .x_stride = x_stride,
                         .x_batch = x_batch,
                         .weight = at<const uint32_t>(weight),
                         .bias = at<const void>(bias),
                         .batch = batch,
                         .n = n,
                         .k = k,
                         .out = at<void>(out),
                         .out_stride = out_stride,
                         .out_batch = out_batch,
                         .out_float = out_float});
          },
          py::call_guard<py::gil_scoped_release>(), arg("bfloat16"), arg("x"), arg("rows"), arg("x_stride"),
          arg("x_batch"), arg("weight"), arg("bias"), arg("batch"), arg("n"), arg("k"), arg("out"),
          arg("out_stride"), arg("out_batch"), arg("out_float"))
      .def(
          "expert_ffn",
          [](Compute& self, bool bfloat16, uintptr_t x, int64_t rows, uintptr_t offsets, int64_t experts,
             int64_t hidden, int64_t ffn, uintptr_t gate_up, uintptr_t down, uintptr_t out) {
            check_offsets(at<const int64_t>(offsets), experts, rows);
            self.expert_ffn({.type = dtype_of(bfloat16),
                             .x = at<const void>(x),
                             .offsets = at<const int64_t>(offsets),
                             .experts = experts,
                             .hidden = hidden,
                             .ffn = ffn,
                             .gate_up = at<const uint32_t>(gate_up),
                             .down = at<const uint32_t>(down),
                             .out = at<void>(out)});
          },
          py::call_guard<py::gil_scoped_release>(), arg("bfloat16"), arg("x"), arg("rows"), arg("offsets"),
          arg("experts"), arg("hidden"), arg("ffn"), arg("gate_up"), arg("down"), arg("out"))
      .def(
          "attention",
          [](Compute& self, bool bfloat16, uintptr_t q, int64_t rows, int64_t q_stride, int64_t heads,
             int64_t kv_heads, int64_t k_dim, int64_t v_dim, uintptr_t k, uintptr_t v, uintptr_t blocks,
             int64_t blocks_stride, int64_t block_size, uintptr_t sequence, uintptr_t positions,
             int64_t window, float scale, uintptr_t out) {
            self.attention({.type = dtype_of(bfloat16),
                            .q = at<const void>(q),
                            .rows = rows,
                            .q_stride = q_stride,
                            .heads = heads,
                            .kv_heads = kv_heads,
                            .k_dim = k_dim,
                            .v_dim = v_dim,
                            .k = at<const void>(k),
                            .v = at<const void>(v),
                            .blocks = at<const int64_t>(blocks),
                            .blocks_stride = blocks_stride,
                            .block_size = block_size,
                            .sequence = at<const int64_t>(sequence),
                            .positions = at<const int64_t>(positions),
                            .window = window,
                            .scale = scale,
                            .out = at<void>(out)});
          },
          py::call_guard<py::gil_scoped_release>(), arg("bfloat16"), arg("q"), arg("rows"), arg("q_stride"),
          arg("heads"), arg("kv_heads"), arg("k_dim"), arg("v_dim"), arg("k"), arg("v"), arg("blocks"),
          arg("blocks_stride"), arg("block_size"), arg("sequence"), arg("positions"), arg("window"),
          arg("scale"), arg("out"))
      .def(
          "norm",
          [](Compute& self, bool bfloat16, uintptr_t x, int64_t rows, int64_t x_stride, int64_t groups,
             int64_t dim, uintptr_t weight, float eps, uintptr_t out) {
            self.norm({.type = dtype_of(bfloat16),
                       .x = at<const void>(x),
                       .rows = rows,
                       .x_stride = x_stride,
                       .groups = groups,
                       .dim = dim,
                       .weight = at<const void>(weight),
                       .eps = eps,
                       .out = at<void>(out)});
          },
          py::call_guard<py::gil_scoped_release>(), arg("bfloat16"), arg("x"), arg("rows"), arg("x_stride"),
          arg("groups"), arg("dim"), arg("weight"), arg("eps"), arg("out"));
}

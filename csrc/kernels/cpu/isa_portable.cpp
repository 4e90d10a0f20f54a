// Kernels in plain vector extensions, for the compiler's baseline target (SSE2, NEON, ...).
#include "kernels/cpu/target_begin.hpp"

namespace ep::model {
namespace {

struct Isa {
  static constexpr int kLanes = 4;    // floats per vector
  static constexpr int kRows = 2;     // rows of a GEMM tile
  static constexpr int kVectors = 4;  // vectors of a GEMM tile's columns
  static constexpr bool kDot2 = false;
  typedef float V __attribute__((vector_size(4 * kLanes)));
  static inline V splat(float x) { return V{x, x, x, x}; }
  static inline V fma(V a, V b, V c) { return a * b + c; }
};

#include "kernels/cpu/all_kernels.inc"

}  // namespace

const Kernels kPortable = {"portable", run_linear, run_expert_ffn, run_attention, run_norm};

}  // namespace ep::model

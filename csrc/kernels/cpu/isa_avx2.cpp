// Kernels for AVX2 + FMA.
#if defined(__x86_64__)
#define EP_MODEL_TARGET "avx2,fma"
#include "kernels/cpu/target_begin.hpp"

namespace ep::model {
namespace {

struct Isa {
  static constexpr int kLanes = 8;
  static constexpr int kRows = 4;
  static constexpr int kVectors = 2;
  static constexpr bool kDot2 = false;
  typedef float V __attribute__((vector_size(4 * kLanes)));
  static inline V splat(float x) { return (V)_mm256_set1_ps(x); }
  static inline V fma(V a, V b, V c) { return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
};

#include "kernels/cpu/all_kernels.inc"

}  // namespace

const Kernels kAvx2 = {"avx2", run_linear, run_expert_ffn, run_attention, run_norm};

}  // namespace ep::model
#include "kernels/cpu/target_end.hpp"
#endif

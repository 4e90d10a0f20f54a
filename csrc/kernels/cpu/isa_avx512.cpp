// Kernels for AVX-512 (F, BW, DQ, VL), without bfloat16 instructions.
#if defined(__x86_64__)
#define EP_MODEL_TARGET "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"
#include "kernels/cpu/target_begin.hpp"

namespace ep::model {
namespace {

struct Isa {
  static constexpr int kLanes = 16;
  static constexpr int kRows = 6;
  static constexpr int kVectors = 4;
  static constexpr bool kDot2 = false;
  typedef float V __attribute__((vector_size(4 * kLanes)));
  static inline V splat(float x) { return (V)_mm512_set1_ps(x); }
  static inline V fma(V a, V b, V c) { return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
};

#include "kernels/cpu/all_kernels.inc"

}  // namespace

const Kernels kAvx512 = {"avx512", run_linear, run_expert_ffn, run_attention, run_norm};

}  // namespace ep::model
#include "kernels/cpu/target_end.hpp"
#endif

// Kernels for AVX-512 with BF16: vdpbf16ps multiplies pairs of bfloat16 and adds them to FP32.
#if defined(__x86_64__)
#define EP_MODEL_TARGET "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"
#include "kernels/cpu/target_begin.hpp"

namespace ep::model {
namespace {

struct Isa {
  static constexpr int kLanes = 16;
  static constexpr int kRows = 6;
  static constexpr int kVectors = 4;
  static constexpr bool kDot2 = true;
  typedef float V __attribute__((vector_size(4 * kLanes)));
  static inline V splat(float x) { return (V)_mm512_set1_ps(x); }
  static inline V fma(V a, V b, V c) { return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
  static inline V dot2(V sum, V w, V x) { return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x); }
};

#include "kernels/cpu/all_kernels.inc"

}  // namespace

const Kernels kAvx512Bf16 = {"avx512_bf16", run_linear, run_expert_ffn, run_attention, run_norm};

}  // namespace ep::model
#include "kernels/cpu/target_end.hpp"
#endif

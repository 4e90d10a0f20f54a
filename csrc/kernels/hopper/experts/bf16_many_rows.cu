// The experts' kernel for bfloat16 weights and many rows per expert. The bandwidth from L2 to the
// multiprocessors limits it, so its tiles are larger.
#include "kernels/hopper/experts/bf16_policy.cuh"

namespace ep::experts {

cudaError_t start_wide(const Launch& launch, const Weights& weights, const Task& task) {
  switch (launch.config.rows_of_tile) {
    case 96:
      return start_kernel<Bfloat16<96, 2>>(launch, weights, task);
    case 128:
      return start_kernel<Bfloat16<128, 2>>(launch, weights, task);
    case 160:
      return start_kernel<Bfloat16<160, 2>>(launch, weights, task);
    default:
      return start_kernel<Bfloat16<192, 2>>(launch, weights, task);
  }
}

}  // namespace ep::experts

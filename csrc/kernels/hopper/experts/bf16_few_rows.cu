// The experts' kernel for bfloat16 weights and few rows per expert. Memory bandwidth limits it.
#include "kernels/hopper/experts/bf16_policy.cuh"

namespace ep::experts {

cudaError_t start(const Launch& launch, const Weights& weights, const Task& task) {
  switch (launch.config.rows_of_tile) {
    case 32:
      return start_kernel<Bfloat16<32, 1>>(launch, weights, task);
    case 48:
      return start_kernel<Bfloat16<48, 1>>(launch, weights, task);
    case 64:
      return start_kernel<Bfloat16<64, 1>>(launch, weights, task);
    case 96:
      return start_kernel<Bfloat16<96, 1>>(launch, weights, task);
    default:
      return start_kernel<Bfloat16<128, 1>>(launch, weights, task);
  }
}

}  // namespace ep::experts

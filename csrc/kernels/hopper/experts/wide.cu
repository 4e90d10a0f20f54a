// The experts' kernel for weights in bfloat16 and many rows of each expert: what L2 sends to the
// multiprocessors bounds it, so tiles are larger.
#include "kernels/hopper/experts/bfloat16.cuh"

namespace ep::experts {

cudaError_t start_wide(const Launch& launch, const Weights& weights, const Task& task) {
  switch (launch.config.rows_of_tile) {
    case 96:
      return start_kernel<Bfloat16<96, 2>>(launch, weights, task);
    case 128:
      return start_kernel<Bfloat16<128, 2>>(launch, weights, task);
    default:
      return start_kernel<Bfloat16<160, 2>>(launch, weights, task);
  }
}

}  // namespace ep::experts

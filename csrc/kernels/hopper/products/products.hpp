// Products of few rows with a weight, x @ weight.T, as partial sums that the next kernel adds up. For Hopper.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/hopper/common/tensor_map.hpp"

namespace ep::products {

inline constexpr uint32_t kDepth = 64;          // input channels of a chunk: one swizzled row of bfloat16
inline constexpr uint32_t kMostStages = 16;     // chunks of rows under way
inline constexpr uint32_t kBudget = 225 << 10;  // bytes of shared memory: a small kernel has room beside

// How a weight is spread over blocks: `tile` weight rows, 64 or 128, by one of `splits` runs of chunks.
struct SplitK {
  uint32_t tile, splits;
};

// What one launch works on; addresses of the device.
struct Work {
  const void* rows;  // [count, k] bfloat16, `pitch` bytes apart; both multiples of 16
  uint64_t pitch;
  uint32_t count;
  float* sums;  // [splits, count, n]
};

// Chosen for each launch; any gives the same bits.
struct LaunchConfig {
  uint32_t rows_of_tile;  // 32, 64 or 128; a block multiplies its weights by one such tile after the other
  bool lets_next_start;   // at once; the next kernel must wait until this one has ended before it reads sums
};

// What the kernel takes.
struct Params {
  CUtensorMap weight, rows;
  float* sums;
  uint32_t count, n, chunks;  // chunks: of all splits together
  uint32_t held, stages;      // chunks of weights and of rows that a block has room for
  uint32_t spread;            // blocks that share the tiles of rows out
  bool lets_next_start;
};

// One weight as the copy engine reads it. Of one device, on any stream, any number of launches at a time.
class Linear {
 public:
  // weight: [n, k] bfloat16, contiguous, 16-byte aligned, not owned.
  // Throws std::invalid_argument for sizes that the split does not fit, std::runtime_error for what CUDA
  // refuses.
  Linear(int device, const void* weight, uint32_t n, uint32_t k, const SplitK& split_k);

  // Enqueues; no wait. The weight may be read before the kernel ahead in the stream has ended: it must not
  // write it.
  void run(cudaStream_t stream, const Work& work, const LaunchConfig& config) const;

 private:
  int device_;
  uint32_t n_, k_, held_, num_sms_;
  SplitK split_k_;
  hopper::EncodeTiled encode_;
  CUtensorMap weight_;
};

cudaError_t start(cudaStream_t stream, const SplitK& split_k, uint32_t rows_of_tile, const Params& params);

}  // namespace ep::products

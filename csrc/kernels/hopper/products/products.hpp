// Products of few rows with a weight, x @ weight.T, as partial sums that the next kernel adds up. For Hopper.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/hopper/common/tensor_map.hpp"

namespace ep::products {

inline constexpr uint32_t kDepth = 64;          // input channels of a chunk: one swizzled row of bfloat16
inline constexpr uint32_t kMostStages = 16;     // chunks of rows in flight
inline constexpr uint32_t kBudget = 225 << 10;  // bytes of shared memory; leaves room for a small kernel

// How a weight is spread over blocks: `tile` weight rows, 64 or 128, by one of `splits` runs of chunks.
struct SplitK {
  uint32_t tile, splits;
};

// Arguments of one launch; device addresses.
struct Work {
  const void* rows;  // [count, k] bfloat16, `pitch` bytes apart; both multiples of 16
  uint64_t pitch;
  uint32_t count;
  float* sums;  // [splits, count, n]
};

// Chosen for each launch. Every choice gives the same bits.
struct LaunchConfig {
  uint32_t rows_of_tile;  // 32, 64 or 128; a block takes one tile after the other
  bool lets_next_start;   // at once; the next kernel must wait until this one has ended before it reads sums
};

// Arguments of the kernel.
struct Params {
  CUtensorMap weight, rows;
  float* sums;
  uint32_t count, n, chunks;  // chunks: of all splits together
  uint32_t held, stages;      // chunks of weights and of rows that fit into a block
  uint32_t spread;            // blocks that share the tiles of rows
  bool lets_next_start;
};

// One weight as the copy engine reads it. For one device, on any stream, with any number of launches at a
// time.
class Linear {
 public:
  // weight: [n, k] bfloat16, contiguous, 16-byte aligned, not owned.
  // Throws std::invalid_argument for sizes that the split does not fit, std::runtime_error for errors of
  // CUDA.
  Linear(int device, const void* weight, uint32_t n, uint32_t k, const SplitK& split_k);

  // Enqueues the kernel without waiting. The weight may be read before the preceding kernel of the stream has
  // ended, so that kernel must not write it.
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

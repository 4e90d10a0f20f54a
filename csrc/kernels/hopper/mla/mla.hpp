// Multi-head latent attention (MLA) with one token per sequence over the paged cache, for Hopper. Queries are
// already in the latent space. The kernel computes the softmax and sums latents. The token's own latent is
// already in the cache.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ep::mla {

inline constexpr uint32_t kDim = 576, kValues = 512;  // channels of a key; the first ones are the value
inline constexpr uint32_t kTile = 64;                 // positions processed at a time
inline constexpr uint32_t kBoxChannels = 64;
inline constexpr uint32_t kBoxes = kDim / kBoxChannels, kValueBoxes = kValues / kBoxChannels;  // per tile
inline constexpr uint32_t kLeastBlock = 16, kMostHeads = 128, kMostSplits = 64;
inline constexpr uint32_t kFewHeads = 16, kSomeHeads = 32;    // per warpgroup
inline constexpr uint32_t kWorkers = 2;                       // warpgroups per block
inline constexpr uint32_t kMostTeam = 16;                     // warpgroups, in the largest cluster
inline constexpr uint32_t kTogether = kWorkers * kSomeHeads;  // heads per block if its warpgroups share tiles

// One layer's cache, [positions, kDim] bfloat16, and its head count.
struct Shape {
  const void* cache;
  uint64_t positions;
  uint32_t heads, block_size;  // block_size: positions, a power of two
};

// Arguments of one launch: device addresses, 16-byte aligned except the int32 ones. Sequences of length 0 are
// padding and give zeros. Tables must cover lengths: the device does not check this.
struct Work {
  const void* q;  // [count, heads, kDim] bfloat16
  uint32_t count;
  const int32_t *lengths, *blocks;  // blocks: tables
  uint32_t blocks_pitch;            // entries between two tables
  void* out;                        // [count, heads, kValues] bfloat16
  // With splits > 1: [count, heads, splits, kValues], unnormalised, and [.., 2], maximum and sum.
  float *sums, *stats;
};

// Chosen for each launch. team: warpgroups that share an item's tiles and join their results, a power of two
// up to kMostTeam. A team larger than a block forms a cluster. With over 32 heads it must be 1, because a
// block's warpgroups have different heads. blocks: upper bound, used with a team of 1, when blocks take items
// in turn. splits: parts that each context is cut into and left as sums; more than one only with a team, or
// over 32 heads.
struct LaunchConfig {
  uint32_t team, blocks, splits;
};

// Arguments of the kernel.
struct Params {
  CUtensorMap q, cache;
  Work work;
  uint32_t heads, groups, splits, team;  // groups: of heads; each has its own items
  uint32_t block_shift, rows, nowhere;   // rows: positions per box; nowhere: an invalid position
  float scale;                           // of the scores, converted to units of log2
};

// One layer's cache as the copy engine reads it. For one device, on any stream, with any number of launches
// at a time.
class Mla {
 public:
  // Does not own memory. scale: of the scores. Throws std::invalid_argument for unsupported sizes,
  // std::runtime_error for errors of CUDA.
  Mla(int device, const Shape& cache, float scale);

  // Enqueues the kernel without waiting. It may read lengths and tables as soon as the preceding kernel lets
  // it start: see attention/attention.hpp.
  void run(cudaStream_t stream, const Work& work, const LaunchConfig& config) const;

 private:
  int device_;
  decltype(&cuTensorMapEncodeTiled) encode_;
  Params params_{};
};

cudaError_t start(cudaStream_t stream, uint32_t blocks, const Params& params);

}  // namespace ep::mla

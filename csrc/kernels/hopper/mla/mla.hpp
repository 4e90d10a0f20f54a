// Multi-head latent attention (MLA) with one token per sequence over the paged cache, for Hopper. Queries are
// already in the latent's space; the kernel does softmax and sums latents. The token's own latent is already
// in the cache.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ep::mla {

inline constexpr uint32_t kDim = 576, kValues = 512;  // channels of a key; its first ones are the value
inline constexpr uint32_t kTile = 64;                 // positions that are worked on at a time
inline constexpr uint32_t kBoxChannels = 64;
inline constexpr uint32_t kBoxes = kDim / kBoxChannels, kValueBoxes = kValues / kBoxChannels;  // of a tile
inline constexpr uint32_t kLeastBlock = 16, kMostHeads = 128, kMostSplits = 64;
inline constexpr uint32_t kFewHeads = 16, kSomeHeads = 32;    // of a warpgroup
inline constexpr uint32_t kWorkers = 2;                       // warpgroups of a block
inline constexpr uint32_t kMostTeam = 16;                     // warpgroups: those of the largest cluster
inline constexpr uint32_t kTogether = kWorkers * kSomeHeads;  // heads of a block whose warpgroups share tiles

// One layer's cache, [positions, kDim] bfloat16, and who reads it.
struct Shape {
  const void* cache;
  uint64_t positions;
  uint32_t heads, block_size;  // block_size: positions, a power of two
};

// What one launch works on; addresses of the device, 16-byte aligned but for the int32 ones. Sequences of
// length 0 are padding: they give zeros. Tables reach as far as lengths: nothing on the device checks it.
struct Work {
  const void* q;  // [count, heads, kDim] bfloat16
  uint32_t count;
  const int32_t *lengths, *blocks;  // blocks: tables
  uint32_t blocks_pitch;            // entries from table to table
  void* out;                        // [count, heads, kValues] bfloat16
  // With splits > 1: [count, heads, splits, kValues], unnormalised, and [.., 2], maximum and sum.
  float *sums, *stats;
};

// Chosen for each launch. team: warpgroups that share an item's tiles and join what they have, a power of two
// up to kMostTeam, in clusters where they are more than a block's; 1 with over 32 heads, where a block's have
// other heads each. blocks: at most, where they take items in turn: with a team of 1. splits: parts that each
// context is cut into, and left as sums; more than one only with a team, or over 32 heads.
struct LaunchConfig {
  uint32_t team, blocks, splits;
};

// What the kernel takes.
struct Params {
  CUtensorMap q, cache;
  Work work;
  uint32_t heads, groups, splits, team;  // groups: of heads, for each of which there are items
  uint32_t block_shift, rows, nowhere;   // rows: positions of a box; nowhere: a position that is not there
  float scale;                           // of the scores, to units of log2
};

// One layer's cache as the copy engine reads it. Of one device, on any stream, any number of launches at a
// time.
class Mla {
 public:
  // Memory is not owned. scale: of the scores. Throws std::invalid_argument for sizes that the kernel does
  // not take, std::runtime_error for what CUDA refuses.
  Mla(int device, const Shape& cache, float scale);

  // Enqueues; no wait. Lengths and tables may be read as soon as the kernel ahead in the stream lets this one
  // start: see attention/attention.hpp.
  void run(cudaStream_t stream, const Work& work, const LaunchConfig& config) const;

 private:
  int device_;
  decltype(&cuTensorMapEncodeTiled) encode_;
  Params params_{};
};

cudaError_t start(cudaStream_t stream, uint32_t blocks, const Params& params);

}  // namespace ep::mla

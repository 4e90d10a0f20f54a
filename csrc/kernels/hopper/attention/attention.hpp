// Attention with one token per sequence over the paged cache, with the work before it, in one Hopper kernel:
// per-head norm, rotation, writing the token to the cache, softmax attention.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/hopper/shares/shares.hpp"

namespace ep::attention {

inline constexpr uint32_t kDim = 128;      // channels of a head
inline constexpr uint32_t kTile = 16;      // positions that a warp processes at a time; blocks are multiples
inline constexpr uint32_t kMostGroup = 8;  // query heads of a KV head: the narrow side of a product
inline constexpr uint32_t kTileBytes = 2 * kTile * kDim * 2;  // keys and values
inline constexpr uint32_t kWarps = 8;                         // per block; one block per multiprocessor
inline constexpr uint32_t kRing = 3;                          // tiles that a warp is loading or using

// One layer's cache, [positions, kv_heads, kDim] bfloat16 each, and its head counts.
struct Shape {
  void *k, *v;
  uint64_t positions;
  uint32_t kv_heads, group, block_size;  // block_size: positions, a power of two
};

// Parameters of the model, the same for every launch of a layer.
struct Rule {
  const void* norm;   // [heads + kv_heads, kDim] bfloat16, q's norms before k's, or null
  const void* turns;  // [any position, kDim / 2] float2: cos and sin of pairs of neighbouring channels
  float eps, scale;   // scale: of the scores
};

// Arguments of one launch: device addresses, 16-byte aligned except the int32 ones. Sequences of length 0 are
// padding and give zeros. Tables and `turns` must cover lengths, which count the token itself, and slots must
// be inside the cache: the device does not check this. A negative slot stores nothing. An invalid block reads
// an arbitrary part of the cache.
struct Work {
  const void* qkv;       // [count, (heads + 2 kv_heads) kDim] bfloat16, rows `pitch` elements apart, or, with
  uint64_t pitch, part;  // parts > 0, so many float32 sums, `part` elements apart, rounded once added up
  uint32_t parts, count;
  shares::Shares shares;  // of `count` sequences in tiles of kTile, for all kv_heads and the launch's teams
  const int32_t* blocks;  // tables
  uint32_t blocks_pitch;  // entries from table to table
  void* out;              // [count, heads, kDim] bfloat16
  // Of contexts that are cut: [pairs, group, kDim] unnormalised sums, [pairs, group, 2] maximum and total;
  // pairs: shares::kMostPairs * teams.
  float *sums, *stats;
};

// Chosen for each launch. team: warps that take an item together, a power of two up to kWarps. blocks: upper
// bound; their teams divide the items among themselves.
struct LaunchConfig {
  uint32_t team, blocks;
};

// Arguments of the kernel.
struct Params {
  CUtensorMap k, v;
  Shape cache;
  Rule rule;
  Work work;
  uint32_t heads, block_shift;
};

// One layer's cache as the copy engine reads it. For one device, on any stream, with any number of launches
// at a time.
class Attention {
 public:
  // Does not own memory. Throws std::invalid_argument for unsupported sizes, std::runtime_error for errors of
  // CUDA.
  Attention(int device, const Shape& cache, const Rule& rule);

  // Enqueues the kernel without waiting. It may read shares and tables as soon as the preceding kernel lets
  // it start. So the preceding kernels must not write them, back to and including the
  // nearest one that waits itself before it lets the next one start: all kernels before that one have ended.
  // A projection is such a kernel (hopper/products.py, and the library's).
  void run(cudaStream_t stream, const Work& work, const LaunchConfig& config) const;

 private:
  int device_;
  Params params_{};
};

cudaError_t start(cudaStream_t stream, uint32_t team, uint32_t blocks, const Params& params);

}  // namespace ep::attention

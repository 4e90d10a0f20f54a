// Attention with one token per sequence over the paged cache, with the work before it, in one Hopper kernel:
// per-head norm, rotation, writing the token to the cache, softmax attention.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ep::attention {

inline constexpr uint32_t kDim = 128;      // channels of a head
inline constexpr uint32_t kTile = 16;      // positions that a warp works on at a time; blocks are multiples
inline constexpr uint32_t kMostGroup = 8;  // query heads of a KV head: the narrow side of a product
inline constexpr uint32_t kMostSplits = 64;
inline constexpr uint32_t kTileBytes = 2 * kTile * kDim * 2;  // keys and values
inline constexpr uint32_t kWarps = 8;                         // of a block, one to a multiprocessor
inline constexpr uint32_t kRing = 3;                          // tiles that a warp has under way or works on

// One layer's cache, [positions, kv_heads, kDim] bfloat16 each, and who reads it.
struct Shape {
  void *k, *v;
  uint64_t positions;
  uint32_t kv_heads, group, block_size;  // block_size: positions, a power of two
};

// Of the model, the same for every launch of a layer.
struct Rule {
  const void* norm;   // [heads + kv_heads, kDim] bfloat16, q's norms before k's, or null
  const void* turns;  // [any position, kDim / 2] float2: cos and sin of pairs of neighbouring channels
  float eps, scale;   // scale: of the scores
};

// What one launch works on; addresses of the device, 16-byte aligned but for the int32 ones. Sequences of
// length 0 are padding: they give zeros. Tables reach as far as lengths, positions lie in `turns`, slots in
// the cache: nothing on the device checks it. A negative slot stores nothing; a block that is none reads
// anything of the cache.
struct Work {
  const void* qkv;       // [count, (heads + 2 kv_heads) kDim] bfloat16, rows `pitch` elements apart, or, with
  uint64_t pitch, part;  // parts > 0, so many float32 sums, `part` elements apart, rounded once added up
  uint32_t parts, count;
  const int32_t *positions, *slots, *lengths, *blocks;  // lengths with the token's own; blocks: tables
  uint32_t blocks_pitch;  // entries from table to table; all of them may be read
  void* out;              // [count, heads, kDim] bfloat16
  float *sums, *stats;  // with splits > 1: [count, heads, splits, kDim] unnormalised, [.., 2] maximum and sum
};

// Chosen for each launch. team: warps that share an item, a power of two up to kWarps. blocks: at most;
// they share the items out. splits: parts that each context is cut into.
struct LaunchConfig {
  uint32_t team, blocks, splits;
};

// What the kernel takes.
struct Params {
  CUtensorMap k, v;
  Shape cache;
  Rule rule;
  Work work;
  uint32_t heads, splits, block_shift;
};

// One layer's cache as the copy engine reads it. Of one device, on any stream, any number of launches at a
// time.
class Attention {
 public:
  // Memory is not owned. Throws std::invalid_argument for sizes that the kernel does not take,
  // std::runtime_error for what CUDA refuses.
  Attention(int device, const Shape& cache, const Rule& rule);

  // Enqueues; no wait. Lengths, tables, slots and positions may be read as soon as the kernel ahead in the
  // stream lets this one start. So none of the kernels ahead may write them, back to and with the first that
  // lets the next one start only once it has waited itself: all before that one have ended. A projection is
  // such a kernel (hopper/products.py, and the library's).
  void run(cudaStream_t stream, const Work& work, const LaunchConfig& config) const;

 private:
  int device_;
  Params params_{};
};

cudaError_t start(cudaStream_t stream, uint32_t team, uint32_t blocks, const Params& params);

}  // namespace ep::attention

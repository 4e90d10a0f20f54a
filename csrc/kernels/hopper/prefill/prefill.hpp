// Attention of prompt chunks over the paged cache in one Hopper kernel. Follows FlashAttention-3 (Shah et
// al., 2024): one warpgroup loads, two multiply and take turns, and the softmax of a tile runs beside the
// products of the next one.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ep::prefill {

inline constexpr uint32_t kDim = 128;        // channels of a head's values; of its keys without rotary ones
inline constexpr uint32_t kRotary = 64;      // further channels of keys, in the latent form
inline constexpr uint32_t kRows = 128;       // of a tile: (token, query head of one KV head) pairs
inline constexpr uint32_t kPositions = 128;  // of a tile of keys and values
inline constexpr uint32_t kLeastBlock = 8;   // positions; eight rows are a pattern of the swizzle
inline constexpr uint32_t kLeastLatentBlock = 16;  // its copies, three for a piece, are one warp's
inline constexpr uint32_t kMostParts = 32;         // of the context of a tile of rows
inline constexpr uint32_t kMostUnits = 3;          // parts of all tiles together, for each block of a launch
// What a part leaves in scratch memory for each of its two warpgroups: 64 sums, two maxima and two totals of
// 128 threads.
inline constexpr uint64_t kPartFloats = 128 * (64 + 4);
inline constexpr uint64_t kCounterBytes = 8192;  // behind the parts

// Blocks whose parts the counters can count: two numbers for each warpgroup, behind the first two.
inline constexpr uint32_t kMostBlocks = (kCounterBytes / 4 - 2) / 4 / kMostUnits;

// One layer's cache in bfloat16, and its head counts. Two forms:
//   plain, rotary null:  k, v [positions, kv_heads, kDim]
//   latent, expanded:    k, v [kv_heads, positions, kDim], rotary [positions, kRotary], which all heads share
struct Shape {
  const void *k, *v, *rotary;
  uint64_t positions;
  uint32_t kv_heads, group, block_size;  // group: query heads of a KV head; block_size: a power of two
};

// Arguments of one launch: device addresses, q and out 16-byte aligned. Tables must cover lengths, which
// count a chunk's own tokens: the device does not check this. An invalid block reads an arbitrary part of the
// cache.
struct Work {
  const void* q;       // [tokens, heads, channels of keys] bfloat16
  uint64_t q_pitch;    // bytes from token to token
  void* out;           // [tokens, row_heads, kDim]; rows of sequences without a chunk are not written
  uint32_t row_heads;  // of a row of `out`; in the latent form the launch may write the first ones alone
  const int32_t *query_start, *lengths, *blocks;  // [sequences + 1], [sequences], tables
  uint32_t blocks_pitch;                          // entries from table to table
  uint32_t tokens, sequences;
  // [kv_heads], or null for 1: what the cache's keys and values are multiplied by. Applied to scores and
  // sums.
  const float *k_scale, *v_scale;
};

// Arguments of the kernel.
struct Params {
  CUtensorMap q, k, v;
  Work work;
  uint32_t kv_heads, group;
  uint32_t tile_tokens;               // tokens of a tile of rows
  uint32_t block_shift, piece_shift;  // log2 of positions of a block, and of what one copy reads of it
  uint32_t blocks;                    // of the launch
  float scale;                        // of the scores, in units of log2
  float* parts;
  uint32_t* counters;  // all 0 between launches; the first: parts taken beyond the first of each block
  CUtensorMap rotary;  // in the latent form
};

// One layer's cache as the copy engine reads it. For one device, on any stream. Launches of a process must
// follow each other in a stream or by events, whatever their scratch: blocks wait for parts of contexts that
// other blocks of their launch process, so all of them need a multiprocessor in the end.
class Prefill {
 public:
  // Does not own memory. scale: of the scores. scratch: scratch_bytes(), of which the last kCounterBytes are
  // 0 at first; several layers may share it. Throws std::invalid_argument for unsupported sizes,
  // std::runtime_error for errors of CUDA.
  Prefill(int device, const Shape& cache, float scale, void* scratch);

  static uint64_t scratch_bytes(int device);

  // Enqueues the kernel without waiting. It waits for the preceding kernels before it reads any argument.
  void run(cudaStream_t stream, const Work& work) const;

 private:
  int device_;
  bool latent_;
  uint32_t multiprocessors_;
  Params params_{};
};

cudaError_t start(cudaStream_t stream, bool latent, const Params& params);  // prefill.cu

}  // namespace ep::prefill

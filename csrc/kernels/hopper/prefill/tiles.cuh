// The shared memory of a block, and which tile of rows it processes when.
#pragma once

#include "kernels/hopper/common/instructions.cuh"
#include "kernels/hopper/prefill/prefill.hpp"

namespace ep::prefill {

using namespace hopper;

inline constexpr uint32_t kWarpgroups = 2;                                   // that multiply, 64 rows each
inline constexpr uint32_t kStages = 3;                                       // of keys and of values
inline constexpr uint32_t kHalfBytes = kPositions * kSwizzledRow;            // half of the channels of a tile
inline constexpr uint32_t kTileBytes = 2 * kHalfBytes;                       // of queries, keys or values
inline constexpr uint32_t kGroupBytes = kRows / kWarpgroups * kSwizzledRow;  // a warpgroup's rows of a half
static_assert(kRows == kPositions && kRows == kWarpgroups * 64);

// A ring of tiles. full: the copy engine has filled a stage. empty: each multiplying warp has used it.
struct Ring {
  uint64_t full[kStages], empty[kStages];
};

struct Shared {
  std::byte q[kTileBytes], k[kStages][kTileBytes], v[kStages][kTileBytes];
  uint64_t q_full, q_empty;
  Ring of_k, of_v;
};

// A tile of rows: tokens of one chunk, for all query heads of one KV head.
struct Item {
  uint32_t sequence, head;   // head: of keys
  uint32_t row, tokens;      // the first token's row in the step; tokens from there to the chunk's end
  uint32_t position, tiles;  // the first token's position; tiles of positions that the last one sees
  uint32_t last;             // positions that the last token sees
};

// The items of a block. All warps of a block walk through the same ones. Long items come first, and rounds
// alternate in direction, so blocks finish at about the same time.
class Agenda {
 public:
  __device__ Agenda(const Params& p, uint32_t lane) : p_(p), lane_(lane) {
    for (uint32_t at = 0; at < p.work.sequences; at += 32)
      total_ += __shfl_sync(~0u, sum(tiles(at + lane)), 31);
    total_ *= p.kv_heads;
  }

  // The n-th item of this block. Returns: false if there is none.
  __device__ bool item(uint32_t n, Item& to) const {
    const uint32_t in_round = n % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    const uint32_t number = n * gridDim.x + in_round;
    if (number >= total_) return false;
    uint32_t tile = (total_ - 1 - number) / p_.kv_heads;
    to.head = number % p_.kv_heads;
    for (uint32_t at = 0;; at += 32) {
      const uint32_t own = tiles(at + lane_), until = sum(own);
      const uint32_t here = __shfl_sync(~0u, until, 31);
      if (tile >= here) {
        tile -= here;
        continue;
      }
      const uint32_t lane = __ffs(__ballot_sync(~0u, until > tile)) - 1;
      tile -= __shfl_sync(~0u, until - own, lane);
      to.sequence = at + lane;
      break;
    }
    const Work& work = p_.work;
    const uint32_t begin = work.query_start[to.sequence], end = work.query_start[to.sequence + 1];
    const uint32_t length = work.lengths[to.sequence], first = tile * p_.tile_tokens;
    to.row = begin + first, to.tokens = end - to.row;
    to.position = length - (end - begin) + first;
    to.last = to.position + min(to.tokens, p_.tile_tokens);
    to.tiles = (to.last + kPositions - 1) / kPositions;
    return true;
  }

 private:
  // Tiles of rows of one KV head.
  __device__ uint32_t tiles(uint32_t sequence) const {
    if (sequence >= p_.work.sequences) return 0;
    const uint32_t tokens = p_.work.query_start[sequence + 1] - p_.work.query_start[sequence];
    return (tokens + p_.tile_tokens - 1) / p_.tile_tokens;
  }

  // Sum over this lane and those before it.
  __device__ uint32_t sum(uint32_t value) const {
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) {
      const uint32_t before = __shfl_up_sync(~0u, value, step);
      if (lane_ >= step) value += before;
    }
    return value;
  }

  const Params& p_;
  uint32_t lane_, total_ = 0;
};

}  // namespace ep::prefill

// The shared memory of a block, and which tile of rows it processes when.
#pragma once

#include "kernels/hopper/common/instructions.cuh"
#include "kernels/hopper/prefill/prefill.hpp"

namespace ep::prefill {

using namespace hopper;

inline constexpr uint32_t kWarpgroups = 2;                                   // that multiply, 64 rows each
inline constexpr uint32_t kSliceBytes = kPositions * kSwizzledRow;           // 64 channels of a tile
inline constexpr uint32_t kTileBytes = 2 * kSliceBytes;                      // of values
inline constexpr uint32_t kGroupBytes = kRows / kWarpgroups * kSwizzledRow;  // a warpgroup's rows of a slice
static_assert(kRows == kPositions && kRows == kWarpgroups * 64);

// The forms of keys, see Shape: slices of 64 channels, and tiles of keys and of values that fit beside them.
struct Plain {
  static constexpr uint32_t kSlices = kDim / 64, kStages = 3;
};
struct Latent {
  static constexpr uint32_t kSlices = (kDim + kRotary) / 64, kStages = 2;
};

template <class T>
concept Form = requires {
  requires T::kSlices * 64 >= kDim;
  requires T::kStages >= 2;
};

// Waits for the other threads of the warpgroup.
__device__ inline void meet(uint32_t group) { meet_at(3 + group, 128); }

// A ring of tiles. full: the copy engine has filled a stage. empty: each multiplying warp has used it.
template <Form F>
struct Ring {
  uint64_t full[F::kStages], empty[F::kStages];
};

// A tile of rows: tokens of one chunk for all query heads of one KV head.
struct Rows {
  uint32_t sequence, head;  // head: of keys
  uint32_t row, tokens;     // the first token's row in the step; tokens from there to the chunk's end
  uint32_t position;        // of the first token
  uint32_t last;            // positions that the last token sees
  uint32_t parts, unit;     // parts of these positions; the number of the first one among all parts
};

// A part of the positions that a tile of rows sees.
struct Item : Rows {
  uint32_t part;          // which one
  uint32_t first, tiles;  // tiles of positions: from `first` to `tiles` - 1
};

// What a block does next. full: an item is posted. empty: every warp that needs it has read it.
struct Board {
  Item item;  // no tiles: there are no more. Then `parts` is that of long contexts.
  uint64_t full, empty;
};

template <Form F>
struct Shared {
  static constexpr uint32_t kKeyBytes = F::kSlices * kSliceBytes;  // of a tile of queries or of keys
  std::byte q[kKeyBytes], k[F::kStages][kKeyBytes], v[F::kStages][kTileBytes];
  uint64_t q_full, q_empty;
  Ring<F> of_k, of_v;
  Board board;
};

// The tiles of rows of a launch, and the parts of their contexts: where there are few tiles of rows, contexts
// are cut into parts, which different blocks process. All 32 threads of a warp call every function.
class Plan {
 public:
  __device__ Plan(const Params& p, uint32_t lane) : p_(p), lane_(lane) {
    uint32_t longest = 0;
    for (uint32_t at = 0; at < p.work.sequences; at += 32) {
      const uint32_t own = tiles(at + lane);
      const uint32_t length = at + lane < p.work.sequences ? p.work.lengths[at + lane] : 0;
      if (own != 0) longest = max(longest, length);
      total_ += __shfl_sync(~0u, sum(own), 31);
    }
    total_ *= p.kv_heads;
    split_ = best_split((__reduce_max_sync(~0u, longest) + kPositions - 1) / kPositions);
  }

  __device__ uint32_t total() const { return total_; }  // tiles of rows
  __device__ uint32_t split() const { return split_; }  // parts of a long context

  // The number-th tile of rows. Long contexts come first.
  __device__ void find(uint32_t number, Rows& to) const {
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
    to.parts = min(split_, (to.last + kPositions - 1) / kPositions), to.unit = number * split_;
  }

 private:
  // Parts of each context, such that blocks finish soonest. Lane n considers n + 1 parts. To leave a part
  // takes about as long as a tile of positions, and so does to join them.
  __device__ uint32_t best_split(uint32_t tiles) const {
    const uint32_t parts = lane_ + 1, units = total_ * parts;
    const bool may = parts <= min(kMostParts, tiles) && units <= kMostUnits * p_.blocks;
    const uint32_t rounds = (units + p_.blocks - 1) / p_.blocks, each = (tiles + parts - 1) / parts;
    uint32_t cost = parts == 1 ? rounds * each : rounds * (each + 1) + 1;
    if (parts != 1 && !may) cost = ~0u >> 5;
    return (__reduce_min_sync(~0u, cost << 5 | lane_) & 31) + 1;
  }

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
  uint32_t lane_, total_ = 0, split_ = 1;
};

// Takes a block's next item: the first by the block's number, then from a counter that all blocks of the
// launch share, so they finish at about the same time. Long contexts come first. All 32 threads of a warp
// call it. Returns: false if there are no more.
__device__ inline bool take(const Params& p, const Plan& plan, uint32_t lane, bool first, Item& to) {
  const uint32_t split = plan.split(), units = plan.total() * split;
  for (uint32_t unit = blockIdx.x;; first = false) {
    if (!first) {
      // Each block with a number below `units` takes in vain once. The last one returns the counter to 0.
      if (lane == 0) unit = gridDim.x + atomicInc(p.counters, units - 1);
      unit = __shfl_sync(~0u, unit, 0);
    }
    if (unit >= units) return false;
    plan.find(unit / split, to);
    to.part = unit - to.unit;
    if (to.part >= to.parts) continue;  // a short context
    const uint32_t all = (to.last + kPositions - 1) / kPositions;
    to.first = all * to.part / to.parts, to.tiles = all * (to.part + 1) / to.parts;
    return true;
  }
}

// Takes items until there are no more, and posts each for the other warps.
__device__ inline void post_items(const Params& p, Board& board, uint32_t lane) {
  const Plan plan(p, lane);
  bool more = true;
  for (uint32_t n = 0; more; ++n) {
    await_phase(&board.empty, ~n & 1);  // not sooner: other blocks may have time for the last items
    Item item{};
    more = take(p, plan, lane, n == 0, item);
    if (!more) item.parts = plan.split(), item.tiles = 0;
    if (lane == 0) board.item = item, arrive(&board.full);
  }
}

// Reads what post_items() posts.
class Reader {
 public:
  __device__ Reader(Board& board, uint32_t lane) : board_(board), lane_(lane) {}

  // Copies the next item. All 32 threads of a warp call it. Returns: false if there are no more.
  __device__ bool next(Item& to) {
    await_phase(&board_.full, number_++ & 1);
    to = board_.item;
    __syncwarp();
    if (lane_ == 0) arrive(&board_.empty);
    return to.tiles != 0;
  }

 private:
  Board& board_;
  uint32_t lane_, number_ = 0;
};

}  // namespace ep::prefill

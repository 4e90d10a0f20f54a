// The shared memory of an MLA block, the order of its work items, and how their data is requested.
#pragma once

#include "kernels/hopper/common/instructions.cuh"
#include "kernels/hopper/mla/mla.hpp"

namespace ep::mla {

using namespace hopper;

inline constexpr uint32_t kWarps = 4;                               // per warpgroup
inline constexpr uint32_t kThreads = (kWorkers + 1) * kWarps * 32;  // the last warpgroup fills the rings
inline constexpr uint32_t kRegistersToFill = 40, kRegistersToAttend = 232;  // all start with 168
inline constexpr uint32_t kBoxBytes = kTile * kSwizzledRow;
inline constexpr uint32_t kStatePitch = kValues + 4;  // floats between heads in sums to be joined

// A head policy. kHeads: per warpgroup. kShared: both warpgroups of a block read the same tiles for different
// heads; otherwise each has its own tiles and its own ring. kRing: boxes of a ring.
template <uint32_t kHeadsOfOne, bool kSharedTiles, uint32_t kBoxesOfRing>
struct HeadPolicy {
  static constexpr uint32_t kHeads = kHeadsOfOne, kRing = kBoxesOfRing;
  static constexpr bool kShared = kSharedTiles;
  static constexpr uint32_t kRings = kShared ? 1 : kWorkers;
  static constexpr uint32_t kFillers = kWarps / kRings;    // warps that fill a ring
  static constexpr uint32_t kReaders = kWorkers / kRings;  // warpgroups that read a ring
  static_assert(kRing >= kBoxes, "a tile is there as a whole");
};

// A block's shared memory. A box is 64 channels of rows, 128 bytes per row, in the swizzle.
template <class F>
struct Shared {
  std::byte ring[F::kRings][F::kRing][kBoxBytes];                 // positions
  std::byte queries[kWorkers][kBoxes][F::kHeads * kSwizzledRow];  // by head; later their outputs
  std::byte weights[kWorkers][F::kHeads * kSwizzledRow];  // by head, the positions of a tile contiguous
  float across[kWorkers][kWarps][F::kHeads];              // values per head that warps exchange
  float2 stats[kWorkers][F::kHeads];                      // for joining: maxima and sums
  uint64_t full[F::kRings][F::kRing], empty[F::kRings][F::kRing], asked[kWorkers];

  // A warpgroup's sums to be joined, [heads, kStatePitch] float32, stored where its tiles were.
  __device__ float* state(uint32_t worker) { return reinterpret_cast<float*>(ring[worker]); }
};

// What a warpgroup processes at a time: tiles first, first + step, ... before `last` of a context.
struct Item {
  uint32_t sequence, head, split, length, first, last, step;
};

// A warpgroup's items. Lengths are read one item ahead.
template <class F>
class Agenda {
 public:
  __device__ Agenda(const Params& p, uint32_t worker) : p_(p), worker_(worker) {
    const bool alone = !F::kShared && p.team == 1;
    const uint32_t blocks = p.team > kWorkers ? p.team / kWorkers : 1;  // blocks that share an item
    all_ = p.work.count * p.groups * p.splits;
    index_ = alone ? blockIdx.x + worker * gridDim.x : blockIdx.x / blocks;
    step_ = gridDim.x / blocks * (alone ? kWorkers : 1);
    read();
  }

  __device__ bool more() const { return index_ < all_; }

  // Call it only while more() is true.
  __device__ Item next() {
    Item it{};
    const uint32_t row = index_ / p_.groups;
    it.head = (index_ - row * p_.groups) * kTogether + (F::kShared ? worker_ * F::kHeads : 0);
    it.split = row / p_.work.count, it.sequence = row - it.split * p_.work.count;
    it.length = uint32_t(max(length_, 0));
    const uint32_t tiles = (it.length + kTile - 1) / kTile, share = (tiles + p_.splits - 1) / p_.splits;
    it.first = min(it.split * share, tiles), it.last = min(it.first + share, tiles);
    it.step = F::kShared ? 1 : p_.team;
    it.first += (blockIdx.x * kWorkers + worker_) & (it.step - 1);
    index_ += step_;
    read();
    return it;
  }

 private:
  __device__ void read() {
    if (index_ < all_) length_ = p_.work.lengths[index_ / p_.groups % p_.work.count];
  }

  const Params& p_;
  uint32_t worker_, all_, index_, step_;
  int32_t length_ = 0;
};

// Requests every kFillers-th box of a ring, one after the other. A separate warp does this, because a box of
// small blocks takes several copies. Each thread looks up the cache position of one of 32 copies. Positions
// behind the end are not read but zero.
template <class F>
__device__ inline void fill_ring(Shared<F>& s, const Params& p, uint32_t ring, uint32_t filler,
                                 uint32_t lane) {
  Agenda<F> agenda(p, ring);
  const uint32_t parts = kTile / p.rows;  // per tile
  const uint32_t ahead = 32 / parts;      // tiles looked up at once
  Place place;
  uint32_t turn = 0;
  bool waited = false;
  while (agenda.more()) {
    const Item it = agenda.next();
    const int32_t* table = p.work.blocks + size_t(it.sequence) * p.work.blocks_pitch;
    uint32_t found = p.nowhere, known = 0;
    for (uint32_t tile = it.first; tile < it.last; tile += it.step) {
      if (known % ahead == 0) {
        const uint32_t position = (tile + lane / parts * it.step) * kTile + lane % parts * p.rows;
        const uint32_t block = position >> p.block_shift;
        found = p.nowhere;
        if (position < it.length)
          found = (uint32_t(table[block]) << p.block_shift) + (position - (block << p.block_shift));
      }
      if (!waited) await_previous_kernel();  // lengths and tables belong to the step, but the cache does not
      waited = true;
      const uint32_t row = __shfl_sync(~0u, found, known++ % ahead * parts + lane % parts);
      for (uint32_t box = 0; box < kBoxes; ++box, place.next(F::kRing)) {
        if (turn++ % F::kFillers != filler) continue;
        await_phase(&s.empty[ring][place.stage], place.parity ^ 1);
        uint64_t* full = &s.full[ring][place.stage];
        if (lane == 0) arrive_and_expect(full, kBoxBytes);
        __syncwarp();
        std::byte* to = s.ring[ring][place.stage] + lane * p.rows * kSwizzledRow;
        if (lane < parts) {
          if (F::kShared)
            copy_reused_box(to, &p.cache, box * kBoxChannels, row, full);  // other blocks read it too
          else
            copy_box(to, &p.cache, box * kBoxChannels, row, full);
        }
      }
    }
  }
}

// Requests the queries of an item. One thread calls it, after the previous queries and their outputs were
// read.
template <class F>
__device__ inline void ask_queries(Shared<F>& s, const Params& p, const Item& it, uint32_t worker) {
  arrive_and_expect(&s.asked[worker], sizeof(s.queries[worker]));
  for (uint32_t box = 0; box < kBoxes; ++box)
    copy_reused_box(s.queries[worker][box], &p.q, box * kBoxChannels, it.sequence * p.heads + it.head,
                    &s.asked[worker]);
}

}  // namespace ep::mla

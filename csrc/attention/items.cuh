// What a block of the attention kernel holds and works on, in which order, and who asks for it.
#pragma once

#include "attention/attention.hpp"
#include "attention/tile.cuh"
#include "experts/hopper.cuh"

namespace ep::attention {

using namespace hopper;

inline constexpr uint32_t kPitch = kDim * 2 + 16;  // bytes from query to query: no bank twice
inline constexpr uint32_t kKey = kMostGroup, kValue = kMostGroup + 1;  // rows behind the queries
inline constexpr uint32_t kSumsPitch = kDim + 4;  // floats from head to head: no bank twice
inline constexpr uint32_t kHeads = kWarps * kMostGroup;

// A block's shared memory.
struct Shared {
  std::byte *tiles, *rows;    // rows: the queries, the key, the value; bfloat16
  uint64_t *full, *empty;     // by place in the ring
  float *sums, *top, *total;  // by warp and head

  __device__ Shared(std::byte* shared, uint32_t stages)
      : tiles(shared),
        rows(tiles + stages * kTileBytes),
        full(reinterpret_cast<uint64_t*>(rows + (kValue + 1) * kPitch)),
        empty(full + stages),
        sums(reinterpret_cast<float*>(empty + stages)),
        top(sums + kHeads * kSumsPitch),
        total(top + kHeads) {}

  static constexpr size_t bytes(uint32_t stages) {
    return stages * (kTileBytes + 2 * sizeof(uint64_t)) + (kValue + 1) * kPitch +
           kHeads * (kSumsPitch + 2) * sizeof(float);
  }

  // By one thread, before any other looks at a barrier.
  __device__ void begin(uint32_t stages) const {
    for (uint32_t i = 0; i < stages; ++i) init_barrier(&full[i], 1), init_barrier(&empty[i], 1);
    publish_barriers();
  }
};

// Of the warps that compute, not of the one that asks.
__device__ inline void meet() { asm volatile("bar.sync 1, %0;" ::"n"(kWarps * 32) : "memory"); }

// A place in the ring; parity: of the phase in which its tile comes.
struct Place {
  uint32_t stage = 0, parity = 0;
  __device__ void advance(uint32_t tiles, uint32_t stages) {
    for (stage += tiles; stage >= stages; stage -= stages) parity ^= 1;
  }
};

// What a block works on at a time: tiles first to last - 1 of a context, for one KV head.
struct Item {
  uint32_t sequence, head, split, length, position, first, last;
  int32_t slot;
  bool newest;  // it has the token's own position
};

// A block's items: every so many-th of all. Each thread of a warp knows of one in 32.
class Agenda {
 public:
  __device__ Agenda(const Params& p, uint32_t lane) : p_(p), lane_(lane) {
    const uint32_t all = p.work.count * p.cache.kv_heads * p.splits;
    count = (all - blockIdx.x + gridDim.x - 1) / gridDim.x;  // there are as many items as blocks at least
  }

  uint32_t count;

  // In ascending order, by all threads of the warp.
  __device__ Item item(uint32_t n) {
    if (n % 32 == 0 && n + lane_ < count) {
      const uint32_t sequence = index(n + lane_) / p_.cache.kv_heads % p_.work.count;
      length_ = max(p_.work.lengths[sequence], 0);
      slot_ = p_.work.slots[sequence], position_ = p_.work.positions[sequence];
    }
    Item it;
    const uint32_t row = index(n) / p_.cache.kv_heads;
    it.head = index(n) % p_.cache.kv_heads, it.sequence = row % p_.work.count, it.split = row / p_.work.count;
    it.length = __shfl_sync(~0u, length_, n % 32);
    it.slot = __shfl_sync(~0u, slot_, n % 32), it.position = __shfl_sync(~0u, position_, n % 32);
    const uint32_t tiles = (it.length + kTile - 1) / kTile, share = (tiles + p_.splits - 1) / p_.splits;
    it.first = min(it.split * share, tiles), it.last = min(it.first + share, tiles);
    it.newest = it.last == tiles && it.first < it.last;
    return it;
  }

 private:
  __device__ uint32_t index(uint32_t n) const { return blockIdx.x + n * gridDim.x; }

  const Params& p_;
  uint32_t lane_, length_ = 0, position_ = 0;
  int32_t slot_ = 0;
};

__device__ inline void copy_head(void* to, const CUtensorMap* map, uint32_t channel, uint32_t head,
                                 uint32_t position,
                                 uint64_t* barrier) {  // as copy_box(), of one head
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(channel), "r"(head), "r"(position), "r"(shared_address(barrier)), "l"(kEvictFirst)
      : "memory");
}

// By the warp that asks. Each thread looks up where one of the next 32 tiles lies in the cache.
__device__ inline void ask(const Params& p, const Shared& shared, uint32_t lane) {
  Agenda agenda(p, lane);
  Place place;
  for (uint32_t n = 0; n < agenda.count; ++n) {
    const Item item = agenda.item(n);
    const int32_t* table = p.work.blocks + size_t(item.sequence) * p.work.blocks_pitch;
    for (uint32_t first = item.first; first < item.last; first += 32) {
      const uint32_t at = (first + lane) * kTile, tiles = min(item.last - first, 32);
      uint32_t found = 0;
      if (lane < tiles)
        found = (uint32_t(table[at >> p.block_shift]) << p.block_shift) + (at & (p.cache.block_size - 1));
      for (uint32_t i = 0; i < tiles; ++i, place.advance(1, p.stages)) {
        const uint32_t position = __shfl_sync(~0u, found, i);
        if (lane != 0) continue;
        uint64_t* full = &shared.full[place.stage];
        std::byte* to = shared.tiles + place.stage * kTileBytes;
        await_phase(&shared.empty[place.stage], place.parity ^ 1);
        arrive_and_expect(full, kTileBytes);
        copy_head(to, &p.k, 0, item.head, position, full);
        copy_head(to + kHalf, &p.k, kDim / 2, item.head, position, full);
        copy_head(to + 2 * kHalf, &p.v, 0, item.head, position, full);
        copy_head(to + 3 * kHalf, &p.v, kDim / 2, item.head, position, full);
      }
    }
  }
}

}  // namespace ep::attention

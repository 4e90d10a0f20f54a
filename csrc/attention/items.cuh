// What a block of the attention kernel holds and works on, in which order, and how it is asked for.
#pragma once

#include "attention/attention.hpp"
#include "attention/tile.cuh"
#include "experts/hopper.cuh"

namespace ep::attention {

using namespace hopper;

inline constexpr uint32_t kPitch = kDim * 2 + 16;  // bytes from query to query: no bank twice
inline constexpr uint32_t kKey = kMostGroup, kValue = kMostGroup + 1;  // rows behind the queries
inline constexpr uint32_t kPlaces = kWarps * kRing;

// A block's warps as those see it who share an item.
struct Team {
  uint32_t size, number, member;  // warps; of the block's teams; of the team's warps

  __device__ Team(const Params& p, uint32_t warp)
      : size(p.team), number(warp / p.team), member(warp % p.team) {}
  __device__ uint32_t teams() const { return kWarps / size; }
  // Of all its warps.
  __device__ void meet() const {
    asm volatile("bar.sync %0, %1;" ::"r"(number + 1), "r"(size * 32) : "memory");
  }
};

// A block's shared memory.
struct Shared {
  std::byte *tiles, *rows;  // rows, of each team: the queries, the key, the value; bfloat16
  uint64_t* full;           // by place: kRing of each warp
  SoftmaxWords* joined;     // of half the warps, where teams are of several

  __device__ Shared(std::byte* shared, uint32_t team)
      : tiles(shared),
        rows(tiles + kPlaces * kTileBytes),
        full(reinterpret_cast<uint64_t*>(rows + kWarps / team * kRows)),
        joined(reinterpret_cast<SoftmaxWords*>(full + kPlaces)) {}

  static constexpr uint32_t kRows = (kValue + 1) * kPitch;  // bytes, of a team
  static constexpr size_t bytes(uint32_t team) {
    return kPlaces * (kTileBytes + sizeof(uint64_t)) + kWarps / team * kRows +
           (team == 1 ? 0 : kWarps / 2 * sizeof(SoftmaxWords));
  }

  // By one thread, before any other looks at a barrier.
  __device__ void begin(const Params& p) const {
    fetch_map(&p.k);
    fetch_map(&p.v);
    for (uint32_t i = 0; i < kPlaces; ++i) init_barrier(&full[i], 1);
    publish_barriers();
  }
};

// A place of a warp's ring; parity: of the phase in which its tile comes.
struct Place {
  uint32_t stage = 0, parity = 0;
  __device__ void next() {
    if (++stage == kRing) stage = 0, parity ^= 1;
  }
};

// What a team works on at a time: tiles first to last - 1 of a context, for one KV head.
struct Item {
  uint32_t sequence, head, split, length, position, first, last;
  int32_t slot;
  bool newest;  // it has the token's own position
};

// A team's items: every so many-th of all. Each thread of a warp knows of one in 32.
class Agenda {
 public:
  __device__ Agenda(const Params& p, const Team& team, uint32_t lane)
      : p_(p), begin_(blockIdx.x + team.number * gridDim.x), step_(team.teams() * gridDim.x), lane_(lane) {
    const uint32_t all = p.work.count * p.cache.kv_heads * p.splits;
    count = begin_ < all ? (all - begin_ + step_ - 1) / step_ : 0;
    read(0);
  }

  uint32_t count;

  __device__ uint32_t sequence(uint32_t n) const { return index(n) / p_.cache.kv_heads % p_.work.count; }

  // In ascending order, by all threads of the warp.
  __device__ Item item(uint32_t n) {
    if (n != 0 && n % 32 == 0) read(n);
    Item it;
    const uint32_t row = index(n) / p_.cache.kv_heads;
    it.head = index(n) % p_.cache.kv_heads, it.sequence = sequence(n), it.split = row / p_.work.count;
    it.length = __shfl_sync(~0u, length_, n % 32);
    it.slot = __shfl_sync(~0u, slot_, n % 32), it.position = __shfl_sync(~0u, position_, n % 32);
    const uint32_t tiles = (it.length + kTile - 1) / kTile, share = (tiles + p_.splits - 1) / p_.splits;
    it.first = min(it.split * share, tiles), it.last = min(it.first + share, tiles);
    it.newest = it.last == tiles && it.first < it.last;
    return it;
  }

 private:
  __device__ uint32_t index(uint32_t n) const { return begin_ + n * step_; }
  __device__ void read(uint32_t n) {
    if (n + lane_ >= count) return;
    const uint32_t of = sequence(n + lane_);
    length_ = max(p_.work.lengths[of], 0);
    slot_ = p_.work.slots[of], position_ = p_.work.positions[of];
  }

  const Params& p_;
  uint32_t begin_, step_, lane_, length_ = 0, position_ = 0;
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

// Asks for a warp's tiles, every team.size-th of its items, one after the other. Each thread looks up where
// one of 32 lies in the cache.
class Tiles {
 public:
  __device__ Tiles(const Params& p, const Team& team, const Agenda& agenda, std::byte* places, uint64_t* full,
                   uint32_t lane)
      : p_(p), team_(team), agenda_(agenda), places_(places), full_(full), lane_(lane) {
    if (p.splits != 1 || agenda.count == 0) return;
    item_.sequence = agenda.sequence(0);  // all there is to know but its length
    if (entry() < p.work.blocks_pitch) look_up();
  }

  // The next one, if there is one more, into a place whose last one nobody reads any more. By the whole warp.
  __device__ void ask(uint32_t stage) {
    bool known = n_ == 0 && p_.splits == 1;  // where the first ones lie
    for (; next_ == count_; ++n_) {
      if (n_ == agenda_.count) return;
      known &= n_ == 0;
      item_ = agenda_.item(n_), next_ = 0;
      const uint32_t first = item_.first + team_.member;
      count_ = first < item_.last ? (item_.last - first + team_.size - 1) / team_.size : 0;
    }
    if (next_ % 32 == 0 && !known && next_ + lane_ < count_) look_up();
    const uint32_t position = __shfl_sync(~0u, found_, next_ % 32);
    ++next_;
    if (lane_ != 0) return;
    std::byte* to = places_ + stage * kTileBytes;
    uint64_t* full = full_ + stage;
    arrive_and_expect(full, kTileBytes);
    copy_head(to, &p_.k, 0, item_.head, position, full);
    copy_head(to + kHalf, &p_.k, kDim / 2, item_.head, position, full);
    copy_head(to + 2 * kHalf, &p_.v, 0, item_.head, position, full);
    copy_head(to + 3 * kHalf, &p_.v, kDim / 2, item_.head, position, full);
  }

 private:
  // Of the thread's tile: the first of its positions in the context, and the entry of the table.
  __device__ uint32_t at() const {
    return (item_.first + team_.member + (next_ + lane_) * team_.size) * kTile;
  }
  __device__ uint32_t entry() const { return at() >> p_.block_shift; }
  __device__ void look_up() {
    const int32_t* table = p_.work.blocks + size_t(item_.sequence) * p_.work.blocks_pitch;
    found_ = (uint32_t(table[entry()]) << p_.block_shift) + (at() & (p_.cache.block_size - 1));
  }

  const Params& p_;
  const Team& team_;
  Agenda agenda_;
  std::byte* places_;
  uint64_t* full_;
  Item item_{};
  uint32_t lane_, n_ = 0, next_ = 0, count_ = 0, found_ = 0;  // next_, count_: of the item's
};

}  // namespace ep::attention

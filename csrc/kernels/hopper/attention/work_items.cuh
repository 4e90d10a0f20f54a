// The shared memory of an attention block, the order of its work items, and how their data is requested.
#pragma once

#include "kernels/hopper/attention/attention.hpp"
#include "kernels/hopper/attention/tile_products.cuh"
#include "kernels/hopper/common/instructions.cuh"

namespace ep::attention {

using namespace hopper;

inline constexpr uint32_t kPitch = kDim * 2 + 16;  // bytes between queries; avoids bank conflicts
inline constexpr uint32_t kKey = kMostGroup, kValue = kMostGroup + 1;  // rows behind the queries
inline constexpr uint32_t kPlaces = kWarps * kRing;

// The warps of a block that share an item. kSize: number of them.
template <uint32_t kSize>
struct Team {
  static constexpr uint32_t kTeams = kWarps / kSize;
  uint32_t number, member;  // number of this team in the block; number of this warp in the team

  __device__ explicit Team(uint32_t warp) : number(warp / kSize), member(warp % kSize) {}
  // Waits for all warps of the team.
  __device__ void meet() const {
    asm volatile("bar.sync %0, %1;" ::"r"(number + 1), "n"(kSize * 32) : "memory");
  }
};

// A block's shared memory. full: barriers of a warp's own ring, so that no other warp waits for them.
template <uint32_t kSize>
struct Shared {
  std::byte *tiles, *rows;  // rows: the queries, key and value of each team; bfloat16
  uint64_t* full;           // by place; kRing for each warp
  SoftmaxWords* joined;     // for half of the warps, if teams have several

  __device__ explicit Shared(std::byte* shared)
      : tiles(shared),
        rows(tiles + kPlaces * kTileBytes),
        full(reinterpret_cast<uint64_t*>(rows + Team<kSize>::kTeams * kRows)),
        joined(reinterpret_cast<SoftmaxWords*>(full + kPlaces)) {}

  static constexpr uint32_t kRows = (kValue + 1) * kPitch;  // bytes per team
  static constexpr size_t kBytes = kPlaces * (kTileBytes + sizeof(uint64_t)) + Team<kSize>::kTeams * kRows +
                                   (kSize == 1 ? 0 : kWarps / 2 * sizeof(SoftmaxWords));
  static_assert(kBytes <= 227 << 10, "a block of Hopper has no more");
};

// What a team processes at a time: tiles first to last - 1 of a context, for one KV head.
struct Item {
  uint32_t sequence, head, split, length, position, first, last;
  int32_t slot;
  bool newest;  // contains the token's own position
};

// A team's items: every step-th one of all. Each thread of a warp holds the data of one in 32.
template <uint32_t kSize>
class Agenda {
 public:
  __device__ Agenda(const Params& p, const Team<kSize>& team, uint32_t lane)
      : p_(p),
        begin_(blockIdx.x + team.number * gridDim.x),
        step_(Team<kSize>::kTeams * gridDim.x),
        lane_(lane) {
    const uint32_t all = p.work.count * p.cache.kv_heads * p.splits;
    count = begin_ < all ? (all - begin_ + step_ - 1) / step_ : 0;
    read(0);
  }

  uint32_t count;

  // The part of an item that does not need its sequence's length.
  __device__ Item begin(uint32_t n) const {
    Item it{};
    const uint32_t row = index(n) / p_.cache.kv_heads;
    it.head = index(n) - row * p_.cache.kv_heads, it.sequence = row;
    if (row >= p_.work.count) it.split = row / p_.work.count, it.sequence = row % p_.work.count;
    return it;
  }

  // Call in ascending order, by all threads of the warp.
  __device__ Item item(uint32_t n) {
    if (n != 0 && n % 32 == 0) read(n);
    Item it = begin(n);
    it.length = __shfl_sync(~0u, length_, n % 32);
    it.slot = __shfl_sync(~0u, slot_, n % 32), it.position = __shfl_sync(~0u, position_, n % 32);
    const uint32_t tiles = (it.length + kTile - 1) / kTile;
    const uint32_t share = p_.splits == 1 ? tiles : (tiles + p_.splits - 1) / p_.splits;
    it.first = min(it.split * share, tiles), it.last = min(it.first + share, tiles);
    it.newest = it.last == tiles && it.first < it.last;
    return it;
  }

 private:
  __device__ uint32_t index(uint32_t n) const { return begin_ + n * step_; }
  __device__ void read(uint32_t n) {
    if (n + lane_ >= count) return;
    const uint32_t of = begin(n + lane_).sequence;
    length_ = max(p_.work.lengths[of], 0);
    slot_ = p_.work.slots[of], position_ = p_.work.positions[of];
  }

  const Params& p_;
  uint32_t begin_, step_, lane_, length_ = 0, position_ = 0;
  int32_t slot_ = 0;
};

// Requests a warp's tiles, every kSize-th of its items, one after the other. Each thread looks up the cache
// position of one tile in 32.
template <uint32_t kSize>
class Tiles {
 public:
  // Reads the table at once, if that needs no length.
  __device__ Tiles(const Params& p, const Team<kSize>& team, const Agenda<kSize>& agenda, std::byte* places,
                   uint64_t* full, uint32_t lane)
      : p_(p), agenda_(agenda), places_(places), full_(full), member_(team.member), lane_(lane) {
    if (p.splits != 1 || agenda.count == 0) return;
    item_ = agenda.begin(0);
    if (entry() < p.work.blocks_pitch) look_up();
  }

  // Requests the next tile, if there is one, into a stage that is no longer read. Called by the whole warp.
  __device__ void ask(uint32_t stage) {
    bool known = n_ == 0 && p_.splits == 1;  // the first positions are already looked up
    for (; next_ == count_; ++n_) {
      if (n_ == agenda_.count) return;
      known &= n_ == 0;
      item_ = agenda_.item(n_), next_ = 0;
      const uint32_t first = item_.first + member_;
      count_ = first < item_.last ? (item_.last - first + kSize - 1) / kSize : 0;
    }
    if (next_ % 32 == 0 && !known && next_ + lane_ < count_) look_up();
    const uint32_t position = __shfl_sync(~0u, found_, next_ % 32);
    ++next_;
    if (lane_ != 0) return;
    std::byte* to = places_ + stage * kTileBytes;
    uint64_t* full = full_ + stage;
    arrive_and_expect(full, kTileBytes);
    const uint32_t box[] = {0, position, 0, item_.head};  // in the order of boxes_of()
    copy_box(to, &p_.k, box, full);
    copy_box(to + 2 * kHalf, &p_.v, box, full);
  }

 private:
  // For the thread's tile: its first position in the context, and its entry in the table.
  __device__ uint32_t at() const { return (item_.first + member_ + (next_ + lane_) * kSize) * kTile; }
  __device__ uint32_t entry() const { return at() >> p_.block_shift; }
  __device__ void look_up() {
    const int32_t* table = p_.work.blocks + size_t(item_.sequence) * p_.work.blocks_pitch;
    found_ = (uint32_t(table[entry()]) << p_.block_shift) + (at() & (p_.cache.block_size - 1));
  }

  const Params& p_;
  Agenda<kSize> agenda_;
  std::byte* places_;
  uint64_t* full_;
  Item item_{};
  uint32_t member_, lane_, n_ = 0, next_ = 0, count_ = 0, found_ = 0;  // next_, count_: tiles of the item
};

}  // namespace ep::attention

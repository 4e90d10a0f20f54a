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
  uint32_t* finished;       // by team: shares of a context that were finished before its own

  __device__ explicit Shared(std::byte* shared)
      : tiles(shared),
        rows(tiles + kPlaces * kTileBytes),
        full(reinterpret_cast<uint64_t*>(rows + Team<kSize>::kTeams * kRows)),
        joined(reinterpret_cast<SoftmaxWords*>(full + kPlaces)),
        finished(reinterpret_cast<uint32_t*>(joined + kJoined)) {}

  static constexpr uint32_t kRows = (kValue + 1) * kPitch;  // bytes per team
  static constexpr uint32_t kJoined = kSize == 1 ? 0 : kWarps / 2;
  static constexpr size_t kBytes = kPlaces * (kTileBytes + sizeof(uint64_t)) +
                                   Team<kSize>::kTeams * (kRows + sizeof(uint32_t)) +
                                   kJoined * sizeof(SoftmaxWords);
  static_assert(kBytes <= 227 << 10, "a block of Hopper has no more");
};

// What a team processes at a time: tiles first to last - 1 of a context, for one KV head.
struct Item {
  uint32_t index, sequence, head, length, first, last;
  uint32_t number, of;  // see shares::Share
  int32_t slot;
  bool newest;  // contains the token's own position

  __device__ uint32_t position() const { return max(length, 1u) - 1; }  // of the token
};

// A team's items: one of each round. Rounds alternate in direction: shares of contexts that are cut come
// first and are longer than most others, so the teams without one begin the second round. Each thread of a
// warp holds the share of one in 32. Shares belong to the step, not to the preceding kernel.
template <uint32_t kSize>
class Agenda {
 public:
  __device__ Agenda(const Params& p, const Team<kSize>& team, uint32_t lane)
      : p_(p),
        team_(blockIdx.x + team.number * gridDim.x),
        teams_(Team<kSize>::kTeams * gridDim.x),
        lane_(lane) {
    read(0);
    const uint32_t all = *p.work.shares.total * p.cache.kv_heads;
    count = all / teams_;
    if (index(count) < all) ++count;
  }

  uint32_t count;

  // Call in ascending order, by all threads of the warp.
  __device__ Item item(uint32_t n) {
    if (n != 0 && n % 32 == 0) read(n);
    const auto of_thread = [&](auto value) { return __shfl_sync(~0u, value, n % 32); };
    Item it{};
    it.index = index(n), it.head = it.index % p_.cache.kv_heads;
    it.sequence = of_thread(share_.sequence), it.length = of_thread(share_.length);
    it.slot = of_thread(share_.slot);
    it.first = of_thread(share_.first), it.last = of_thread(share_.last);
    it.number = of_thread(share_.number), it.of = of_thread(share_.of);
    it.newest = it.number + 1 == it.of && it.first < it.last;
    return it;
  }

 private:
  __device__ uint32_t index(uint32_t n) const {
    return n * teams_ + (n % 2 == 0 ? team_ : teams_ - 1 - team_);
  }

  // Shares behind the last one hold anything.
  __device__ void read(uint32_t n) {
    const uint32_t which = index(n + lane_) / p_.cache.kv_heads;
    if (which < p_.work.shares.most) share_ = p_.work.shares.at[which];
  }

  const Params& p_;
  uint32_t team_, teams_, lane_;
  shares::Share share_{};
};

// Requests a warp's tiles, every kSize-th of its items, one after the other. Each thread looks up the cache
// position of one tile in 32, ahead of the request: tables belong to the step.
template <uint32_t kSize>
class Tiles {
 public:
  __device__ Tiles(const Params& p, const Team<kSize>& team, const Agenda<kSize>& agenda, std::byte* places,
                   uint64_t* full, uint32_t lane)
      : p_(p), agenda_(agenda), places_(places), full_(full), member_(team.member), lane_(lane) {
    next_item();
  }

  // Requests the next tile, if there is one, into a stage that is no longer read. Called by the whole warp.
  __device__ void ask(uint32_t stage) {
    if (next_ == count_) return;
    const uint32_t position = __shfl_sync(~0u, found_, next_ % 32), head = item_.head;
    if (++next_ == count_)
      next_item();
    else if (next_ % 32 == 0)
      look_up();
    if (lane_ != 0) return;
    std::byte* to = places_ + stage * kTileBytes;
    uint64_t* full = full_ + stage;
    arrive_and_expect(full, kTileBytes);
    const uint32_t box[] = {0, position, 0, head};  // in the order of boxes_of()
    copy_box(to, &p_.k, box, full);
    copy_box(to + 2 * kHalf, &p_.v, box, full);
  }

 private:
  // The next item of which this warp has a tile.
  __device__ void next_item() {
    for (next_ = count_ = 0; count_ == 0 && n_ != agenda_.count;) {
      item_ = agenda_.item(n_++);
      const uint32_t first = item_.first + member_;
      count_ = first < item_.last ? (item_.last - first + kSize - 1) / kSize : 0;
    }
    if (count_ != 0) look_up();
  }

  __device__ void look_up() {
    if (next_ + lane_ >= count_) return;
    const int32_t* table = p_.work.blocks + size_t(item_.sequence) * p_.work.blocks_pitch;
    const uint32_t at = (item_.first + member_ + (next_ + lane_) * kSize) * kTile;  // in the context
    found_ = (uint32_t(table[at >> p_.block_shift]) << p_.block_shift) + (at & (p_.cache.block_size - 1));
  }

  const Params& p_;
  Agenda<kSize> agenda_;
  std::byte* places_;
  uint64_t* full_;
  Item item_{};
  uint32_t member_, lane_, n_ = 0, next_ = 0, count_ = 0, found_ = 0;  // next_, count_: tiles of the item
};

}  // namespace ep::attention

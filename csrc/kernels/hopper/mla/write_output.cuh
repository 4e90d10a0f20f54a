// Writes a warpgroup's result of an item: as outputs, as sums that another kernel joins, or as sums that its
// team joins (warpgroups of one block, or of all blocks of a cluster).
#pragma once

#include "kernels/hopper/common/cluster.cuh"
#include "kernels/hopper/mla/tile_products.cuh"

namespace ep::mla {

inline constexpr uint32_t kPieces = kValues / 8;  // pieces of 16 bytes in a head's output

// Number of heads that an item has in this warpgroup.
template <class F>
__device__ inline uint32_t heads_of(const Params& p, const Item& it) {
  return it.head < p.heads ? min(F::kHeads, p.heads - it.head) : 0;
}

// Index of a head's output, or of its sums and stats.
__device__ inline size_t row_of(const Params& p, const Item& it, uint32_t head) {
  return (size_t(it.sequence) * p.heads + it.head + head) * p.splits + it.split;
}

__device__ inline float inverse(float total) { return total == 0 ? 0.0f : 1.0f / total; }

// Writes through the memory of the queries, so that stores cover whole rows.
template <class F>
__device__ inline void write_output(Shared<F>& s, const Params& p, const Item& it, const Softmax<F>& mine,
                                    uint32_t worker, uint32_t thread) {
  float factors[Softmax<F>::kMine];
#pragma unroll
  for (uint32_t h = 0; h < Softmax<F>::kMine; ++h) factors[h] = inverse(mine.total[h]);
#pragma unroll
  for (uint32_t box = 0; box < kValueBoxes; ++box) {
    float scaled[F::kHeads / 2];
#pragma unroll
    for (uint32_t i = 0; i < F::kHeads / 2; ++i) scaled[i] = mine.sums[box][i] * factors[i / 4 * 2 + i % 2];
    store_turned<F::kHeads>(s.queries[worker][box], scaled, thread / 32, thread % 32);
  }
  meet_group(worker);
  auto* out = static_cast<__nv_bfloat16*>(p.work.out) + row_of(p, it, 0) * kValues;
  for (uint32_t i = thread; i < heads_of<F>(p, it) * kPieces; i += kWarps * 32) {
    const uint32_t head = i / kPieces, piece = i % kPieces;
    const std::byte* from = s.queries[worker][piece / 8] + swizzled(head, piece % 8);
    *reinterpret_cast<uint4*>(out + size_t(i) * 8) = *reinterpret_cast<const uint4*>(from);
  }
}

// Calls put(head, channel, value) for all sums of a thread.
template <class F, class Put>
__device__ inline void for_each_sum(const Softmax<F>& mine, uint32_t thread, const Put& put) {
  const uint32_t row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (uint32_t box = 0; box < kValueBoxes; ++box)
#pragma unroll
    for (uint32_t i = 0; i < F::kHeads / 2; ++i)
      put(mine.head(i / 4 * 2 + i % 2, thread % 32), box * kBoxChannels + row + i / 2 % 2 * 8,
          mine.sums[box][i]);
}

template <class F>
__device__ inline void leave_sums(const Params& p, const Item& it, const Softmax<F>& mine, uint32_t thread) {
  const uint32_t heads = heads_of<F>(p, it);
  for_each_sum(mine, thread, [&](uint32_t head, uint32_t channel, float value) {
    if (head < heads) p.work.sums[row_of(p, it, head) * kValues + channel] = value;
  });
  if (thread >= 4) return;
#pragma unroll
  for (uint32_t h = 0; h < Softmax<F>::kMine; ++h)
    if (mine.head(h, thread) < heads)
      *reinterpret_cast<float2*>(p.work.stats + row_of(p, it, mine.head(h, thread)) * 2) =
          float2{mine.top[h], mine.total[h]};
}

// Leaves sums for the team, where this warpgroup's tiles were: it has no other item.
template <class F>
__device__ inline void leave_state(Shared<F>& s, const Softmax<F>& mine, uint32_t worker, uint32_t thread) {
  float* state = s.state(worker);
  for_each_sum(mine, thread, [&](uint32_t head, uint32_t channel, float value) {
    state[head * kStatePitch + channel] = value;
  });
  if (thread >= 4) return;
#pragma unroll
  for (uint32_t h = 0; h < Softmax<F>::kMine; ++h)
    s.stats[worker][mine.head(h, thread)] = float2{mine.top[h], mine.total[h]};
}

// Joins the sums of a head over a team. A thread has four channels.
struct Joined {
  float4 sum{};
  float top = -INFINITY, total = 0;

  __device__ void add(const float4& more, const float2& stats) {
    const float higher = fmaxf(top, stats.x), shift = higher == -INFINITY ? 0 : higher;  // avoid inf - inf
    const float own = exp2f(top - shift), other = exp2f(stats.x - shift);
    sum.x = fmaf(more.x, other, sum.x * own), sum.y = fmaf(more.y, other, sum.y * own);
    sum.z = fmaf(more.z, other, sum.z * own), sum.w = fmaf(more.w, other, sum.w * own);
    total = fmaf(stats.y, other, total * own);
    top = higher;
  }
};

// Each warpgroup of a team joins some of the heads.
template <class F>
__device__ inline void join_team(Shared<F>& s, const Params& p, const Item& it, uint32_t worker,
                                 uint32_t thread) {
  const uint32_t member = (blockIdx.x * kWorkers + worker) & (p.team - 1);
  for (uint32_t head = member; head < heads_of<F>(p, it); head += p.team) {
    Joined joined;
#pragma unroll 4
    for (uint32_t other = 0; other < p.team; ++other) {
      const uint32_t which = other % kWorkers, block = other / kWorkers;
      const uint32_t sums = shared_address(s.state(which) + head * kStatePitch + thread * 4);
      const uint32_t stats = shared_address(&s.stats[which][head]);
      joined.add(load_four(address_in(sums, block)), load_two(address_in(stats, block)));
    }
    const size_t at = row_of(p, it, head) * kValues + thread * 4;
    if (p.splits == 1) {
      const float factor = inverse(joined.total);
      const uint2 four{pack(joined.sum.x * factor, joined.sum.y * factor),
                       pack(joined.sum.z * factor, joined.sum.w * factor)};
      *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.work.out) + at) = four;
      continue;
    }
    *reinterpret_cast<float4*>(p.work.sums + at) = joined.sum;
    if (thread == 0)
      *reinterpret_cast<float2*>(p.work.stats + at / kValues * 2) = float2{joined.top, joined.total};
  }
}

}  // namespace ep::mla

// Splits rows for products with codes: 64 channels share a scale, and each channel is the sum of two codes
// (two_codes.cuh).
//
// In memory, a row has the high codes of all channels, then the low ones. If rows arrive as codes, the low
// ones are zero, and rows keep their own scales.
#pragma once

#include <cuda_bf16.h>

#include "kernels/hopper/experts/two_codes.cuh"
#include "kernels/hopper/experts/work_units.cuh"

namespace ep::experts {

constexpr uint32_t kLane = 8, kLanes = kRowScaled / kLane;  // channels per lane, lanes per group

// Where eight channels of a row are written.
struct SplitTo {
  std::byte *high, *low;
  float* scale;  // scale of their group

  __device__ SplitTo(const Weights& w, const Task& task, uint32_t row, uint32_t channel)
      : high(task.split + size_t(row) * (2 * w.width) + channel),
        low(high + w.width),
        scale(task.split_scales + size_t(row) * (w.width / kRowScaled) + channel / kRowScaled) {}
};

// Eight channels in bfloat16.
struct Values {
  uint4 held;

  __device__ void load(const Work& work, int64_t row, uint32_t channel) {
    const auto* from = static_cast<const std::byte*>(work.rows) + row * work.pitch + channel * 2;
    held = *reinterpret_cast<const uint4*>(from);
  }

  // Called by all lanes of a group.
  __device__ void split(const SplitTo& to, bool first) const {
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&held);
    float2 values[kLane / 2];
    uint32_t largest = 0;
#pragma unroll
    for (uint32_t i = 0; i < kLane / 2; ++i) {
      values[i] = __bfloat1622float2(pairs[i]);
      largest = max(largest, max(magnitude(values[i].x), magnitude(values[i].y)));
    }
    const uint32_t group = 0xffu << (threadIdx.x % 32 / kLanes * kLanes);  // the lanes of its group
#pragma unroll
    for (uint32_t by = 1; by < kLanes; by *= 2) largest = max(largest, __shfl_xor_sync(group, largest, by));
    const GroupScale scale(largest);
    alignas(8) uint16_t highs[kLane / 2], lows[kLane / 2];
#pragma unroll
    for (uint32_t i = 0; i < kLane / 2; ++i) {
      const CodePair codes(values[i].x * scale.inverse, values[i].y * scale.inverse);
      highs[i] = codes.high, lows[i] = codes.low;
    }
    *reinterpret_cast<uint2*>(to.high) = *reinterpret_cast<const uint2*>(highs);
    *reinterpret_cast<uint2*>(to.low) = *reinterpret_cast<const uint2*>(lows);
    if (first) *to.scale = scale.scale;
  }
};

// Eight channels given as codes. These become the high codes.
struct GivenCodes {
  uint2 held;
  float scale;

  __device__ void load(const Work& work, int64_t row, uint32_t channel) {
    const auto* from = static_cast<const std::byte*>(work.rows) + row * work.pitch + channel;
    held = *reinterpret_cast<const uint2*>(from);
    scale = work.row_scales[row * work.scale_row + channel / kScaled * work.scale_group];
  }

  __device__ void split(const SplitTo& to, bool first) const {
    *reinterpret_cast<uint2*>(to.high) = held;
    *reinterpret_cast<uint2*>(to.low) = uint2{};
    if (first) *to.scale = scale;
  }
};

// A piece of all experts' rows, in compact order: the channels of kAtOnce lanes for each of kThreads threads.
template <uint32_t kThreads>
struct Piece {
  static constexpr uint32_t kAtOnce = 8;  // in flight together

  // The number of lanes' shares in all rows.
  static __device__ uint32_t all(const Weights& w, const Work& work) {
    const uint64_t rows = min(uint64_t(work.offsets[w.experts]), uint64_t(work.most));
    return uint32_t(rows) * (w.width / kLane);
  }

  static __device__ uint32_t count(uint32_t all) { return ceil_div(all, kAtOnce * kThreads); }

  // Skips rows with an invalid id: a failed dispatch may leave any numbers.
  template <class Given>
  static __device__ void split(const Weights& w, const Task& task, uint32_t number, uint32_t all) {
    const uint32_t lanes = w.width / kLane;  // per row, in whole groups
    const uint32_t begin = number * (kAtOnce * kThreads) + threadIdx.x;
    Given given[kAtOnce];
    bool there[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t at = begin + i * kThreads;
      there[i] = at < all;
      if (!there[i]) continue;
      const int64_t from = task.work.row_ids != nullptr ? task.work.row_ids[at / lanes] : at / lanes;
      there[i] = uint64_t(from) < task.work.held;
      if (there[i]) given[i].load(task.work, from, at % lanes * kLane);
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (!there[i]) continue;
      const uint32_t at = begin + i * kThreads;
      given[i].split(SplitTo(w, task, at / lanes, at % lanes * kLane), at % kLanes == 0);
    }
  }
};

}  // namespace ep::experts

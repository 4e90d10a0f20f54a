// Moves a row of the caller: loads it, quantises it for FP8 and stores it piece by piece.
#pragma once

#include "exchange/nvlink/quantise.cuh"

namespace ep::cuda {

// What a lane stores: 16 bytes at `at` of the row as it travels, and where it leads, word `scale_at` of its
// scales.
struct Piece {
  uint4 words;
  uint32_t scale, at, scale_at;
  bool active, leads;
};

// Two times 16 bytes of a row in flight per thread; for FP8 32 bytes of channels each, of which a warp loads
// one half after the other, so that no access leaves gaps: see pair_up(). Whole warps call all of it.
template <bool kFp8, bool kNarrow>
struct Row {
  static constexpr uint32_t kBytes = kFp8 ? 32 : 16, kAhead = 2;
  const std::byte* x;
  uint32_t bytes, first, end;  // of x; in units of kBytes
  uint4 low[kAhead], high[kFp8 ? kAhead : 1];

  __device__ __forceinline__ uint32_t at(uint32_t i) const { return first + threadIdx.x + i * blockDim.x; }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      if constexpr (kFp8) {
        const uint32_t lane = threadIdx.x % kWarp, from = (at(i) - lane) * kBytes + lane * 16,
                       to = from + kWarp * 16, behind = end * kBytes;
        low[i] = load16(x + (from < behind ? from : 0));  // the lanes of a warp stay together
        high[i] = load16(x + (to < behind ? to : 0));
      } else if (at(i) < end) {
        low[i] = load_row<kNarrow>(x, at(i) * kBytes, bytes);
      }
    }
  }
  __device__ __forceinline__ Piece piece(uint32_t i, Payload payload) const {
    if constexpr (kFp8) return quantised(low[i], high[i], paired_unit(at(i)), end, payload);
    return {at(i) < end ? sendable(low[i]) : uint4{}, 0, at(i) * 16, 0, at(i) < end, false};
  }
  __device__ __forceinline__ bool next() {
    first += kAhead * blockDim.x;
    return first < end;
  }
  // 16 channels of a lane, 8 lanes to a scale.
  static __device__ __forceinline__ Piece quantised(uint4 low, uint4 high, uint32_t unit, uint32_t end,
                                                    Payload payload) {
    Piece p;
    float scale;
    pair_up(low, high);
    p.words = quantise16(low, high, payload != Payload::kFp8, &scale);
    p.at = unit * 16;
    p.active = unit < end;
    p.scale = bits_of(scale);
    p.scale_at = unit / 8;
    p.leads = p.active && unit % 8 == 0;
    if (payload != Payload::kFp8Ue8m0) return p;
    const uint32_t group = unit / 8 % 4;  // four groups of a warp share a word
    p.scale = __reduce_or_sync(kFull, p.leads ? uint32_t(ue8m0_of(scale)) << group * 8 : 0u);
    // Four groups that are not finite: the lowest arrives with an exponent that is, its codes are NaN.
    if (p.scale == kNothing && group == 0) p.words = {kNanCodes, kNanCodes, kNanCodes, kNanCodes};
    p.scale = sendable(p.scale);
    p.scale_at = unit / 32;
    p.leads = p.leads && group == 0;
    return p;
  }
};

// Where part `part` of 1 << split begins, in multiples that no group of lanes straddles; behind the last: the
// end.
__device__ __forceinline__ uint32_t part_begin(uint32_t units, uint32_t part, uint32_t split) {
  return part >> split ? units : min(part * (((units >> split) + kWarp - 1) / kWarp * kWarp), units);
}

// Part `part` of 1 << split of row t of x, not loaded yet.
template <bool kFp8, bool kNarrow>
__device__ __forceinline__ void begin_row(Row<kFp8, kNarrow>& row, const void* x, uint32_t hidden, uint32_t t,
                                          uint32_t part, uint32_t split) {
  const uint32_t bytes = hidden * uint32_t(sizeof(uint16_t)), unit = Row<kFp8, kNarrow>::kBytes;
  const uint32_t units = (bytes + unit - 1) / unit;
  row.x = static_cast<const std::byte*>(x) + uint64_t(t) * bytes;
  row.bytes = bytes;
  row.first = part_begin(units, part, split);
  row.end = part_begin(units, part + 1, split);
}

}  // namespace ep::cuda

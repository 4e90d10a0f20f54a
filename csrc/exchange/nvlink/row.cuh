// Moves a row of the caller: loads it, quantises it for FP8 and stores it piece by piece.
#pragma once

#include "exchange/nvlink/quantise.cuh"

namespace ep::cuda {

// What a lane stores: 16 bytes at offset `at` of the row on the wire. If it `leads`, also word `scale_at` of
// the scales.
struct Piece {
  uint4 words;
  uint32_t scale, at, scale_at;
  bool active, leads;
};

// Each thread has two loads of 16 bytes in flight; for FP8, two units of 32 bytes. A warp loads the halves of
// these units one after the other, so that no access leaves gaps: see pair_up(). Whole warps call all
// functions.
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
        low[i] = load16(x + (from < behind ? from : 0));  // keeps the lanes together
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
    // If all four groups are not finite, the word is all ones. The first group then gets a finite scale and
    // NaN codes.
    if (p.scale == kNothing && group == 0) p.words = {kNanCodes, kNanCodes, kNanCodes, kNanCodes};
    p.scale = sendable(p.scale);
    p.scale_at = unit / 32;
    p.leads = p.leads && group == 0;
    return p;
  }
};

// Where part `part` of 1 << split begins, rounded so that no group of lanes straddles it. Behind the last
// part: the end.
__device__ __forceinline__ uint32_t part_begin(uint32_t units, uint32_t part, uint32_t split) {
  return part >> split ? units : min(part * (((units >> split) + kWarp - 1) / kWarp * kWarp), units);
}

// Selects part `part` of 1 << split of row t of x, without loading it.
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

// Wire formats of combine's rows, 16 channels per lane and 128 per group of 8 lanes:
//
//   FP8    e4m3 and a float32 scale per group, with the arithmetic of exchange/common/quant.hpp
//            16 bytes a lane | 4 bytes a group
//   LOG10  sign and 9 bits: 0 = zero, n = 2^(bottom + (n - 1) * step). Each group has its bottom and step,
//   over at
//          most 32 octaves: half a step is at most 2.2 %. The idea is from DeepEP's combine.
//            16 bytes a lane | 4 bytes a lane | 8 bytes a group
//
// A group that contains a NaN or infinity arrives as NaN. No word is ever all ones. Whole warps call these
// functions, because the lanes of a group share its scale or range.
#pragma once

#include <cmath>

#include "exchange/nvlink/wait.cuh"
#include "exchange/nvlink/weighted_sum.cuh"

namespace ep::cuda {

constexpr uint32_t kChannels = 16;  // per lane
constexpr uint32_t kLogCodes = 510;
constexpr float kLogOctaves = 32.0f;

__device__ __forceinline__ bool leads_group(uint32_t unit) { return unit % 8 == 0; }

// -- FP8 ----------------------------------------------------------------------------------------------

struct Fp8Wire {
  static constexpr uint32_t kTogether = 2;  // rows that a thread awaits at once
  struct Words {
    uint4 codes;
    uint32_t scale;
  };
  struct At {
    std::byte* row;
    uint32_t unit, hidden;
    __device__ __forceinline__ std::byte* codes() const { return row + unit * 16; }
    __device__ __forceinline__ std::byte* scale() const { return row + hidden + unit / 8 * 4; }
  };

  static __device__ __forceinline__ void send(const At& at, bool active, const float (&x)[kChannels]) {
    uint32_t most = 0, out[4];
#pragma unroll
    for (uint32_t i = 0; i < kChannels; ++i) most = max(most, bits_of(x[i]) & 0x7fffffffu);
    const Scale by = scale_of(max_of_group(most), false);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      out[i] = to_e4m3x2(x[4 * i] * by.multiply, x[4 * i + 1] * by.multiply) |
               to_e4m3x2(x[4 * i + 2] * by.multiply, x[4 * i + 3] * by.multiply) << 16;
    if (active) put16(at.codes(), {out[0], out[1], out[2], out[3]});
    if (active && leads_group(at.unit)) put4(at.scale(), bits_of(by.stored));
  }
  static __device__ __forceinline__ void add(const Words& w, float (&sum)[kChannels]) {
    const uint32_t words[4] = {w.codes.x, w.codes.y, w.codes.z, w.codes.w};
    const float scale = float_of(w.scale);
#pragma unroll
    for (uint32_t i = 0; i < kChannels; i += 2) {
      float low, high;
      from_e4m3x2(uint16_t(words[i / 4] >> 8 * (i % 4)), &low, &high);
      sum[i] = __fadd_rn(sum[i], __fmul_rn(low, scale));
      sum[i + 1] = __fadd_rn(sum[i + 1], __fmul_rn(high, scale));
    }
  }
  static __device__ __forceinline__ void empty(const At& at) {
    empty16(at.codes());
    if (leads_group(at.unit)) put4(at.scale(), kNothing);
  }
};
__device__ __forceinline__ void peek(const Fp8Wire::At& at, Fp8Wire::Words* w) {
  w->codes = peek16(at.codes());
  w->scale = peek4(at.scale());
}
__device__ __forceinline__ bool came(const Fp8Wire::Words& w) { return came(w.codes) && came(w.scale); }

// -- LOG10 --------------------------------------------------------------------------------------------

struct Log10Wire {
  static constexpr uint32_t kTogether = 1;  // limited by registers
  struct Words {
    uint4 codes;
    uint32_t last;
    uint2 range;  // bottom, step
  };
  struct At {
    std::byte* row;
    uint32_t unit, hidden;
    __device__ __forceinline__ std::byte* codes() const { return row + unit * 16; }
    __device__ __forceinline__ std::byte* last() const { return row + hidden + unit * 4; }
    __device__ __forceinline__ std::byte* range() const { return row + hidden + hidden / 4 + unit / 8 * 8; }
  };

  static __device__ __forceinline__ void send(const At& at, bool active, const float (&x)[kChannels]) {
    // Largest and smallest magnitude, compared as bits. `least` holds the inverted bits, in which zero and
    // NaN do not count as smallest.
    uint32_t most = 0, least = 0;
#pragma unroll
    for (uint32_t i = 0; i < kChannels; ++i) {
      const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
      most = max(most, magnitude);
      least = max(least, magnitude == 0 ? 0 : ~magnitude);
    }
    most = max_of_group(most);
    least = ~max_of_group(least);
    const bool zeros = most == 0, sound = most < bits_of(INFINITY);
    const float top = __log2f(float_of(most)),
                bottom = zeros ? 0.0f : fmaxf(__log2f(float_of(least)), top - kLogOctaves);
    const float step = zeros ? 1.0f : fmaxf((top - bottom) * (1.0f / float(kLogCodes - 1)), 1e-6f);
    const float codes_per_octave = 1.0f / step;
    uint32_t out[5] = {};
#pragma unroll
    for (uint32_t i = 0; i < kChannels; ++i) {
      // 1 + steps above the bottom. After adding 1.5 * 2^23, the low bits of the sum are its rounded value.
      const float n = 1.0f + (__log2f(fabsf(x[i])) - bottom) * codes_per_octave;
      const uint32_t rounded = bits_of(fminf(n, float(kLogCodes)) + 12582912.0f) & 0x1ff;
      const uint32_t code = (n > 0.5f ? rounded : 0) | (bits_of(x[i]) >> 22 & 0x200);
      const uint32_t bit = 10 * i;
      out[bit / 32] |= code << bit % 32;
      if (bit % 32 > 22) out[bit / 32 + 1] |= code >> (32 - bit % 32);
    }
    if (!active) return;
    put16(at.codes(), {out[0], out[1], out[2], out[3]});
    put4(at.last(), out[4]);
    const float nan = float_of(0x7fc00000u);
    if (leads_group(at.unit)) put8(at.range(), bits_of(bottom), bits_of(sound ? step : nan));
  }
  static __device__ __forceinline__ void add(const Words& w, float (&sum)[kChannels]) {
    const uint32_t words[6] = {w.codes.x, w.codes.y, w.codes.z, w.codes.w, w.last, 0};
    const float bottom = float_of(w.range.x), step = float_of(w.range.y);
#pragma unroll
    for (uint32_t i = 0; i < kChannels; ++i) {
      const uint32_t bit = 10 * i;
      const uint32_t code = __funnelshift_r(words[bit / 32], words[bit / 32 + 1], bit % 32) & 0x3ff;
      const float n = float_of(0x4b000000u | (code & 0x1ff)) - 8388609.0f;  // 2^23 + code, less 2^23 + 1
      const float size = exp2f(bottom + n * step);
      const float value = (code & 0x1ff) == 0 && step == step ? 0.0f : size;
      sum[i] = __fadd_rn(sum[i], float_of(bits_of(value) | code >> 9 << 31));
    }
  }
  static __device__ __forceinline__ void empty(const At& at) {
    empty16(at.codes());
    put4(at.last(), kNothing);
    if (leads_group(at.unit)) put8(at.range(), kNothing, kNothing);
  }
};
__device__ __forceinline__ void peek(const Log10Wire::At& at, Log10Wire::Words* w) {
  w->codes = peek16(at.codes());
  w->last = peek4(at.last());
  w->range = peek8(at.range());
}
__device__ __forceinline__ bool came(const Log10Wire::Words& w) {
  return came(w.codes) && came(w.last) && came(w.range);
}

// -- rows ---------------------------------------------------------------------------------------------

// Packs units [begin, end) of 16 channels of the sum of all rows into a slot of `hidden` channels.
template <class Packed>
__device__ __forceinline__ void send_packed(const Terms& terms, std::byte* slot, uint32_t hidden,
                                            uint32_t begin, uint32_t end) {
  const uint32_t lane = threadIdx.x % kWarp, bytes = hidden * 2;
#pragma unroll 1
  for (uint32_t first = begin + threadIdx.x - lane; first < end; first += blockDim.x) {
    // Rows are read without gaps, as two times 512 bytes. Then each lane gets the two halves of its unit.
    const uint32_t unit = paired_unit(first + lane), from = first * 32 + lane * 16, to = from + kWarp * 16;
    Sum low, high;
    sum_rows<false>(terms, from < end * 32 ? from : begin * 32, bytes, low);
    sum_rows<false>(terms, to < end * 32 ? to : begin * 32, bytes, high);
    float x[kChannels];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      pair_up(low.at[i], high.at[i]);
      x[i] = low.at[i];
      x[i + 8] = high.at[i];
    }
    Packed::send({slot, unit, hidden}, unit < end, x);
  }
}

// Sums all packed rows as they arrive, writes the rounded sum to `out`, and empties the slots.
template <class Packed>
__device__ __forceinline__ void sum_packed(const Device& g, const Terms& terms, uint64_t* waited,
                                           std::byte* out, uint32_t begin, uint32_t end, Trouble& trouble) {
  const uint32_t lane = threadIdx.x % kWarp, hidden = g.hidden;
#pragma unroll 1
  for (uint32_t first = begin + threadIdx.x - lane; first < end; first += blockDim.x) {
    const uint32_t unit = paired_unit(first + lane);
    float sum[kChannels] = {};
#pragma unroll 1
    for (uint32_t i = 0; i < terms.count; i += Packed::kTogether) {
      typename Packed::Words w[Packed::kTogether];
      const bool both = Packed::kTogether == 2 && i + 1 < terms.count, waits = unit < end && !trouble.any();
      const auto at = [&](uint32_t j) { return typename Packed::At{terms.list[i + j].row, unit, hidden}; };
      const uint32_t peers = terms.list[i].of | (both ? terms.list[i + 1].of << 8 : 0);
      const uint32_t here = await_slots(g, peers, !waits ? 0 : both ? 3 : 1, waited, at, w, trouble);
      __syncwarp();  // all lanes of a group have read what its first lane empties
#pragma unroll
      for (uint32_t j = 0; j < Packed::kTogether; ++j) {
        if (!(here >> j & 1)) continue;
        Packed::add(w[j], sum);
        Packed::empty(at(j));
      }
      __syncwarp();
    }
    uint4 low{to_bf16x2(sum[0], sum[1]), to_bf16x2(sum[2], sum[3]), to_bf16x2(sum[4], sum[5]),
              to_bf16x2(sum[6], sum[7])};
    uint4 high{to_bf16x2(sum[8], sum[9]), to_bf16x2(sum[10], sum[11]), to_bf16x2(sum[12], sum[13]),
               to_bf16x2(sum[14], sum[15])};
    pair_up(low, high);
    const uint32_t from = first * 32 + lane * 16, to = from + kWarp * 16;
    if (from < end * 32) store16(out + from, low);
    if (to < end * 32) store16(out + to, high);
  }
}

}  // namespace ep::cuda

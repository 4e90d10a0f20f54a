// Rows of combine on the wire, 16 channels to a lane and 128 to a group of 8 lanes:
//
//   FP8    e4m3 and a float32 scale per group, the arithmetic of ep/quant.hpp
//            16 bytes a lane | 4 bytes a group
//   LOG10  sign and 9 bits: 0 = zero, n = 2^(bottom + (n - 1) * step), bottom and step of the group, over at
//          most 32 octaves: half a step is at most 2.2 %. DeepEP's combine has the idea.
//            16 bytes a lane | 4 bytes a lane | 8 bytes a group
//
// A group with a value that is not finite arrives as NaN. No word is ever all ones. Whole warps call all of
// it: the lanes of a group share what follows their codes.
#pragma once

#include <cmath>

#include "cuda/sum.cuh"
#include "cuda/wait.cuh"

namespace ep::cuda {

constexpr uint32_t kChannels = 16;  // of a lane
constexpr uint32_t kLogCodes = 510;
constexpr float kLogOctaves = 32.0f;

__device__ __forceinline__ bool leads_group() { return threadIdx.x % 8 == 0; }

// -- FP8 ----------------------------------------------------------------------------------------------

struct Fp8Wire {
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
    if (active && leads_group()) put4(at.scale(), bits_of(by.stored));
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
    if (leads_group()) put4(at.scale(), kNothing);
  }
};
__device__ __forceinline__ void peek(const Fp8Wire::At& at, Fp8Wire::Words* w) {
  w->codes = peek16(at.codes());
  w->scale = peek4(at.scale());
}
__device__ __forceinline__ bool came(const Fp8Wire::Words& w) { return came(w.codes) && came(w.scale); }

// -- LOG10 --------------------------------------------------------------------------------------------

__device__ __forceinline__ float max_of_group(float value) {
#pragma unroll
  for (uint32_t by = 4; by != 0; by /= 2) value = fmaxf(value, __shfl_xor_sync(kFull, value, by));
  return value;
}

struct Log10Wire {
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
    float top = -INFINITY, low = INFINITY;  // of the logarithms
    bool finite = true;
#pragma unroll
    for (uint32_t i = 0; i < kChannels; ++i) {
      const float log = __log2f(fabsf(x[i]));
      finite = finite && fabsf(x[i]) < INFINITY;
      top = fmaxf(top, log);
      if (x[i] != 0.0f) low = fminf(low, log);
    }
    top = max_of_group(top);
    const float bottom = fmaxf(-max_of_group(-low), top - kLogOctaves);
    const float step = fmaxf((top - bottom) / float(kLogCodes - 1), 1e-6f);
    const bool zeros = !(top > -INFINITY), sound = max_of_group(finite ? 0.0f : 1.0f) == 0.0f;
    uint32_t out[5] = {};
#pragma unroll
    for (uint32_t i = 0; i < kChannels; ++i) {
      const float n = rintf((__log2f(fabsf(x[i])) - bottom) / step);
      uint32_t code = n < 0.0f || zeros || x[i] == 0.0f ? 0 : 1 + min(uint32_t(n), kLogCodes - 1);
      code |= bits_of(x[i]) >> 31 << 9;
      const uint32_t bit = 10 * i;
      out[bit / 32] |= code << bit % 32;
      if (bit % 32 > 22) out[bit / 32 + 1] |= code >> (32 - bit % 32);
    }
    if (!active) return;
    put16(at.codes(), {out[0], out[1], out[2], out[3]});
    put4(at.last(), out[4]);
    const float nan = float_of(0x7fc00000u);
    if (leads_group()) put8(at.range(), bits_of(zeros ? 0.0f : bottom), bits_of(sound ? step : nan));
  }
  static __device__ __forceinline__ void add(const Words& w, float (&sum)[kChannels]) {
    const uint32_t words[6] = {w.codes.x, w.codes.y, w.codes.z, w.codes.w, w.last, 0};
    const float bottom = float_of(w.range.x), step = float_of(w.range.y);
#pragma unroll
    for (uint32_t i = 0; i < kChannels; ++i) {
      const uint32_t bit = 10 * i;
      const uint32_t code = __funnelshift_r(words[bit / 32], words[bit / 32 + 1], bit % 32) & 0x3ff;
      const float size = exp2f(bottom + float(int(code & 0x1ff) - 1) * step);
      const float value = (code & 0x1ff) == 0 && step == step ? 0.0f : size;
      sum[i] = __fadd_rn(sum[i], code >> 9 ? -value : value);
    }
  }
  static __device__ __forceinline__ void empty(const At& at) {
    empty16(at.codes());
    put4(at.last(), kNothing);
    if (leads_group()) put8(at.range(), kNothing, kNothing);
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

// Units [begin, end) of 16 channels of the sum of all rows, packed into a slot of `hidden` channels.
template <class Packed>
__device__ __forceinline__ void send_packed(const Terms& terms, std::byte* slot, uint32_t hidden,
                                            uint32_t begin, uint32_t end) {
  const uint32_t lane = threadIdx.x % kWarp, bytes = hidden * 2;
#pragma unroll 1
  for (uint32_t first = begin + threadIdx.x - lane; first < end; first += blockDim.x) {
    const bool active = first + lane < end;
    const uint32_t unit = active ? first + lane : begin;
    Sum low, high;
    sum_rows<false>(terms, unit * 32, bytes, low);
    sum_rows<false>(terms, unit * 32 + 16, bytes, high);
    float x[kChannels];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      x[i] = low.at[i];
      x[i + 8] = high.at[i];
    }
    Packed::send({slot, unit, hidden}, active, x);
  }
}

// Their sum over all rows as they come, rounded to `out`; empties them.
template <class Packed>
__device__ __forceinline__ void sum_packed(const Device& g, const Terms& terms, uint64_t* waited,
                                           std::byte* out, uint32_t begin, uint32_t end, Trouble& trouble) {
  const uint32_t lane = threadIdx.x % kWarp, hidden = g.hidden;
#pragma unroll 1
  for (uint32_t first = begin + threadIdx.x - lane; first < end; first += blockDim.x) {
    const bool active = first + lane < end;
    const uint32_t unit = first + lane;
    float sum[kChannels] = {};
#pragma unroll 1
    for (uint32_t i = 0; i < terms.count; i += 2) {
      typename Packed::Words w[2];
      const bool both = i + 1 < terms.count, waits = active && !trouble.any();
      const auto at = [&](uint32_t j) { return typename Packed::At{terms.list[i + j].row, unit, hidden}; };
      const uint32_t peers = terms.list[i].of | (both ? terms.list[i + 1].of << 8 : 0);
      const uint32_t here = await_slots(g, peers, !waits ? 0 : both ? 3 : 1, waited, at, w, trouble);
      __syncwarp();  // all lanes of a group have what its first lane empties
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        if (!(here >> j & 1)) continue;
        Packed::add(w[j], sum);
        Packed::empty(at(j));
      }
      __syncwarp();
    }
    if (!active) continue;
    uint32_t words[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) words[i] = to_bf16x2(sum[2 * i], sum[2 * i + 1]);
    store16(out + unit * 32, {words[0], words[1], words[2], words[3]});
    store16(out + unit * 32 + 16, {words[4], words[5], words[6], words[7]});
  }
}

}  // namespace ep::cuda

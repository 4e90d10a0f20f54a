// The weighted sum of rows that both halves of combine use: float32 from +0, multiply then add, in order,
// rounded once. A warp works alone: lane n holds the n-th row to sum.
#pragma once

#include "exchange/nvlink/quantise.cuh"

namespace ep::cuda {

// Two floats to bf16, to nearest even, the first in the low half. A NaN becomes 0x7fff, so no word is all
// ones.
__device__ __forceinline__ uint32_t to_bf16x2(float low, float high) {
#ifdef __CUDA_ARCH__
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  return float_to_bf16(low) | uint32_t(float_to_bf16(high)) << 16;
#endif
}

// 8 channels.
struct Sum {
  float at[8] = {};

  __device__ __forceinline__ void add(const uint4& v, float weight) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (uint32_t p = 0; p < 4; ++p) {
      at[2 * p] = __fadd_rn(at[2 * p], __fmul_rn(weight, low_half(words[p])));
      at[2 * p + 1] = __fadd_rn(at[2 * p + 1], __fmul_rn(weight, high_half(words[p])));
    }
  }
  __device__ __forceinline__ uint4 rounded() const {
    return {to_bf16x2(at[0], at[1]), to_bf16x2(at[2], at[3]), to_bf16x2(at[4], at[5]),
            to_bf16x2(at[6], at[7])};
  }
};

// One row to add. Each warp has a list of them in shared memory, in order.
struct alignas(16) Term {
  std::byte* row;
  float weight;
  uint32_t of;  // the rank that it comes from, or the choice that it is
};

struct Terms {
  Term* list;
  uint32_t count;

  // Collects the lanes that have a row, ascending. All lanes of a warp call it.
  __device__ __forceinline__ void collect(bool valid, const Term& mine) {
    const uint32_t all = __ballot_sync(kFull, valid), lane = threadIdx.x % kWarp;
    __syncwarp();  // the previous list is no longer in use
    if (valid) list[__popc(all & ((1u << lane) - 1))] = mine;
    count = __popc(all);
    __syncwarp();
  }
};

// Lists for all warps of a block.
__device__ __forceinline__ Terms own_terms() {
  __shared__ Term lists[kMaxWarps][kMaxTopK];
  return {lists[threadIdx.x / kWarp], 0};
}

constexpr uint32_t kInFlight = 4;               // rows loaded before the first is used
constexpr uint32_t kWords = 2;                  // of each row, awaited by a thread at once
constexpr uint32_t kRows = kInFlight / kWords;  // rows awaited at once

// Adds bytes [at, at + 16) of all rows.
template <bool kNarrow>
__device__ __forceinline__ void sum_rows(const Terms& terms, uint32_t at, uint32_t bytes, Sum& sum) {
#pragma unroll 1
  for (uint32_t i = 0; i < terms.count; i += kInFlight) {
    uint4 v[kInFlight];
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j)
      if (i + j < terms.count) v[j] = load_row<kNarrow>(terms.list[i + j].row, at, bytes);
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j)
      if (i + j < terms.count) sum.add(v[j], terms.list[i + j].weight);
  }
}

// Where part `part` of 1 << split of a row of `bytes` begins, in whole groups. Behind the last part: the end.
__device__ __forceinline__ uint32_t part_at(uint32_t bytes, uint32_t part, uint32_t split) {
  return part >> split ? bytes : part * ((bytes >> split) / 256 * 256);
}

}  // namespace ep::cuda

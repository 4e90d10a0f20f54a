// What a warpgroup computes on a tile of 64 positions: tensor core products with positions, then channels, as
// the wide side and its heads as the narrow one, so few heads waste nothing.
//
//   scores [64 positions, heads]   = keys [64, 576] @ queries [heads, 576].T
//   sums   [8 x 64 channels, heads] += values.T [64, 64 positions] @ weights [heads, 64 positions].T
//
// Thread t has rows 16 * (t / 32) + t % 32 / 4 (+ 8) and columns 8 j + 2 (t % 4) (+ 1) of both, so it has the
// same heads in both. Weights pass through shared memory.
#pragma once

#include <cuda_bf16.h>

#include "kernels/hopper/common/narrow_products.cuh"
#include "kernels/hopper/mla/work_items.cuh"

namespace ep::mla {

__device__ inline void meet_group(uint32_t worker) {
  asm volatile("bar.sync %0, %1;" ::"r"(worker + 1), "n"(kWarps * 32) : "memory");
}

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// The offset of 16 bytes in a box.
__device__ inline uint32_t swizzled(uint32_t row, uint32_t piece) {
  return row * kSwizzledRow + ((piece ^ (row & 7)) << 4);
}

// Stores [64 rows, kHeads] of a warpgroup, as products leave them, as [kHeads, 64] bfloat16 in a box.
template <uint32_t kHeads>
__device__ inline void store_turned(std::byte* box, const float (&values)[kHeads / 2], uint32_t warp,
                                    uint32_t lane) {
  // Matrices of 8 x 8 in this order: rows, rows + 8, then the next eight heads.
  const uint32_t head = lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
#pragma unroll
  for (uint32_t h = 0; h < kHeads / 16; ++h) {
    const float* v = values + h * 8;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(box) + swizzled(h * 16 + head, piece)),
                 "r"(pack(v[0], v[1])), "r"(pack(v[2], v[3])), "r"(pack(v[4], v[5])), "r"(pack(v[6], v[7]))
                 : "memory");
  }
}

// A warpgroup's place in its ring, box by box.
template <class F>
struct Reader {
  Shared<F>& s;
  uint32_t ring;
  Place place;

  __device__ void await() const { await_phase(&s.full[ring][place.stage], place.parity); }
  __device__ void next() { place.next(F::kRing); }
  __device__ std::byte* box() const { return s.ring[ring][place.stage]; }
  // Called by each warp when it no longer reads the box.
  __device__ void release(uint32_t lane) const {
    if (lane == 0) arrive(&s.empty[ring][place.stage]);
  }
};

// The softmax state of a warpgroup over the positions so far.
template <class F>
struct Softmax {
  static constexpr uint32_t kHeads = F::kHeads, kMine = kHeads / 4;  // heads per thread
  float top[kMine], total[kMine];  // total: for this thread's positions only
  float sums[kValueBoxes][kHeads / 2];

  __device__ void begin() {
#pragma unroll
    for (uint32_t h = 0; h < kMine; ++h) top[h] = -INFINITY, total[h] = 0;
#pragma unroll
    for (auto& box : sums)
#pragma unroll
      for (float& each : box) each = 0;
  }

  // Adds the reader's next tile. seen: number of its valid positions, at least one. rows: positions per copy.
  // scale: converts to units of log2.
  __device__ void add(Reader<F>& at, uint32_t worker, uint32_t seen, uint32_t rows, float scale,
                      uint32_t warp, uint32_t lane) {
    float scores[kHeads / 2];
    Reader<F> values = at;
    score(scores, at, worker, lane);
    weigh(scores, at.s, worker, seen, scale, warp, lane);
    store_turned<kHeads>(at.s.weights[worker], scores, warp, lane);
    if (seen % rows != 0) clear(values, seen, (seen + rows - 1) & ~(rows - 1), warp * 32 + lane);
    publish_to_async();
    meet_group(worker);
    sum(values, worker, lane);
  }

  // Adds up the totals of the warpgroup. Called by all its threads.
  __device__ void finish(Shared<F>& s, uint32_t worker, uint32_t warp, uint32_t lane) {
#pragma unroll
    for (float& each : total)
#pragma unroll
      for (uint32_t step = 4; step < 32; step *= 2) each += __shfl_xor_sync(~0u, each, step);
    tell(s, worker, total, warp, lane);
#pragma unroll
    for (uint32_t h = 0; h < kMine; ++h) {
      float all = 0;
#pragma unroll
      for (uint32_t w = 0; w < kWarps; ++w) all += s.across[worker][w][head(h, lane)];
      total[h] = all;
    }
    meet_group(worker);
  }

  // Number of the thread's head `mine` among the heads of the warpgroup.
  __device__ static uint32_t head(uint32_t mine, uint32_t lane) {
    return mine / 2 * 8 + lane % 4 * 2 + mine % 2;
  }

 private:
  __device__ static void score(float (&scores)[kHeads / 2], Reader<F>& at, uint32_t worker, uint32_t lane) {
    const std::byte* queries = at.s.queries[worker][0];
#pragma unroll
    for (uint32_t box = 0; box < kBoxes; ++box, at.next()) {
      at.await();
      begin_products();
      const uint64_t a = operand(shared_address(at.box()));
      const uint64_t b = operand(shared_address(queries + box * kHeads * kSwizzledRow));
#pragma unroll
      for (uint32_t k = 0; k < kBoxChannels / 16; ++k)
        NarrowProduct<kHeads, Across::kChannels>::run(scores, a + 2 * k, b + 2 * k, box + k != 0);
      if (box + 1 == kBoxes) commit_products();
      if (box + 1 == kBoxes) await_products<0>(), at.release(lane);
    }
  }

  // Shares each warp's values for the heads with all warps.
  __device__ static void tell(Shared<F>& s, uint32_t worker, const float (&of)[kMine], uint32_t warp,
                              uint32_t lane) {
    if (lane < 4) {
#pragma unroll
      for (uint32_t h = 0; h < kMine; ++h) s.across[worker][warp][head(h, lane)] = of[h];
    }
    meet_group(worker);
  }

  // Turns scores into weights. Positions behind the end may hold anything.
  __device__ void weigh(float (&scores)[kHeads / 2], Shared<F>& s, uint32_t worker, uint32_t seen,
                        float scale, uint32_t warp, uint32_t lane) {
    const uint32_t row = warp * 16 + lane / 4;
    float high[kMine];
#pragma unroll
    for (uint32_t h = 0; h < kMine; ++h) {
      float &low_row = scores[h / 2 * 4 + h % 2], &high_row = scores[h / 2 * 4 + h % 2 + 2];
      low_row = row < seen ? low_row * scale : -INFINITY;
      high_row = row + 8 < seen ? high_row * scale : -INFINITY;
      high[h] = fmaxf(low_row, high_row);
#pragma unroll
      for (uint32_t step = 4; step < 32; step *= 2)
        high[h] = fmaxf(high[h], __shfl_xor_sync(~0u, high[h], step));
    }
    tell(s, worker, high, warp, lane);
    float fade[kMine];
    bool fades = false;
#pragma unroll
    for (uint32_t h = 0; h < kMine; ++h) {
      float higher = top[h];
#pragma unroll
      for (uint32_t w = 0; w < kWarps; ++w) higher = fmaxf(higher, s.across[worker][w][head(h, lane)]);
      fade[h] = exp2f(top[h] - higher);
      fades |= fade[h] != 1.0f;
      top[h] = higher;
      float &low_row = scores[h / 2 * 4 + h % 2], &high_row = scores[h / 2 * 4 + h % 2 + 2];
      low_row = exp2f(low_row - higher), high_row = exp2f(high_row - higher);
      total[h] = fmaf(total[h], fade[h], low_row + high_row);
    }
    if (!__any_sync(~0u, fades)) return;
#pragma unroll
    for (auto& box : sums)
#pragma unroll
      for (uint32_t i = 0; i < kHeads / 2; ++i) box[i] *= fade[i / 4 * 2 + i % 2];
  }

  // Writes zeros for values behind the end, because 0 * NaN is NaN. Positions from `end` on were not loaded.
  __device__ static void clear(Reader<F> at, uint32_t seen, uint32_t end, uint32_t thread) {
    for (uint32_t box = 0; box < kValueBoxes; ++box, at.next())
      for (uint32_t i = seen * 8 + thread; i < end * 8; i += kWarps * 32)
        reinterpret_cast<uint4*>(at.box())[i] = uint4{};
  }

  __device__ void sum(Reader<F>& at, uint32_t worker, uint32_t lane) {
    const uint64_t b = operand(shared_address(at.s.weights[worker]));
    Reader<F> done = at;
    begin_products();
#pragma unroll
    for (uint32_t box = 0; box < kValueBoxes; ++box, at.next()) {
      const uint64_t a = operand(shared_address(at.box()));
#pragma unroll
      for (uint32_t k = 0; k < kTile / 16; ++k)  // steps of 2,048 bytes, and of 32
        NarrowProduct<kHeads, Across::kRows>::run(sums[box], a + 128 * k, b + 2 * k, 1);
      commit_products();
      if (box != 0) await_products<1>(), done.release(lane), done.next();
    }
    await_products<0>();
    done.release(lane);
  }
};

}  // namespace ep::mla

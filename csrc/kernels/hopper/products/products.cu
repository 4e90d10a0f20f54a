// One product of few rows with a weight, as partial sums. There is a block per (tile of weight rows) x (run
// of input channels), and also per tile of rows where multiprocessors would stay idle otherwise.
//
// A block requests all its weights at once, before the preceding kernel has ended, and keeps them. The rows
// then pass through a ring, tile by tile. Weights are the 64-row side of the products (wgmma m64nNk16), rows
// the narrow side, sums are float32. One warp requests copies, the others multiply.
#include "kernels/hopper/common/instructions.cuh"
#include "kernels/hopper/common/launch.hpp"
#include "kernels/hopper/common/products.cuh"
#include "kernels/hopper/products/products.hpp"

namespace ep::products {
namespace {

using namespace hopper;

constexpr uint32_t kGroupRows = 64;  // weight rows per warpgroup

// A block's shared memory and its share of the work.
template <uint32_t kRows, uint32_t kGroups>
struct Block {
  static constexpr uint32_t kTile = kGroups * kGroupRows;
  static constexpr uint32_t kChunk = kTile * kSwizzledRow, kStage = kRows * kSwizzledRow;  // bytes
  std::byte *weights, *rows;
  uint64_t *held, *full, *empty;  // per chunk of weights, and per stage of rows
  uint32_t first, chunks;         // channels of the weights, in chunks

  __device__ Block(std::byte* shared, const Params& p)
      : weights(shared),
        rows(weights + p.held * kChunk),
        held(reinterpret_cast<uint64_t*>(rows + p.stages * kStage)),
        full(held + p.held),
        empty(full + p.stages),
        first(p.chunks * blockIdx.y / gridDim.y),
        chunks(p.chunks * (blockIdx.y + 1) / gridDim.y - first) {}

  static constexpr size_t bytes(const Params& p) {
    return p.held * (kChunk + sizeof(uint64_t)) + p.stages * (kStage + 2 * sizeof(uint64_t));
  }

  // Called by one thread, before any other uses a barrier.
  __device__ void begin(const Params& p) const {
    fetch_map(&p.weight);
    fetch_map(&p.rows);
    for (uint32_t i = 0; i < p.held; ++i) init_barrier(&held[i], 1);
    for (uint32_t i = 0; i < p.stages; ++i) {
      init_barrier(&full[i], 1);
      init_barrier(&empty[i], 4 * kGroups);  // one arrival for each multiplying warp
    }
    publish_barriers();
    for (uint32_t i = 0; i < chunks; ++i) {
      arrive_and_expect(&held[i], kChunk);
      copy_box(weights + i * kChunk, &p.weight, (first + i) * kDepth, blockIdx.x * kTile, &held[i]);
    }
  }

  // Called by one thread. Rows after the last one are loaded as zeros.
  __device__ void load(const Params& p) const {
    Place place;
    for (uint32_t row = blockIdx.z * kRows; row < p.count; row += gridDim.z * kRows)
      for (uint32_t i = 0; i < chunks; ++i, place.next(p.stages)) {
        uint64_t* arrived = &full[place.stage];
        await_phase(&empty[place.stage], place.parity ^ 1);
        arrive_and_expect(arrived, kStage);
        copy_reused_box(rows + place.stage * kStage, &p.rows, (first + i) * kDepth, row, arrived);
      }
  }

  __device__ void multiply(const Params& p, uint32_t warp, uint32_t lane) const {
    const uint32_t own = warp / 4 * kGroupRows * kSwizzledRow;  // the warpgroup's offset in a chunk
    Place place;
    float sums[kRows / 2];
    for (uint32_t row = blockIdx.z * kRows; row < p.count; row += gridDim.z * kRows) {
      uint32_t before = 0;
      for (uint32_t i = 0; i < chunks; ++i, place.next(p.stages)) {
        await_phase(&held[i], 0);
        await_phase(&full[place.stage], place.parity);
        const uint64_t a = operand(shared_address(weights + i * kChunk) + own);
        const uint64_t x = operand(shared_address(rows + place.stage * kStage));
        begin_products();
#pragma unroll
        for (uint32_t k = 0; k < kDepth / 16; ++k)  // 32 bytes further
          Product<kRows>::run(sums, a + 2 * k, x + 2 * k, i + k != 0);
        commit_products();
        await_products<1>();
        if (i != 0 && lane == 0) arrive(&empty[before]);
        before = place.stage;
      }
      await_products<0>();
      if (lane == 0) arrive(&empty[before]);
      store(p, row, warp, lane, sums);
    }
  }

  // Eight lanes fill a sector of 32 bytes.
  __device__ static void store(const Params& p, uint32_t row, uint32_t warp, uint32_t lane,
                               const float (&sums)[kRows / 2]) {
    const uint32_t channel = blockIdx.x * kTile + warp * 16 + lane / 4, mine = row + lane % 4 * 2;
    float* to = p.sums + (size_t(blockIdx.y) * p.count + mine) * p.n + channel;
#pragma unroll
    for (uint32_t i = 0; i < kRows / 2; i += 4) {
#pragma unroll
      for (uint32_t next = 0; next < 2; ++next)
        if (mine + i * 2 + next < p.count) {
          float* at = to + size_t(i * 2 + next) * p.n;
          at[0] = sums[i + next];
          at[8] = sums[i + next + 2];
        }
    }
  }
};

template <uint32_t kRows, uint32_t kGroups>
__global__ void __launch_bounds__(kGroups * 128 + 32, 1) linear_kernel(const __grid_constant__ Params p) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte shared[];  // the swizzle pattern starts at these multiples
  const uint32_t warp = warp_number(), lane = threadIdx.x % 32;
  const bool asks = warp == 4 * kGroups && lane == 0;
  const Block<kRows, kGroups> block(shared, p);
  if (asks) block.begin(p);
  if (p.lets_next_start) let_next_kernel_start();
  __syncthreads();
  await_previous_kernel();
  if (asks) block.load(p);
  if (warp < 4 * kGroups) block.multiply(p, warp, lane);
#else
  __trap();  // Linear rejects other GPUs
#endif
}

template <uint32_t kRows, uint32_t kGroups>
cudaError_t start(cudaStream_t stream, const SplitK& split_k, const Params& params) {
  const dim3 blocks(params.n / split_k.tile, split_k.splits, params.spread);
  const Grid grid{blocks, kGroups * 128 + 32, Block<kRows, kGroups>::bytes(params)};
  return launch(stream, linear_kernel<kRows, kGroups>, grid, kBudget, params);
}

}  // namespace

cudaError_t start(cudaStream_t stream, const SplitK& split_k, uint32_t rows_of_tile, const Params& params) {
  const bool wide = split_k.tile == 2 * kGroupRows;
  if (rows_of_tile == 32)
    return wide ? start<32, 2>(stream, split_k, params) : start<32, 1>(stream, split_k, params);
  if (rows_of_tile == 64)
    return wide ? start<64, 2>(stream, split_k, params) : start<64, 1>(stream, split_k, params);
  return wide ? start<128, 2>(stream, split_k, params) : start<128, 1>(stream, split_k, params);
}

}  // namespace ep::products

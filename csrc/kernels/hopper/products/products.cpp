// Host side of the products' kernel: checks, tensor maps, launch.
#include "kernels/hopper/products/products.hpp"

#include <algorithm>
#include <string>

#include "exchange/nvlink/device_guard.hpp"
#include "kernels/hopper/common/requirements.hpp"

namespace ep::products {
namespace {

using cuda::check;
using hopper::require;

constexpr uint32_t kChunkRow = kDepth * 2, kBarrier = 8;  // bytes
constexpr uint32_t kLeastForRows = 32 << 10;              // minimum bytes of shared memory beside the weights

}  // namespace

Linear::Linear(int device, const void* weight, uint32_t n, uint32_t k, const SplitK& split_k)
    : device_(device), n_(n), k_(k), split_k_(split_k) {
  require(split_k.tile == 64 || split_k.tile == 128, "tile", split_k.tile, "64 or 128");
  require(n != 0 && n % split_k.tile == 0, "n", n, "a multiple of the tile, " + std::to_string(split_k.tile));
  require(k != 0 && k % kDepth == 0, "k", k, "a multiple of " + std::to_string(kDepth));
  const uint32_t chunks = k / kDepth;
  require(split_k.splits >= 1 && split_k.splits <= chunks, "splits", split_k.splits,
          "1 to " + std::to_string(chunks));
  held_ = (chunks + split_k.splits - 1) / split_k.splits;
  constexpr uint32_t kMost = kBudget - kLeastForRows - 1024;
  const uint64_t bytes = uint64_t(held_) * split_k.tile * kChunkRow;
  require(bytes <= kMost, "bytes of a block's weights", bytes, "at most " + std::to_string(kMost));
  hopper::require_hopper(device);
  num_sms_ = hopper::attribute(cudaDevAttrMultiProcessorCount, device);
  encode_ = hopper::find_encode_tiled();
  weight_ = hopper::map_of(encode_, {weight, n, k, uint64_t(k) * 2}, split_k.tile);
}

void Linear::run(cudaStream_t stream, const Work& work, const LaunchConfig& config) const {
  const uint32_t rows = config.rows_of_tile;
  require(rows == 32 || rows == 64 || rows == 128, "rows_of_tile", rows, "32, 64 or 128");
  if (work.count == 0) return;
  const uint32_t left = kBudget - held_ * (split_k_.tile * kChunkRow + kBarrier);
  const uint32_t tiles = (work.count + rows - 1) / rows;
  Params params{};
  params.weight = weight_;
  params.rows = hopper::map_of(encode_, {work.rows, work.count, k_, work.pitch}, rows);
  params.sums = work.sums;
  params.count = work.count, params.n = n_, params.chunks = k_ / kDepth;
  params.held = held_;
  params.spread = std::clamp(num_sms_ / (n_ / split_k_.tile * split_k_.splits), 1u, tiles);
  params.stages = std::min({kMostStages, held_ * tiles, left / (rows * kChunkRow + 2 * kBarrier)});
  params.lets_next_start = config.lets_next_start;
  const cuda::OnDevice here(device_);
  check(start(stream, split_k_, rows, params), "products");
}

}  // namespace ep::products

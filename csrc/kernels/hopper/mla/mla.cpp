// Host side of the MLA kernel: checks, tensor maps, launch.
#include "kernels/hopper/mla/mla.hpp"

#include <algorithm>
#include <bit>
#include <string>

#include "exchange/nvlink/device_guard.hpp"
#include "kernels/hopper/common/requirements.hpp"
#include "kernels/hopper/common/tensor_map.hpp"

namespace ep::mla {
namespace {

using cuda::check;
using hopper::require;

constexpr uint64_t kRow = kDim * 2;  // bytes
constexpr float kLog2E = 1.4426950408889634f;

}  // namespace

Mla::Mla(int device, const Shape& cache, float scale) : device_(device) {
  const uint32_t block = cache.block_size;
  require(cache.heads >= 1 && cache.heads <= kMostHeads, "heads", cache.heads,
          "1 to " + std::to_string(kMostHeads));
  require(std::has_single_bit(block) && block >= kLeastBlock, "block_size", block,
          "a power of two from " + std::to_string(kLeastBlock));
  require(cache.positions != 0 && cache.positions % block == 0 && cache.positions < 1ull << 31, "positions",
          cache.positions, "whole blocks, below 2^31 positions");
  hopper::require_hopper(device);
  encode_ = hopper::find_encode_tiled();
  params_.rows = std::min(block, kTile);
  params_.cache = hopper::map_of(encode_, {cache.cache, cache.positions, kDim, kRow}, params_.rows);
  params_.nowhere = uint32_t(cache.positions);
  params_.heads = cache.heads;
  params_.groups = (cache.heads + kTogether - 1) / kTogether;
  params_.block_shift = uint32_t(std::countr_zero(block));
  params_.scale = scale * kLog2E;
}

void Mla::run(cudaStream_t stream, const Work& work, const LaunchConfig& config) const {
  const bool together = params_.heads > kSomeHeads;
  const uint32_t most = together ? 1 : kMostTeam;
  require(std::has_single_bit(config.team) && config.team <= most, "team", config.team,
          "a power of two up to " + std::to_string(most));
  require(config.blocks >= 1, "blocks", config.blocks, "at least 1");
  const uint32_t splits = together || config.team > 1 ? kMostSplits : 1;
  require(config.splits >= 1 && config.splits <= splits, "splits", config.splits,
          "1 to " + std::to_string(splits) + " with a team of " + std::to_string(config.team));
  if (work.count == 0) return;
  Params params = params_;
  const uint32_t rows = params.heads <= kFewHeads ? kFewHeads : kSomeHeads;
  params.q = hopper::map_of(encode_, {work.q, uint64_t(work.count) * params.heads, kDim, kRow}, rows);
  params.work = work;
  params.splits = config.splits, params.team = config.team;
  const cuda::OnDevice here(device_);
  check(start(stream, config.blocks, params), "latent attention");
}

}  // namespace ep::mla

// Host side of the attention kernel: checks, tensor maps, launch.
#include "kernels/hopper/attention/attention.hpp"

#include <bit>
#include <string>

#include "exchange/nvlink/device_guard.hpp"
#include "kernels/hopper/common/requirements.hpp"
#include "kernels/hopper/common/tensor_map.hpp"

namespace ep::attention {
namespace {

using cuda::check;
using hopper::require;

// Describes both halves of a head's channels, one after the other, by kTile positions.
hopper::Boxes<4> boxes_of(const void* cache, const Shape& shape) {
  constexpr cuuint64_t kHead = kDim * 2;  // bytes
  return {cache,
          {kDim / 2, shape.positions, 2, shape.kv_heads},
          {shape.kv_heads * kHead, kHead / 2, kHead},
          {kDim / 2, kTile, 2, 1}};
}

}  // namespace

Attention::Attention(int device, const Shape& cache, const Rule& rule) : device_(device) {
  const uint32_t block = cache.block_size;
  require(cache.kv_heads != 0, "kv_heads", cache.kv_heads, "at least 1");
  require(cache.group >= 1 && cache.group <= kMostGroup, "group", cache.group,
          "1 to " + std::to_string(kMostGroup));
  require(std::has_single_bit(block) && block >= kTile, "block_size", block,
          "a power of two from " + std::to_string(kTile));
  require(cache.positions != 0 && cache.positions % block == 0 && cache.positions < 1ull << 31, "positions",
          cache.positions, "whole blocks, below 2^31 positions");
  hopper::require_hopper(device);
  const auto encode = hopper::find_encode_tiled();
  params_.k = hopper::map_of(encode, boxes_of(cache.k, cache));
  params_.v = hopper::map_of(encode, boxes_of(cache.v, cache));
  params_.cache = cache, params_.rule = rule;
  params_.heads = cache.kv_heads * cache.group;
  params_.block_shift = uint32_t(std::countr_zero(block));
}

void Attention::run(cudaStream_t stream, const Work& work, const LaunchConfig& config) const {
  require(std::has_single_bit(config.team) && config.team <= kWarps, "team", config.team,
          "a power of two up to " + std::to_string(kWarps));
  require(config.blocks >= 1, "blocks", config.blocks, "at least 1");
  if (work.count == 0) return;
  Params params = params_;
  params.work = work;
  const cuda::OnDevice here(device_);
  check(start(stream, config.team, config.blocks, params), "attention");
}

}  // namespace ep::attention

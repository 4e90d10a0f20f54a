// Host side of the attention of chunks: checks, tensor maps, launch.
#include "kernels/hopper/prefill/prefill.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <string>

#include "exchange/nvlink/device_guard.hpp"
#include "kernels/hopper/common/requirements.hpp"
#include "kernels/hopper/common/tensor_map.hpp"

namespace ep::prefill {
namespace {

using cuda::check;
using hopper::require;

constexpr uint32_t kSlice = 64;         // channels of a copy
constexpr cuuint64_t kHead = kDim * 2;  // bytes

// Half of a head's channels, by the positions of one piece.
hopper::Boxes<4> boxes_of(const void* cache, const Shape& shape, uint32_t piece) {
  const bool plain = shape.rotary == nullptr;
  const cuuint64_t position = plain ? shape.kv_heads * kHead : kHead;
  return {cache,
          {kSlice, shape.positions, kDim / kSlice, shape.kv_heads},
          {position, kHead / 2, plain ? kHead : shape.positions * kHead},
          {kSlice, piece, 1, 1}};
}

hopper::Boxes<4> rotary_boxes_of(const Shape& shape, uint32_t piece) {
  constexpr cuuint64_t kRow = kRotary * 2;
  return {shape.rotary, {kRotary, shape.positions, 1, 1}, {kRow, kRow, kRow}, {kRotary, piece, 1, 1}};
}

uint64_t parts_bytes(int device) {
  const uint64_t units = uint64_t(kMostUnits) * hopper::attribute(cudaDevAttrMultiProcessorCount, device);
  return units * 2 * kPartFloats * sizeof(float);
}

}  // namespace

Prefill::Prefill(int device, const Shape& cache, float scale, void* scratch)
    : device_(device), latent_(cache.rotary != nullptr) {
  const uint32_t block = cache.block_size, least = latent_ ? kLeastLatentBlock : kLeastBlock;
  require(cache.kv_heads != 0, "kv_heads", cache.kv_heads, "at least 1");
  require(cache.group >= 1 && cache.group <= kRows, "group", cache.group, "1 to " + std::to_string(kRows));
  require(std::has_single_bit(block) && block >= least, "block_size", block,
          "a power of two from " + std::to_string(least));
  require(cache.positions != 0 && cache.positions % block == 0 && cache.positions < 1ull << 31, "positions",
          cache.positions, "whole blocks, below 2^31 positions");
  hopper::require_hopper(device);
  const uint32_t piece = std::min(block, kPositions);
  const auto encode = hopper::find_encode_tiled();
  params_.k = hopper::map_of(encode, boxes_of(cache.k, cache, piece));
  params_.v = hopper::map_of(encode, boxes_of(cache.v, cache, piece));
  if (latent_) params_.rotary = hopper::map_of(encode, rotary_boxes_of(cache, piece));
  params_.kv_heads = cache.kv_heads, params_.group = cache.group;
  params_.tile_tokens = kRows / cache.group;
  params_.block_shift = uint32_t(std::countr_zero(block));
  params_.piece_shift = uint32_t(std::countr_zero(piece));
  params_.scale = scale * 1.4426950408889634f;
  multiprocessors_ = hopper::attribute(cudaDevAttrMultiProcessorCount, device);
  require(multiprocessors_ <= kMostBlocks, "multiprocessors", multiprocessors_,
          "at most " + std::to_string(kMostBlocks));
  params_.parts = static_cast<float*>(scratch);
  params_.counters = reinterpret_cast<uint32_t*>(static_cast<std::byte*>(scratch) + parts_bytes(device));
}

uint64_t Prefill::scratch_bytes(int device) { return parts_bytes(device) + kCounterBytes; }

void Prefill::run(cudaStream_t stream, const Work& work) const {
  if (work.tokens == 0 || work.sequences == 0) return;
  Params params = params_;
  params.work = work;
  const uint32_t heads = params.kv_heads * params.group, channels = latent_ ? kDim + kRotary : kDim;
  params.q = hopper::map_of<4>(hopper::find_encode_tiled(), {work.q,
                                                             {kSlice, heads, channels / kSlice, work.tokens},
                                                             {channels * 2, kSlice * 2, work.q_pitch},
                                                             {kSlice, params.group, 1, params.tile_tokens}});
  const uint64_t chunks = std::min(work.sequences, work.tokens);
  const uint64_t tiles = (work.tokens / params.tile_tokens + chunks) * params.kv_heads;  // at most
  params.blocks = uint32_t(std::min<uint64_t>(tiles * kMostParts, multiprocessors_));
  const cuda::OnDevice here(device_);
  check(start(stream, latent_, params), "prefill");
}

}  // namespace ep::prefill

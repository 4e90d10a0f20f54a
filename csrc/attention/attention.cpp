#include "attention/attention.hpp"

#include <bit>
#include <stdexcept>
#include <string>

#include "cuda/on_device.hpp"

namespace ep::attention {
namespace {

using cuda::check;

void require(bool holds, const char* field, uint64_t value, const std::string& allowed) {
  if (!holds)
    throw std::invalid_argument(std::string(field) + ": " + std::to_string(value) + ", must be " + allowed);
}

// Read in boxes of both halves of a head's channels, one after the other, x kTile positions, 128-byte
// swizzle; lines come as they are asked for, see cuda::map_of().
CUtensorMap map_of(cuda::EncodeTiled encode, void* cache, const Shape& shape) {
  constexpr cuuint64_t kHead = kDim * 2;  // bytes
  const cuuint64_t sizes[] = {kDim / 2, shape.positions, 2, shape.kv_heads};
  const cuuint64_t pitches[] = {shape.kv_heads * kHead, kHead / 2, kHead};
  const cuuint32_t box[] = {kDim / 2, kTile, 2, 1}, strides[] = {1, 1, 1, 1};
  CUtensorMap map{};
  const CUresult made = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, cache, sizes, pitches, box, strides,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (made != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled: driver error " + std::to_string(made) +
                             " for a cache of " + std::to_string(shape.positions) + " positions x " +
                             std::to_string(shape.kv_heads) + " heads");
  return map;
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
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  require(major == 9, "compute capability", uint64_t(major), "9: the kernel is for Hopper alone");
  const auto encode = cuda::find_encode_tiled();
  params_.k = map_of(encode, cache.k, cache);
  params_.v = map_of(encode, cache.v, cache);
  params_.cache = cache, params_.rule = rule;
  params_.heads = cache.kv_heads * cache.group;
  params_.block_shift = uint32_t(std::countr_zero(block));
}

void Attention::run(cudaStream_t stream, const Work& work, const Manner& manner) const {
  require(std::has_single_bit(manner.team) && manner.team <= kWarps, "team", manner.team,
          "a power of two up to " + std::to_string(kWarps));
  require(manner.blocks >= 1, "blocks", manner.blocks, "at least 1");
  require(manner.splits >= 1 && manner.splits <= kMostSplits, "splits", manner.splits,
          "1 to " + std::to_string(kMostSplits));
  if (work.count == 0) return;
  Params params = params_;
  params.work = work;
  params.splits = manner.splits;
  params.lets_next_start = manner.lets_next_start;
  const cuda::OnDevice here(device_);
  check(start(stream, manner.team, manner.blocks, params), "attention");
}

}  // namespace ep::attention

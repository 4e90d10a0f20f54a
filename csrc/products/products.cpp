#include "products/products.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/on_device.hpp"

namespace ep::products {
namespace {

using cuda::check;

constexpr uint32_t kChunkRow = kDepth * 2, kBarrier = 8;  // bytes
constexpr uint32_t kLeastForRows = 32 << 10;              // bytes of shared memory beside the weights

void require(bool holds, const char* field, uint64_t value, const std::string& allowed) {
  if (!holds)
    throw std::invalid_argument(std::string(field) + ": " + std::to_string(value) + ", must be " + allowed);
}

}  // namespace

Linear::Linear(int device, const void* weight, uint32_t n, uint32_t k, const Cut& cut)
    : device_(device), n_(n), k_(k), cut_(cut) {
  require(cut.tile == 64 || cut.tile == 128, "tile", cut.tile, "64 or 128");
  require(n != 0 && n % cut.tile == 0, "n", n, "a multiple of the tile, " + std::to_string(cut.tile));
  require(k != 0 && k % kDepth == 0, "k", k, "a multiple of " + std::to_string(kDepth));
  const uint32_t chunks = k / kDepth;
  require(cut.splits >= 1 && cut.splits <= chunks, "splits", cut.splits, "1 to " + std::to_string(chunks));
  held_ = (chunks + cut.splits - 1) / cut.splits;
  constexpr uint32_t kMost = kBudget - kLeastForRows - 1024;
  const uint64_t bytes = uint64_t(held_) * cut.tile * kChunkRow;
  require(bytes <= kMost, "bytes of a block's weights", bytes, "at most " + std::to_string(kMost));
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  require(major == 9, "compute capability", uint64_t(major), "9: the kernel is for Hopper alone");
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  processors_ = uint32_t(processors);
  encode_ = cuda::find_encode_tiled();
  weight_ = cuda::map_of(encode_, {weight, n, k, uint64_t(k) * 2}, cut.tile);
}

void Linear::run(cudaStream_t stream, const Work& work, const Manner& manner) const {
  const uint32_t rows = manner.rows_of_tile;
  require(rows == 32 || rows == 64 || rows == 128, "rows_of_tile", rows, "32, 64 or 128");
  if (work.count == 0) return;
  const uint32_t left = kBudget - held_ * (cut_.tile * kChunkRow + kBarrier);
  const uint32_t tiles = (work.count + rows - 1) / rows;
  Params params{};
  params.weight = weight_;
  params.rows = cuda::map_of(encode_, {work.rows, work.count, k_, work.pitch}, rows);
  params.sums = work.sums;
  params.count = work.count, params.n = n_, params.chunks = k_ / kDepth;
  params.held = held_;
  params.spread = std::clamp(processors_ / (n_ / cut_.tile * cut_.splits), 1u, tiles);
  params.stages = std::min({kMostStages, held_ * tiles, left / (rows * kChunkRow + 2 * kBarrier)});
  params.lets_next_start = manner.lets_next_start;
  const cuda::OnDevice here(device_);
  check(start(stream, cut_, rows, params), "products");
}

}  // namespace ep::products

#include "experts/experts.hpp"

#include <string>

#include "cuda/on_device.hpp"
#include "hopper/requirements.hpp"
#include "hopper/tensor_map.hpp"

namespace ep::experts {
namespace {

using cuda::check;
using hopper::require;

}  // namespace

Experts::Experts(int device, const void* gate_up, const void* down, uint32_t experts, uint32_t width,
                 uint32_t ffn)
    : device_(device), experts_(experts), width_(width), ffn_(ffn) {
  require(experts >= 1 && experts <= kMaxExperts, "experts", experts, "1 to " + std::to_string(kMaxExperts));
  require(width >= 2 * kHalf && width % (2 * kHalf) == 0, "width", width,
          "a multiple of " + std::to_string(2 * kHalf));
  require(ffn >= kHalf && ffn % kHalf == 0, "ffn", ffn, "a multiple of " + std::to_string(kHalf));
  hopper::require_hopper(device);
  blocks_ = hopper::attribute(cudaDevAttrMultiProcessorCount, device);
  const auto encode = hopper::find_encode_tiled();
  gate_up_ =
      hopper::map_of(encode, {gate_up, uint64_t(experts) * 2 * ffn, width, uint64_t(width) * 2}, kHalf);
  down_ = hopper::map_of(encode, {down, uint64_t(experts) * width, ffn, uint64_t(ffn) * 2}, kHalf);
  static_assert(kDepth == 64, "the channels of a box of map_of()");
  const cuda::OnDevice here(device);
  check(cudaMalloc(reinterpret_cast<void**>(&sync_), kSyncWords * sizeof(uint32_t)), "cudaMalloc");
  check(cudaMemset(sync_, 0, kSyncWords * sizeof(uint32_t)), "cudaMemset");
  check(cudaStreamSynchronize(nullptr), "cudaMemset");  // streams of torch do not wait for that one
}

Experts::~Experts() { cudaFree(sync_); }  // of any device

void Experts::run(cudaStream_t stream, const Work& work, const LaunchConfig& config) const {
  const uint32_t rows = config.rows_of_tile;
  require(rows == 32 || rows == 48 || rows == 64 || rows == 96 || rows == 128, "rows_of_tile", rows,
          "32, 48, 64, 96 or 128");
  const cuda::OnDevice here(device_);
  check(start(stream, blocks_, config, {gate_up_, down_, experts_, width_, ffn_, sync_}, work), "experts");
}

}  // namespace ep::experts

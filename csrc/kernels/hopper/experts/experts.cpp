// Host side of the experts' kernel: checks, tensor maps, choice of a kernel, launch.
#include "kernels/hopper/experts/experts.hpp"

#include <algorithm>
#include <string>

#include "exchange/nvlink/await_stream.hpp"
#include "kernels/hopper/common/requirements.hpp"
#include "kernels/hopper/common/tensor_map.hpp"

namespace ep::experts {
namespace {

using cuda::check;
using hopper::require;

// With boxes of one half of a tile's weight rows.
void map_bfloat16(Weights& w, const Stored& stored, const Sizes& sizes) {
  static_assert(kDepth == 64, "the channels of a box of map_of()");
  const auto encode = hopper::find_encode_tiled();
  const uint64_t experts = sizes.experts, width = sizes.width, ffn = sizes.ffn;
  w.gate_up = hopper::map_of(encode, {stored.gate_up, experts * 2 * ffn, width, width * 2}, kHalf);
  w.down = hopper::map_of(encode, {stored.down, experts * width, ffn, ffn * 2}, kHalf);
}

// With boxes of all of a tile's weight rows. For gate/up, eight rows of gate alternate with eight of up, so
// that a thread of a product has the sums of both.
void map_codes(Weights& w, const Stored& stored, const Sizes& sizes) {
  constexpr CUtensorMapDataType kByte = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto encode = hopper::find_encode_tiled();
  const uint64_t experts = sizes.experts, width = sizes.width, ffn = sizes.ffn;
  w.gate_up = hopper::map_of<5>(encode, {stored.gate_up,
                                         {width, 8, 2, ffn / 8, experts},
                                         {width, ffn * width, 8 * width, 2 * ffn * width},
                                         {2 * kDepth, 8, 2, kHalf / 8, 1},
                                         kByte});
  w.down =
      hopper::map_of<2>(encode, {stored.down, {ffn, experts * width}, {ffn}, {2 * kDepth, 2 * kHalf}, kByte});
}

}  // namespace

Experts::Experts(int device, const Stored& stored, const Sizes& sizes) : device_(device), sizes_(sizes) {
  const bool codes = stored.gate_up_scale != nullptr;
  const uint32_t ffns = codes ? kScaled : kHalf;
  require(sizes.experts >= 1 && sizes.experts <= kMaxExperts, "experts", sizes.experts,
          "1 to " + std::to_string(kMaxExperts));
  require(sizes.width >= 2 * kHalf && sizes.width % (2 * kHalf) == 0, "width", sizes.width,
          "a multiple of " + std::to_string(2 * kHalf));
  require(sizes.ffn >= ffns && sizes.ffn % ffns == 0, "ffn", sizes.ffn,
          "a multiple of " + std::to_string(ffns));
  hopper::require_hopper(device);
  blocks_ = hopper::attribute(cudaDevAttrMultiProcessorCount, device);
  if (codes)
    map_codes(weights_, stored, sizes);
  else
    map_bfloat16(weights_, stored, sizes);
  weights_.gate_up_scale = stored.gate_up_scale, weights_.down_scale = stored.down_scale;
  weights_.experts = sizes.experts, weights_.width = sizes.width, weights_.ffn = sizes.ffn;
  weights_.depth = codes ? 2 * kDepth : kDepth;
  const cuda::OnDevice here(device);
  check(cudaMalloc(reinterpret_cast<void**>(&weights_.sync), kSyncWords * sizeof(uint32_t)), "cudaMalloc");
  check(cudaMemset(weights_.sync, 0, kSyncWords * sizeof(uint32_t)), "cudaMemset");
  // torch's streams do not wait for the default stream
  cuda::await_stream(nullptr, cuda::kIdleSeconds, "zeroing counters of the experts' kernel");
}

Experts::~Experts() { cudaFree(weights_.sync); }  // works for any device

void Experts::run(cudaStream_t stream, const Work& work, const LaunchConfig& config) const {
  check_tile(config);
  check_work(work);
  const cuda::OnDevice here(device_);
  auto begin = start;
  if (codes())
    begin = start_of_codes;
  else if (config.wide)
    begin = start_wide;
  check(begin({stream, blocks_, config}, weights_, Task(work, sizes_, codes())), "experts");
}

void Experts::check_tile(const LaunchConfig& config) const {
  require(!config.wide || wide(), "wide", config.wide, "false for these weights");
  const uint32_t rows = config.rows_of_tile;
  const bool some = rows == 96 || (rows == 128 && !codes());
  const bool fits =
      config.wide ? some || rows == 160 || rows == 192 : some || rows == 32 || rows == 48 || rows == 64;
  const char* allowed = codes() ? "32, 48, 64 or 96" : "32, 48, 64, 96 or 128";
  require(fits, "rows_of_tile", rows, config.wide ? "96, 128, 160 or 192" : allowed);
}

// The kernels use 32-bit numbers for pieces of 16 bytes, or of eight channels for split rows.
void Experts::check_work(const Work& work) const {
  constexpr uint64_t kPiece = 16;
  const uint64_t pitch = work.pitch, held = UINT32_MAX * kPiece / std::max<uint64_t>(pitch, 1);
  require(pitch % kPiece == 0, "pitch", pitch, "a multiple of " + std::to_string(kPiece));
  require(codes() || work.held <= held, "held", work.held, "at most " + std::to_string(held));
  const uint64_t most = (1ull << 34) / std::max(sizes_.width, sizes_.ffn);
  require(work.most <= most, "most", work.most, "at most " + std::to_string(most));
}

}  // namespace ep::experts

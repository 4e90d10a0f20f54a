#include "experts/experts.hpp"

#include <stdexcept>
#include <string>

#include "cuda/on_device.hpp"
#include "cuda/tensor_map.hpp"

namespace ep::experts {
namespace {

using cuda::check;

void require(bool holds, const char* field, uint32_t value, const std::string& allowed) {
  if (!holds)
    throw std::invalid_argument(std::string(field) + ": " + std::to_string(value) + ", must be " + allowed);
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

Experts::Experts(int device, const void* gate_up, const void* down, uint32_t experts, uint32_t width,
                 uint32_t ffn)
    : device_(device), experts_(experts), width_(width), ffn_(ffn) {
  require(experts >= 1 && experts <= kMaxExperts, "experts", experts, "1 to " + std::to_string(kMaxExperts));
  require(width >= 2 * kHalf && width % (2 * kHalf) == 0, "width", width,
          "a multiple of " + std::to_string(2 * kHalf));
  require(ffn >= kHalf && ffn % kHalf == 0, "ffn", ffn, "a multiple of " + std::to_string(kHalf));
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  require(major == 9, "compute capability", uint32_t(major), "9: the kernel is for Hopper alone");
  blocks_ = uint32_t(attribute(cudaDevAttrMultiProcessorCount, device));
  const auto encode = cuda::find_encode_tiled();
  gate_up_ = cuda::map_of(encode, {gate_up, uint64_t(experts) * 2 * ffn, width, uint64_t(width) * 2}, kHalf);
  down_ = cuda::map_of(encode, {down, uint64_t(experts) * width, ffn, uint64_t(ffn) * 2}, kHalf);
  static_assert(kDepth == 64, "the channels of a box of map_of()");
  const cuda::OnDevice here(device);
  check(cudaMalloc(reinterpret_cast<void**>(&sync_), kSyncWords * sizeof(uint32_t)), "cudaMalloc");
  check(cudaMemset(sync_, 0, kSyncWords * sizeof(uint32_t)), "cudaMemset");
  check(cudaStreamSynchronize(nullptr), "cudaMemset");  // streams of torch do not wait for that one
}

Experts::~Experts() { cudaFree(sync_); }  // of any device

void Experts::run(cudaStream_t stream, const Work& work, const Manner& manner) const {
  const uint32_t rows = manner.rows_of_tile;
  require(rows == 32 || rows == 48 || rows == 64 || rows == 96 || rows == 128, "rows_of_tile", rows,
          "32, 48, 64, 96 or 128");
  const cuda::OnDevice here(device_);
  check(start(stream, blocks_, manner, {gate_up_, down_, experts_, width_, ffn_, sync_}, work), "experts");
}

}  // namespace ep::experts

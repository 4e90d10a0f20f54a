// Makes tensor maps: how Hopper's copy engine reads a bfloat16 tensor.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "exchange/nvlink/device_guard.hpp"

namespace ep::hopper {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, looked up through the runtime: the driver is not linked. Throws std::runtime_error.
inline EncodeTiled find_encode_tiled() {
  constexpr unsigned kDriverVersion = 12000;  // the version whose signature is used
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  cuda::check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kDriverVersion,
                                               cudaEnableDefault, &result),
              "cuTensorMapEncodeTiled");
  if (result != cudaDriverEntryPointSuccess || found == nullptr)
    throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<EncodeTiled>(found);
}

// A tensor, 16-byte aligned, and the box of it that one copy reads. The contiguous dimension comes first.
template <uint32_t kRank>
struct Boxes {
  const void* data;
  cuuint64_t sizes[kRank], pitches[kRank - 1];  // pitches: bytes, multiples of 16; none for the first
  cuuint32_t box[kRank];                        // the first size is a row of the swizzle, 128 bytes
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
};

// In the 128-byte swizzle, with zeros outside. Throws std::runtime_error. L2 promotion is off: with pairs of
// lines, 256 bytes, memory bandwidth of an H200 was 4 % lower.
template <uint32_t kRank>
CUtensorMap map_of(EncodeTiled encode, const Boxes<kRank>& boxes) {
  cuuint32_t strides[kRank];
  for (auto& stride : strides) stride = 1;
  CUtensorMap map{};
  const CUresult made =
      encode(&map, boxes.type, kRank, const_cast<void*>(boxes.data), boxes.sizes, boxes.pitches, boxes.box,
             strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (made == CUDA_SUCCESS) return map;
  std::string sizes = std::to_string(boxes.sizes[0]);
  for (uint32_t i = 1; i < kRank; ++i) sizes += " x " + std::to_string(boxes.sizes[i]);
  throw std::runtime_error("cuTensorMapEncodeTiled: driver error " + std::to_string(made) +
                           " for a tensor of " + sizes);
}

// [rows, channels] bfloat16, 16-byte aligned, rows `pitch` bytes apart, a multiple of 16.
struct Matrix {
  const void* data;
  uint64_t rows, channels, pitch;
};

// Of boxes of box_rows x 64 channels.
inline CUtensorMap map_of(EncodeTiled encode, const Matrix& matrix, uint32_t box_rows) {
  return map_of<2>(encode, {matrix.data, {matrix.channels, matrix.rows}, {matrix.pitch}, {64, box_rows}});
}

}  // namespace ep::hopper

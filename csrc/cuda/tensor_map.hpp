// Makes what the copy engine of Hopper reads a matrix of bfloat16 by.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/on_device.hpp"

namespace ep::cuda {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, asked of the runtime: no driver is linked. Throws std::runtime_error.
inline EncodeTiled find_encode_tiled() {
  constexpr unsigned kDriverVersion = 12000;  // whose signature is used
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kDriverVersion, cudaEnableDefault,
                                         &result),
        "cuTensorMapEncodeTiled");
  if (result != cudaDriverEntryPointSuccess || found == nullptr)
    throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<EncodeTiled>(found);
}

// [rows, channels] bfloat16, 16-byte aligned, rows `pitch` bytes apart, a multiple of 16.
struct Matrix {
  const void* data;
  uint64_t rows, channels, pitch;
};

// Read in boxes of box_rows x 64 channels, 128-byte swizzle, zeros outside. Throws std::runtime_error. Lines
// come as they are asked for: in pairs, 256 bytes, an H200's memory gave 4 % less.
inline CUtensorMap map_of(EncodeTiled encode, const Matrix& matrix, uint32_t box_rows) {
  const cuuint64_t sizes[] = {matrix.channels, matrix.rows}, pitches[] = {matrix.pitch};
  const cuuint32_t box[] = {64, box_rows}, strides[] = {1, 1};
  CUtensorMap map{};
  const CUresult made =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix.data), sizes, pitches, box,
             strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (made != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled: driver error " + std::to_string(made) + " for " +
                             std::to_string(matrix.rows) + " x " + std::to_string(matrix.channels) + ", " +
                             std::to_string(matrix.pitch) + " bytes apart");
  return map;
}

}  // namespace ep::cuda

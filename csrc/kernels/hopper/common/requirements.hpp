// Checks arguments and the device before a Hopper kernel is launched.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "exchange/nvlink/device_guard.hpp"

namespace ep::hopper {

// Throws std::invalid_argument with the field, its value and what is allowed.
inline void require(bool holds, const char* field, uint64_t value, const std::string& allowed) {
  if (!holds)
    throw std::invalid_argument(std::string(field) + ": " + std::to_string(value) + ", must be " + allowed);
}

// Throws std::runtime_error.
inline uint32_t attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  cuda::check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return uint32_t(value);
}

// Throws std::invalid_argument for any other GPU.
inline void require_hopper(int device) {
  const uint32_t major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  require(major == 9, "compute capability", major, "9: the kernel is for Hopper alone");
}

}  // namespace ep::hopper

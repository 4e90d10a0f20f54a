// Selects the GPU that a host thread uses, and turns errors of the runtime into exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace ep::cuda {

// Throws std::runtime_error.
inline void check(cudaError_t error, const std::string& what) {
  if (error != cudaSuccess) throw std::runtime_error(what + ": " + cudaGetErrorString(error));
}

// Makes a GPU the current one of this thread. The destructor restores the caller's.
class OnDevice {
 public:
  explicit OnDevice(int device) : device_(device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device_) check(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~OnDevice() {  // setting even the current device would create a context on it
    if (before_ != device_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int device_, before_ = 0;
};

}  // namespace ep::cuda

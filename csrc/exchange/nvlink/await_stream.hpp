// Waits of the host for a GPU, each with a deadline: the runtime's own have none.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "exchange/nvlink/device_guard.hpp"

namespace ep::cuda {

constexpr double kIdleSeconds = 30;  // for work that waits for no peer

// Returns once a stream has ended its work. what: this work, named in errors.
// Throws std::runtime_error after so many seconds, or for an error of the GPU.
inline void await_stream(cudaStream_t stream, double seconds, const std::string& what) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kSpin(1);  // most work here takes microseconds
  constexpr std::chrono::microseconds kLook(100);
  const auto began = Clock::now();
  cudaError_t seen;
  while ((seen = cudaStreamQuery(stream)) == cudaErrorNotReady) {
    const auto waited = Clock::now() - began;
    if (waited > std::chrono::duration<double>(seconds)) {
      char text[64];
      std::snprintf(text, sizeof text, " has not ended on the GPU in %g s", seconds);
      throw std::runtime_error(what + text);
    }
    if (waited > kSpin) std::this_thread::sleep_for(kLook);
  }
  check(seen, what);
}

// Whether a GPU ends all work of this process in so many seconds, or fails. In a thread, which may outlive
// the call.
inline bool ends_work(int device, double seconds) {
  try {
    std::promise<void> done;
    std::future<void> ended = done.get_future();
    std::thread([device, done = std::move(done)]() mutable {
      if (cudaSetDevice(device) == cudaSuccess) cudaDeviceSynchronize();
      done.set_value();
    }).detach();
    return ended.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready;
  } catch (const std::system_error&) {  // no thread
    return false;
  }
}

}  // namespace ep::cuda

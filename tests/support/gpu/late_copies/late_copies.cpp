// csrc/loading over a runtime whose copies are made at the second look for their end, or in finish().
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "cuda_runtime_api.h"

namespace {

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Runtime {
  std::mutex mutex;
  std::vector<Copy> copies;  // of one stream
  size_t made = 0, most_read = ~size_t(0);
  size_t events = 0, most_events = ~size_t(0);
  bool hangs = false, fails = false;

  void make(size_t until) {
    for (; made < until; ++made) std::memcpy(copies[made].to, copies[made].from, copies[made].bytes);
  }
} runtime;

ssize_t short_pread(int file, void* to, size_t size, off_t begin) {
  return pread(file, to, std::min(size, runtime.most_read), begin);
}

}  // namespace

struct CUevent_st {
  size_t until = 0;
  int looks = 0;
};

cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  const std::lock_guard lock(runtime.mutex);
  runtime.copies.push_back({to, from, bytes});
  return runtime.fails ? cudaErrorUnknown : cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const std::lock_guard lock(runtime.mutex);
  if (runtime.events == runtime.most_events) return cudaErrorUnknown;
  ++runtime.events;
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard lock(runtime.mutex);
  --runtime.events;
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  const std::lock_guard lock(runtime.mutex);
  *event = {runtime.copies.size(), 0};
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(runtime.mutex);
  if (runtime.hangs) return cudaErrorNotReady;
  if (++event->looks > 1) runtime.make(event->until);
  return runtime.made >= event->until ? cudaSuccess : cudaErrorNotReady;
}
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulation"; }

#define pread short_pread
#include "loading/staged_reader.cpp"
#undef pread
#include "bindings/loading.cpp"

PYBIND11_MODULE(late_copies, m) {
  bind_loading(m);
  m.def("finish", [] {
    const std::lock_guard lock(runtime.mutex);
    runtime.make(runtime.copies.size());
  });
  m.def("events", [] { return runtime.events; });
  m.def("limit_events", [](size_t most) { runtime.most_events = most; });
  m.def("reset", [](bool hangs, bool fails, size_t most_read) {
    const std::lock_guard lock(runtime.mutex);
    runtime.copies.clear(), runtime.made = 0;
    runtime.hangs = hangs, runtime.fails = fails, runtime.most_read = most_read;
  });
}

// The runtime's calls on memory of the host, and regions that processes share.
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "exchange/nvlink/peer_memory.hpp"

cudaError_t cudaMalloc(void** to, size_t bytes) {
  *to = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*to != nullptr) std::memset(*to, 0xa5, bytes);
  return *to == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaHostAlloc(void** to, size_t bytes, unsigned) { return cudaMalloc(to, bytes); }
static std::atomic<bool> hangs{false};
extern "C" __attribute__((visibility("default"))) void emulated_hangs(int now) {
  hangs = now != 0;
  hangs.notify_all();
}
cudaError_t cudaStreamQuery(cudaStream_t) { return hangs ? cudaErrorNotReady : cudaSuccess; }
cudaError_t cudaDeviceSynchronize() {
  hangs.wait(true);
  return cudaSuccess;
}
cudaError_t cudaFree(void* what) {
  std::free(what);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* what) { return cudaFree(what); }
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(to, value, bytes);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount            ? emulated::multiprocessors
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? emulated::kSharedBytes
                                                                  : 9;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}

namespace ep::nvlink {
namespace {

// At `address` if that is not 0, in place of what is there.
unsigned long long map_shared(uint64_t bytes, int fd, unsigned long long address = 0) {
  const int fixed = address != 0 ? MAP_FIXED : 0;
  void* at = mmap(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | fixed, fd, 0);
  if (at == MAP_FAILED) throw std::runtime_error("mmap of a region failed");
  return reinterpret_cast<unsigned long long>(at);
}

// As the driver maps memory.
uint64_t whole_pages(uint64_t bytes) {
  constexpr uint64_t kPage = 2 << 20;
  return (bytes + kPage - 1) / kPage * kPage;
}

}  // namespace

std::unique_ptr<Region> Region::create(int, uint64_t bytes, double) {
  std::unique_ptr<Region> region(new Region);
  bytes = whole_pages(bytes);
  const int fd = memfd_create("region", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, off_t(bytes)) != 0) throw std::runtime_error("memfd of a region failed");
  region->handle_ = fd;
  region->bytes_ = bytes;
  region->address_ = map_shared(bytes, fd);
  return region;
}
std::unique_ptr<Region> Region::reserve(int, uint64_t bytes) {
  std::unique_ptr<Region> region(new Region);
  bytes = whole_pages(bytes);
  void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::runtime_error("mmap of addresses failed");
  region->bytes_ = bytes;
  region->address_ = reinterpret_cast<unsigned long long>(at);
  return region;
}
void Region::attach(int, int fd) {
  if (handle_ != 0) close(int(handle_));
  handle_ = dup(fd);
  map_shared(bytes_, fd, address_);
}
int Region::export_fd() const { return dup(int(handle_)); }
Region::~Region() {
  munmap(reinterpret_cast<void*>(address_), bytes_);
  if (handle_ != 0) close(int(handle_));
}

}  // namespace ep::nvlink

// Allocates, exports and imports GPU memory through the driver's virtual memory calls.
#include "exchange/nvlink/peer_memory.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "exchange/nvlink/await_stream.hpp"

namespace ep::nvlink {
namespace {

constexpr unsigned kDriverVersion = 12000;  // the version whose signatures are used

using cuda::check;

// Looks a driver function up once, in the library that the runtime has loaded.
template <class Fn>
Fn* driver(const char* name, Fn*) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  check(cudaGetDriverEntryPointByVersion(name, &found, kDriverVersion, cudaEnableDefault, &result), name);
  if (result != cudaDriverEntryPointSuccess || found == nullptr)
    throw std::runtime_error(std::string("the driver has no ") + name);
  return reinterpret_cast<Fn*>(found);
}
#define EP_DRIVER(fn) driver(#fn, static_cast<decltype(&fn)>(nullptr))

void check(CUresult result, const std::string& what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  EP_DRIVER(cuGetErrorString)(result, &text);
  throw std::runtime_error(what + ": " + (text != nullptr ? text : "unknown driver error"));
}

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  return prop;
}

void require(int device, CUdevice_attribute attribute, const char* what) {
  int value = 0;
  check(EP_DRIVER(cuDeviceGetAttribute)(&value, attribute, device), "cuDeviceGetAttribute");
  if (value == 0) throw std::runtime_error("GPU " + std::to_string(device) + " has no " + what);
}

// On a stream of its own: a step may be running, which nothing here needs to wait for.
void zero(void* data, uint64_t bytes, double seconds) {
  cudaStream_t made = nullptr;
  check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreate");
  const std::unique_ptr<CUstream_st, decltype(&cudaStreamDestroy)> stream(made, cudaStreamDestroy);
  check(cudaMemsetAsync(data, 0, bytes, stream.get()), "cudaMemset");
  cuda::await_stream(stream.get(), seconds, "zeroing memory that peers write");
}

uint64_t whole(int device, uint64_t bytes) {
  const CUmemAllocationProp prop = properties(device);
  size_t granularity = 0;
  check(EP_DRIVER(cuMemGetAllocationGranularity)(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
  return (bytes + granularity - 1) / granularity * granularity;
}

}  // namespace

std::unique_ptr<Region> Region::create(int device, uint64_t bytes, double seconds) {
  check(cudaSetDevice(device), "GPU " + std::to_string(device));
  check(cudaFree(nullptr), "the context of GPU " + std::to_string(device));
  require(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management");
  require(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
          "memory that can be passed on");
  std::unique_ptr<Region> region(new Region);
  region->bytes_ = whole(device, bytes);
  const CUmemAllocationProp prop = properties(device);
  check(EP_DRIVER(cuMemCreate)(&region->handle_, region->bytes_, &prop, 0),
        std::to_string(region->bytes_) + " bytes for the exchange on GPU " + std::to_string(device));
  region->reserve_addresses();
  region->map(device);
  zero(region->data(), region->bytes_, seconds);
  return region;
}

std::unique_ptr<Region> Region::reserve(int device, uint64_t bytes) {
  check(cudaSetDevice(device), "GPU " + std::to_string(device));
  std::unique_ptr<Region> region(new Region);
  region->bytes_ = whole(device, bytes);
  region->reserve_addresses();
  return region;
}

void Region::attach(int device, int fd) {
  check(cudaSetDevice(device), "GPU " + std::to_string(device));
  unmap();
  check(
      EP_DRIVER(cuMemImportFromShareableHandle)(&handle_, reinterpret_cast<void*>(static_cast<uintptr_t>(fd)),
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
      "the peer's memory cannot be imported");
  map(device);
}

void Region::reserve_addresses() {
  check(EP_DRIVER(cuMemAddressReserve)(&address_, bytes_, 0, 0, 0), "cuMemAddressReserve");
}

void Region::map(int device) {
  check(EP_DRIVER(cuMemMap)(address_, bytes_, 0, handle_, 0), "cuMemMap");
  mapped_ = true;
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, {device}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  check(EP_DRIVER(cuMemSetAccess)(address_, bytes_, &access, 1),
        "GPU " + std::to_string(device) + " has no peer access to this memory (NVLink or PCIe P2P)");
}

void Region::unmap() {
  // Errors are ignored: the process may be exiting.
  if (mapped_) EP_DRIVER(cuMemUnmap)(address_, bytes_);
  if (handle_ != 0) EP_DRIVER(cuMemRelease)(handle_);
  mapped_ = false;
  handle_ = 0;
}

int Region::export_fd() const {
  int fd = -1;
  check(EP_DRIVER(cuMemExportToShareableHandle)(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "cuMemExportToShareableHandle");
  return fd;
}

Region::~Region() {
  unmap();
  if (address_ != 0) EP_DRIVER(cuMemAddressFree)(address_, bytes_);
}

}  // namespace ep::nvlink

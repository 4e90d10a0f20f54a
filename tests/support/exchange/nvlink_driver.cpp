// A driver that refuses one thing, under the real csrc/exchange/nvlink/peer_memory.cpp: prints what is said
// of it, and how many handles, addresses and mappings are left. Argument: the function that fails, or an
// attribute's number.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "exchange/nvlink/peer_memory.hpp"

namespace {

std::string refused;
int left = 0;

CUresult unless(const char* name, int change = 0) {
  if (refused == name) return CUDA_ERROR_NOT_SUPPORTED;
  left += change;
  return CUDA_SUCCESS;
}

CUresult text(CUresult, const char** to) {
  *to = "operation not supported";
  return CUDA_SUCCESS;
}
CUresult attribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = refused != std::to_string(int(which));
  return CUDA_SUCCESS;
}
CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = 1 << 21;
  return CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle* handle, size_t, const CUmemAllocationProp*,
                unsigned long long) {
  const CUresult result = unless("cuMemCreate", 1);
  if (result == CUDA_SUCCESS) *handle = 7;
  return result;
}
CUresult import_handle(CUmemGenericAllocationHandle* handle, void*, CUmemAllocationHandleType) {
  const CUresult result = unless("cuMemImportFromShareableHandle", 1);
  if (result == CUDA_SUCCESS) *handle = 7;
  return result;
}
CUresult reserve(CUdeviceptr* to, size_t, size_t, CUdeviceptr, unsigned long long) {
  const CUresult result = unless("cuMemAddressReserve", 1);
  if (result == CUDA_SUCCESS) *to = 1 << 21;
  return result;
}
CUresult map(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return unless("cuMemMap", 1);
}
CUresult access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return unless("cuMemSetAccess"); }
CUresult unmap(CUdeviceptr, size_t) { return unless("cuMemUnmap", -1); }
CUresult release(CUmemGenericAllocationHandle) { return unless("cuMemRelease", -1); }

struct Entry {
  const char* name;
  void* fn;
};
const Entry kDriver[] = {
    {"cuGetErrorString", reinterpret_cast<void*>(text)},
    {"cuDeviceGetAttribute", reinterpret_cast<void*>(attribute)},
    {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
    {"cuMemCreate", reinterpret_cast<void*>(create)},
    {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(import_handle)},
    {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
    {"cuMemMap", reinterpret_cast<void*>(map)},
    {"cuMemSetAccess", reinterpret_cast<void*>(access)},
    {"cuMemUnmap", reinterpret_cast<void*>(unmap)},
    {"cuMemAddressFree", reinterpret_cast<void*>(unmap)},
    {"cuMemRelease", reinterpret_cast<void*>(release)},
};

}  // namespace

extern "C" {
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** to, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *to = nullptr;
  for (const Entry& entry : kDriver)
    if (std::strcmp(entry.name, name) == 0 && refused != std::string("no ") + name) *to = entry.fn;
  *result = *to == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "invalid device ordinal"; }
cudaError_t cudaSetDevice(int) { return refused == "cudaSetDevice" ? cudaErrorInvalidDevice : cudaSuccess; }
cudaError_t cudaFree(void*) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) {
  return refused == "cudaMemsetAsync ends" ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetDevice(int*) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
}

int main(int, char** argv) {
  const bool imports = std::string(argv[1]) == "import";
  refused = argv[2];
  try {
    const auto region =
        imports ? ep::nvlink::Region::reserve(3, 100) : ep::nvlink::Region::create(3, 100, 0.05);
    for (int times = imports ? 2 : 0; times != 0; --times) region->attach(3, 0);
    std::printf("%llu bytes\n", static_cast<unsigned long long>(region->bytes()));
  } catch (const std::runtime_error& error) {
    std::printf("%s\n", error.what());
  }
  std::printf("%d left\n", left);
}

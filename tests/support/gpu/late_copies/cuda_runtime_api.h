// What csrc/loading calls of the CUDA runtime.
#pragma once

#include <cstddef>

enum cudaError_t { cudaSuccess, cudaErrorNotReady, cudaErrorUnknown };
enum cudaMemcpyKind { cudaMemcpyHostToDevice };
constexpr unsigned cudaEventDisableTiming = 2;
struct CUstream_st;
struct CUevent_st;
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;

cudaError_t cudaSetDevice(int device);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
const char* cudaGetErrorString(cudaError_t error);

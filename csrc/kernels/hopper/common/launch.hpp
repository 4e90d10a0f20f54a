// Launches the Hopper kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace ep::hopper {

struct Grid {
  dim3 blocks;
  uint32_t threads;
  size_t shared;         // bytes of dynamic shared memory
  uint32_t cluster = 1;  // blocks that run at the same time and can access each other's shared memory
};

// Enqueues a kernel that may be set up while the previous one in the stream ends. most_shared: the most
// shared memory of all its launches.
template <class... Params>
cudaError_t launch(cudaStream_t stream, void (*kernel)(Params...), const Grid& grid, size_t most_shared,
                   const Params&... params) {
  // Set at each launch, because it holds for the current device only. Launches of a step are captured once.
  if (const auto error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(most_shared)))
    return error;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = grid.cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks, config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared, config.stream = stream;
  config.attrs = attributes, config.numAttrs = grid.cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace ep::hopper

// Blocks of a cluster: synchronisation, and access to each other's shared memory.
#pragma once

#include <cstdint>

namespace ep::hopper {

// A barrier for all threads of all blocks of the cluster. Afterwards, each sees what the others wrote.
__device__ inline void meet_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Converts an address of this block's shared memory to the same address in another block.
__device__ inline uint32_t address_in(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ inline float4 load_four(uint32_t address) {
  float4 four;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(address)
               : "memory");
  return four;
}

__device__ inline float2 load_two(uint32_t address) {
  float2 two;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(two.x), "=f"(two.y)
               : "r"(address)
               : "memory");
  return two;
}

}  // namespace ep::hopper

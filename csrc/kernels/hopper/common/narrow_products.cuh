// Warpgroup matrix products with few columns. The wide side may be in shared memory in either orientation.
#pragma once

#include "kernels/hopper/common/instructions.cuh"

namespace ep::hopper {

// How the 64-row side is stored in its 128-byte rows. kChannels: each holds one row of it, as for both sides
// of Product. kRows: each holds one channel of all 64 rows. Then 16 channels further are 2,048 bytes, and
// operand() still works: eight channels are one pattern of the swizzle.
enum class Across { kChannels, kRows };

// sum (+)= a @ b.T for 64 rows of a, kColumns rows of b and 16 channels of bfloat16. Without `add`, sum is
// overwritten. products.cuh says which elements of the sum a thread has.
template <uint32_t kColumns, Across kA>
struct NarrowProduct;

template <Across kA>
struct NarrowProduct<16, kA> {
  __device__ static void run(float (&d)[8], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, "
        "p, 1, 1, %11, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "l"(a), "l"(b), "r"(add), "n"(int(kA)));
  }
};

template <Across kA>
struct NarrowProduct<32, kA> {
  __device__ static void run(float (&d)[16], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
        "%11, %12, %13, %14, %15}, %16, %17, p, 1, 1, %19, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(add), "n"(int(kA)));
  }
};

}  // namespace ep::hopper

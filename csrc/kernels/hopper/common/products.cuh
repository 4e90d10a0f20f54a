// Warpgroup matrix products with both operands in shared memory (see instructions.cuh).
#pragma once

#include <type_traits>

#include "kernels/hopper/common/instructions.cuh"

namespace ep::hopper {

enum class Numbers { kBfloat16, kE4m3 };

// sum (+)= a @ b.T for 64 rows of a, kRows of b and 32 bytes of channels. Without `add`, sum is overwritten.
// Thread t of the warpgroup has rows 16 * (t / 32) + t % 32 / 4 (+ 8) and columns 8 j + 2 * (t % 4) (+ 1) of
// the sum: sum[4 j + 2 * (the row is + 8) + (the column is + 1)]. Sums of e4m3 keep 14 bits from one product
// to the next, so few should follow each other.
template <int kRows, Numbers kNumbers = Numbers::kBfloat16>
struct Product;

#define EP_SUMS_8(i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define EP_SUMS_16(i) EP_SUMS_8(i), EP_SUMS_8(i + 8)
#define EP_SUMS_24(i) EP_SUMS_16(i), EP_SUMS_8(i + 16)
#define EP_SUMS_32(i) EP_SUMS_16(i), EP_SUMS_16(i + 16)
#define EP_SUMS_48(i) EP_SUMS_32(i), EP_SUMS_16(i + 32)
#define EP_SUMS_56(i) EP_SUMS_48(i), EP_SUMS_8(i + 48)
#define EP_SUMS_64(i) EP_SUMS_32(i), EP_SUMS_32(i + 32)
#define EP_SUMS_72(i) EP_SUMS_64(i), EP_SUMS_8(i + 64)
#define EP_SUMS_80(i) EP_SUMS_64(i), EP_SUMS_16(i + 64)
#define EP_SUMS_88(i) EP_SUMS_80(i), EP_SUMS_8(i + 80)
#define EP_SUMS_96(i) EP_SUMS_80(i), EP_SUMS_16(i + 80)

#define EP_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define EP_NAMES_24 EP_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define EP_NAMES_32 EP_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define EP_NAMES_48 \
  EP_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define EP_NAMES_56 EP_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define EP_NAMES_64 EP_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define EP_NAMES_72 EP_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define EP_NAMES_80 EP_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"

#define EP_NAMES_88 EP_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define EP_NAMES_96 EP_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"

#define EP_PRODUCT(rows, sums, numbers, kind, transposed, a_name, b_name, add_name)          \
  template <>                                                                                \
  struct Product<rows, numbers> {                                                            \
    template <int kSums>                                                                     \
    __device__ static void run(float (&d)[kSums], uint64_t a, uint64_t b, int add) {         \
      static_assert(kSums >= sums);                                                          \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add_name                              \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #rows kind " {" EP_NAMES_##sums \
                   "}, " a_name ", " b_name ", p, 1, 1" transposed ";\n}"                    \
                   : EP_SUMS_##sums(0)                                                       \
                   : "l"(a), "l"(b), "r"(add));                                              \
    }                                                                                        \
  };
#define EP_PRODUCTS(rows, sums, ...)                                                     \
  EP_PRODUCT(rows, sums, Numbers::kBfloat16, "k16.f32.bf16.bf16", ", 0, 0", __VA_ARGS__) \
  EP_PRODUCT(rows, sums, Numbers::kE4m3, "k32.f32.e4m3.e4m3", "", __VA_ARGS__)

EP_PRODUCTS(32, 16, "%16", "%17", "%18")
EP_PRODUCTS(48, 24, "%24", "%25", "%26")
EP_PRODUCTS(64, 32, "%32", "%33", "%34")
EP_PRODUCTS(96, 48, "%48", "%49", "%50")
EP_PRODUCTS(112, 56, "%56", "%57", "%58")
EP_PRODUCTS(128, 64, "%64", "%65", "%66")
EP_PRODUCTS(144, 72, "%72", "%73", "%74")
EP_PRODUCTS(160, 80, "%80", "%81", "%82")
EP_PRODUCTS(176, 88, "%88", "%89", "%90")
EP_PRODUCTS(192, 96, "%96", "%97", "%98")

#undef EP_PRODUCTS
#undef EP_PRODUCT
#undef EP_SUMS_96
#undef EP_SUMS_88
#undef EP_SUMS_80
#undef EP_SUMS_72
#undef EP_SUMS_64
#undef EP_SUMS_56
#undef EP_SUMS_48
#undef EP_SUMS_32
#undef EP_SUMS_24
#undef EP_SUMS_16
#undef EP_SUMS_8
#undef EP_NAMES_96
#undef EP_NAMES_88
#undef EP_NAMES_80
#undef EP_NAMES_72
#undef EP_NAMES_64
#undef EP_NAMES_56
#undef EP_NAMES_48
#undef EP_NAMES_32
#undef EP_NAMES_24
#undef EP_NAMES_16

// Asynchronous products change registers behind the compiler's back: from here on it reads these again.
template <class Number, uint32_t kCount>
__device__ inline void pin(Number (&registers)[kCount]) {
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
    if constexpr (std::is_floating_point_v<Number>)
      asm volatile("" : "+f"(registers[i])::"memory");
    else
      asm volatile("" : "+r"(registers[i])::"memory");
  }
}

// d += a @ b for 64 rows, 16 inner positions and 128 columns. a: a thread's four pairs of bfloat16, of rows 0
// and 8 at positions 2 * (t % 4), then of both 8 positions on. b: columns contiguous, see values_operand() of
// prefill. d: as Product has it.
__device__ inline void add_values(float (&d)[64], const uint32_t* a, uint64_t b) {
#define EP_8(i)                                                                               \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
      "%11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "
      "%31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "
      "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, "
      "1;"
      : EP_8(0), EP_8(8), EP_8(16), EP_8(24), EP_8(32), EP_8(40), EP_8(48), EP_8(56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#undef EP_8
}

}  // namespace ep::hopper

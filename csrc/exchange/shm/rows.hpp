// Arithmetic over whole rows, vectorised for the processor it runs on. Bit-identical on every processor.
#pragma once

#include <cstdint>
#include <vector>

#include "exchange/common/layout.hpp"

namespace ep::cpu {

// out[h] = sum over i, in order, of weights[i] * rows[i][h]; float32, starting from +0, rounded once at the
// end.
struct SumParams {
  const void* const* rows;  // [count] rows of `hidden` elements
  const float* weights;     // [count]; null: all 1
  uint32_t count, hidden;
  void* out;
};
void weighted_sum_bf16(const SumParams& params);
void weighted_sum_fp32(const SumParams& params);

inline void weighted_sum(bool fp32, const SumParams& params) {
  (fp32 ? weighted_sum_fp32 : weighted_sum_bf16)(params);
}

// One bf16 row to e4m3 channels followed by scales, as `quant.hpp` defines. hidden % 128 == 0.
void quantise_row(const uint16_t* x, uint32_t hidden, Payload payload, uint8_t* q, void* scales);

// Versions of the above for instruction sets that this processor has, narrowest first; tests compare them.
struct RowKernels {
  const char* name;
  void (*sum_bf16)(const SumParams&);
  void (*sum_fp32)(const SumParams&);
  void (*quantise)(const uint16_t* x, uint32_t hidden, Payload payload, uint8_t* q, void* scales);
};
std::vector<RowKernels> row_kernels();

}  // namespace ep::cpu

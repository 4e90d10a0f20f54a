// The weighted sum of bf16 rows with AVX-512 and its bf16 rounding. x86-64 only.
#pragma once

#include "exchange/shm/rows.hpp"

namespace ep::cpu {

bool has_avx512_bf16();
void sum_bf16_avx512_bf16(const SumParams& params);  // requires has_avx512_bf16()

}  // namespace ep::cpu

#include "cpu/rows.hpp"

#include <algorithm>

#include "ep/quant.hpp"

// One wheel runs on every processor of its architecture: the loader picks the widest version of a function.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define EP_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif
#ifndef EP_CLONES
#define EP_CLONES
#endif

namespace ep::cpu {
namespace {
constexpr uint32_t kBlock = 256;  // channels summed at once: the accumulator stays in the first-level cache
}

EP_CLONES void weighted_sum_bf16(const void* const* rows, const float* weights, uint32_t count, uint32_t hidden,
                                 void* out) {
  auto* result = static_cast<uint16_t*>(out);
  alignas(64) float sum[kBlock];
  for (uint32_t begin = 0; begin < hidden; begin += kBlock) {
    const uint32_t n = std::min(kBlock, hidden - begin);
    for (uint32_t h = 0; h < n; ++h) sum[h] = 0.0f;
    for (uint32_t i = 0; i < count; ++i) {
      const uint16_t* row = static_cast<const uint16_t*>(rows[i]) + begin;
      const float weight = weights[i];
      for (uint32_t h = 0; h < n; ++h) sum[h] += weight * bf16_to_float(row[h]);
    }
    for (uint32_t h = 0; h < n; ++h) result[begin + h] = float_to_bf16(sum[h]);
  }
}

EP_CLONES void weighted_sum_fp32(const void* const* rows, const float* weights, uint32_t count, uint32_t hidden,
                                 void* out) {
  auto* result = static_cast<float*>(out);
  alignas(64) float sum[kBlock];
  for (uint32_t begin = 0; begin < hidden; begin += kBlock) {
    const uint32_t n = std::min(kBlock, hidden - begin);
    for (uint32_t h = 0; h < n; ++h) sum[h] = 0.0f;
    for (uint32_t i = 0; i < count; ++i) {
      const float* row = static_cast<const float*>(rows[i]) + begin;
      const float weight = weights[i];
      for (uint32_t h = 0; h < n; ++h) sum[h] += weight * row[h];
    }
    for (uint32_t h = 0; h < n; ++h) result[begin + h] = sum[h];
  }
}

EP_CLONES void quantise_row(const uint16_t* x, uint32_t hidden, Payload payload, uint8_t* q, void* scales) {
  for (uint32_t group = 0; group < hidden / kGroup; ++group) {
    const uint16_t* in = x + group * kGroup;
    uint8_t* to = q + group * kGroup;
    uint32_t amax = 0;
    for (uint32_t h = 0; h < kGroup; ++h) amax = std::max(amax, magnitude_bits(bf16_to_float(in[h])));
    const Scale scale = scale_of(amax, payload != Payload::kFp8);
    for (uint32_t h = 0; h < kGroup; ++h) to[h] = float_to_e4m3(bf16_to_float(in[h]) * scale.multiply);
    if (payload == Payload::kFp8Ue8m0) {
      static_cast<uint8_t*>(scales)[group] = ue8m0_of(scale.stored);  // little-endian: lowest channels lowest
    } else {
      static_cast<float*>(scales)[group] = scale.stored;
    }
  }
}

}  // namespace ep::cpu

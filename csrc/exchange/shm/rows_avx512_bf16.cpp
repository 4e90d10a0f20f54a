// weighted_sum_bf16 for processors that round to bf16 in hardware, bit-identical to the portable version. The
// instruction differs from float_to_bf16 only for denormals and NaN. Tiles that contain one are summed again
// with integer rounding. The same test detects sums of -0, so the first row needs no addition to +0.
#include "exchange/shm/rows_avx512_bf16.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include "exchange/common/quant.hpp"

#define EP_TARGET [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]]

namespace ep::cpu {
namespace {

constexpr uint32_t kVectors = 4;           // registers of 32 channels that are summed through all rows
constexpr uint32_t kTile = kVectors * 32;  // channels
constexpr int kNotPlain = 0x01 | 0x80 | 0x20 | 0x04;  // quiet NaN, signalling NaN, denormal, -0

struct Sums {
  __m512 even[kVectors], odd[kVectors];  // of neighbouring channels; a shift and a mask widen them
};

template <bool weighted>
EP_TARGET [[gnu::always_inline]] inline void add_row(Sums& sums, const uint16_t* row, float weight,
                                                     bool first) {
  const __m512 w = _mm512_set1_ps(weight);
#pragma GCC unroll 4
  for (uint32_t v = 0; v < kVectors; ++v) {
    const __m512i x = _mm512_loadu_si512(row + v * 32);
    __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000u))));
    if (weighted) {
      even = _mm512_mul_ps(w, even);
      odd = _mm512_mul_ps(w, odd);
    }
    sums.even[v] = first ? even : _mm512_add_ps(sums.even[v], even);
    sums.odd[v] = first ? odd : _mm512_add_ps(sums.odd[v], odd);
  }
}

EP_TARGET inline __m512i round_exact(__m512 x) {  // as float_to_bf16, the result in the high half
  const __m512i u = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
  const __m512i up =
      _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(_mm512_srli_epi32(u, 16), one));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(_mm512_add_epi32(u, up), nan, _mm512_set1_epi32(0x7fc00000));
}

template <bool weighted>
EP_TARGET [[gnu::noinline]] void sum_tile_exact(const SumParams& p, uint32_t h, uint16_t* out) {
  Sums sums;
  for (uint32_t v = 0; v < kVectors; ++v) sums.even[v] = sums.odd[v] = _mm512_setzero_ps();
  for (uint32_t i = 0; i < p.count; ++i)
    add_row<weighted>(sums, static_cast<const uint16_t*>(p.rows[i]) + h, weighted ? p.weights[i] : 1.0f,
                      false);
  for (uint32_t v = 0; v < kVectors; ++v) {
    const __m512i even = _mm512_srli_epi32(round_exact(sums.even[v]), 16);
    const __m512i both = _mm512_mask_mov_epi16(even, 0xaaaaaaaau, round_exact(sums.odd[v]));
    _mm512_storeu_si512(out + h + v * 32, both);
  }
}

template <bool weighted>
EP_TARGET void sum(const SumParams& params) {
  const SumParams p = params;
  auto* out = static_cast<uint16_t*>(p.out);
  const uint32_t whole = p.count == 0 ? 0 : p.hidden / kTile * kTile;
  // Rounding two registers gives all even channels, then all odd ones. This interleaves them.
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (uint32_t h = 0; h < whole; h += kTile) {
    Sums sums;
    add_row<weighted>(sums, static_cast<const uint16_t*>(p.rows[0]) + h, weighted ? p.weights[0] : 1.0f,
                      true);
    for (uint32_t i = 1; i < p.count; ++i)
      add_row<weighted>(sums, static_cast<const uint16_t*>(p.rows[i]) + h, weighted ? p.weights[i] : 1.0f,
                        false);
    uint32_t special = 0;
#pragma GCC unroll 4
    for (uint32_t v = 0; v < kVectors; ++v) {
      special |=
          _mm512_fpclass_ps_mask(sums.even[v], kNotPlain) | _mm512_fpclass_ps_mask(sums.odd[v], kNotPlain);
      const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(sums.odd[v], sums.even[v]);
      _mm512_storeu_si512(out + h + v * 32, _mm512_permutexvar_epi16(order, halves));
    }
    if (special != 0) [[unlikely]]
      sum_tile_exact<weighted>(p, h, out);
  }
  for (uint32_t h = whole; h < p.hidden; ++h) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < p.count; ++i) {
      const float x = bf16_to_float(static_cast<const uint16_t*>(p.rows[i])[h]);
      sum = sum + (weighted ? p.weights[i] * x : x);
    }
    out[h] = float_to_bf16(sum);
  }
}

}  // namespace

bool has_avx512_bf16() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

void sum_bf16_avx512_bf16(const SumParams& params) {
  params.weights != nullptr ? sum<true>(params) : sum<false>(params);
}

}  // namespace ep::cpu

#endif

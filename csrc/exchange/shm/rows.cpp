// The portable row arithmetic, compiled for several instruction sets.
#include "exchange/shm/rows.hpp"

#include <cstring>

#include "exchange/common/quant.hpp"
#include "exchange/shm/rows_avx512_bf16.hpp"

#define EP_INLINE [[gnu::always_inline]] inline

namespace ep::cpu {
namespace {

// L channels at once: as many as fit into one register of the target. Element-wise, so no result depends on
// L.
template <uint32_t L>
struct Lanes {
  typedef float Floats __attribute__((vector_size(L * 4)));
  typedef uint32_t Words __attribute__((vector_size(L * 4)));
  typedef uint16_t Halves __attribute__((vector_size(L * 2)));
};

// 2 L channels as two vectors. For bf16: even channels, then odd ones, which takes a shift and a mask instead
// of a shuffle.
template <uint32_t L>
struct Pair {
  using Floats = typename Lanes<L>::Floats;
  using Words = typename Lanes<L>::Words;
  Floats a, b;

  EP_INLINE void load(const uint16_t* from) {
    Words words;
    std::memcpy(&words, from, sizeof words);
    a = (Floats)(words << 16);
    b = (Floats)(words & 0xffff0000u);
  }
  EP_INLINE void load(const float* from) {
    std::memcpy(&a, from, sizeof a);
    std::memcpy(&b, from + L, sizeof b);
  }
  EP_INLINE void store(uint16_t* to) const {
    Words even, odd;
    round(a, even);
    round(b, odd);
    const Words words = (even >> 16) | (odd & 0xffff0000u);
    std::memcpy(to, &words, sizeof words);
  }
  EP_INLINE void store(float* to) const {
    std::memcpy(to, &a, sizeof a);
    std::memcpy(to + L, &b, sizeof b);
  }

 private:
  // Same as float_to_bf16 in each lane, with the result in the high half.
  EP_INLINE static void round(const Floats& x, Words& to) {
    const Words u = (Words)x, nan = (Words)(x != x);
    to = ((u + 0x7fffu + ((u >> 16) & 1u)) & ~nan) | (nan & 0x7fc00000u);
  }
};

EP_INLINE float widen(uint16_t x) { return bf16_to_float(x); }
EP_INLINE float widen(float x) { return x; }
EP_INLINE void narrow(float x, uint16_t* to) { *to = float_to_bf16(x); }
EP_INLINE void narrow(float x, float* to) { *to = x; }

constexpr uint32_t kTile = 2;  // pairs summed in registers through all rows

template <uint32_t L, class Element>
EP_INLINE void sum_rows(const SumParams& params) {
  constexpr uint32_t kPair = 2 * L;
  const SumParams p = params;  // a local copy stays in registers, because the stores below cannot change it
  auto* result = static_cast<Element*>(p.out);
  uint32_t h = 0;
  for (; h + kTile * kPair <= p.hidden; h += kTile * kPair) {
    Pair<L> sum[kTile] = {};
    for (uint32_t i = 0; i < p.count; ++i) {
      const Element* row = static_cast<const Element*>(p.rows[i]) + h;
      const float weight = p.weights != nullptr ? p.weights[i] : 1.0f;
      for (uint32_t v = 0; v < kTile; ++v) {
        Pair<L> x;
        x.load(row + v * kPair);
        sum[v].a = sum[v].a + weight * x.a;
        sum[v].b = sum[v].b + weight * x.b;
      }
    }
    for (uint32_t v = 0; v < kTile; ++v) sum[v].store(result + h + v * kPair);
  }
  for (; h < p.hidden; ++h) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < p.count; ++i)
      sum = sum +
            (p.weights != nullptr ? p.weights[i] : 1.0f) * widen(static_cast<const Element*>(p.rows[i])[h]);
    narrow(sum, result + h);
  }
}

// Same as float_to_e4m3 in each lane.
template <uint32_t L>
EP_INLINE void to_e4m3(const typename Lanes<L>::Floats& x, typename Lanes<L>::Words& to) {
  using Words = typename Lanes<L>::Words;
  const Words u = (Words)x, sign = (u >> 24) & 0x80u, magnitude = u & 0x7fffffffu;
  const Words nan = (Words)(magnitude > 0x7f800000u);
  const Words over =
      (Words)(magnitude > bits_of(kE4m3Max));  // compared as integers, which have the same order
  const Words c = (magnitude & ~over) | (over & bits_of(kE4m3Max));
  const Words normal = ((c + 0x7ffffu + ((c >> 20) & 1u)) >> 20) - (120u << 3);
  const Words subnormal = (Words)((typename Lanes<L>::Floats)c + 16384.0f) - bits_of(16384.0f);
  const Words small = (Words)(c < bits_of(0.015625f));
  const Words q = (normal & ~small) | (subnormal & small);
  to = ((sign | q) & ~nan) | (nan & 0x7fu);
}

template <uint32_t L>
EP_INLINE void quantise(const uint16_t* x, uint32_t hidden, Payload payload, uint8_t* q, void* scales) {
  using Words = typename Lanes<L>::Words;
  constexpr uint32_t kPair = 2 * L;
  for (uint32_t group = 0; group < hidden / kGroup; ++group) {
    const uint16_t* in = x + group * kGroup;
    uint8_t* to = q + group * kGroup;
    Pair<L> value;
    Words most = {};
    for (uint32_t h = 0; h < kGroup; h += kPair) {
      value.load(in + h);
      const Words even = (Words)value.a & 0x7fffffffu, odd = (Words)value.b & 0x7fffffffu;
      most = even > most ? even : most;
      most = odd > most ? odd : most;
    }
    uint32_t amax = 0;
    for (uint32_t lane = 0; lane < L; ++lane) amax = most[lane] > amax ? most[lane] : amax;
    const Scale scale = scale_of(amax, payload != Payload::kFp8);
    for (uint32_t h = 0; h < kGroup; h += kPair) {
      value.load(in + h);
      Words even, odd;
      to_e4m3<L>(value.a * scale.multiply, even);
      to_e4m3<L>(value.b * scale.multiply, odd);
      const Words both = even | odd << 8;
      const auto halves = __builtin_convertvector(both, typename Lanes<L>::Halves);
      std::memcpy(to + h, &halves, sizeof halves);
    }
    if (payload == Payload::kFp8Ue8m0) {
      static_cast<uint8_t*>(scales)[group] = ue8m0_of(scale.stored);  // little-endian: lowest channels lowest
    } else {
      static_cast<float*>(scales)[group] = scale.stored;
    }
  }
}

// The same source compiled for another instruction set.
#define EP_VERSION(suffix, target, lanes)                                                                   \
  target void sum_bf16_##suffix(const SumParams& p) { sum_rows<lanes, uint16_t>(p); }                       \
  target void sum_fp32_##suffix(const SumParams& p) { sum_rows<lanes, float>(p); }                          \
  target void quantise_##suffix(const uint16_t* x, uint32_t hidden, Payload payload, uint8_t* q, void* s) { \
    quantise<lanes>(x, hidden, payload, q, s);                                                              \
  }                                                                                                         \
  constexpr RowKernels k_##suffix{#suffix, sum_bf16_##suffix, sum_fp32_##suffix, quantise_##suffix};

EP_VERSION(base, , 4)
#if defined(__x86_64__)
EP_VERSION(avx2, [[gnu::target("avx2")]], 8)
EP_VERSION(avx512, [[gnu::target("avx512f")]], 16)
constexpr RowKernels k_avx512_bf16{"avx512_bf16", sum_bf16_avx512_bf16, sum_fp32_avx512, quantise_avx512};
#endif
#undef EP_VERSION

// One wheel runs on every processor of its architecture and uses the widest registers available.
const RowKernels kKernels = row_kernels().back();

}  // namespace

std::vector<RowKernels> row_kernels() {
  std::vector<RowKernels> all{k_base};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) all.push_back(k_avx2);
  if (__builtin_cpu_supports("avx512f")) all.push_back(k_avx512);
  if (__builtin_cpu_supports("avx512f") && has_avx512_bf16()) all.push_back(k_avx512_bf16);
#endif
  return all;
}

void weighted_sum_bf16(const SumParams& params) { kKernels.sum_bf16(params); }
void weighted_sum_fp32(const SumParams& params) { kKernels.sum_fp32(params); }
void quantise_row(const uint16_t* x, uint32_t hidden, Payload payload, uint8_t* q, void* scales) {
  kKernels.quantise(x, hidden, payload, q, scales);
}

}  // namespace ep::cpu

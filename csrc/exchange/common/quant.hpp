// The arithmetic of wire formats, fixed for CPU and GPU: bfloat16, e4m3 (finite, no infinities), scales.
//
//   amax  = max |x| over 128 channels, at least 1e-4; a NaN stays a NaN, its code is 0x7f
//   scale = amax / 448                                 q = rne(x * (448 / amax))   saturating at 448
//   power of two: scale = 2^ceil(log2(amax / 448))     q = rne(x * (1 / scale))
//   UE8M0: the biased exponent of that scale in one byte, four to an int32, lowest channels lowest
//
// Everything is float32, multiply then add, without contraction; rounding is to nearest even.
// Branch-free, so that loops over it vectorise.
#pragma once

#include <bit>
#include <cstdint>

#include "exchange/common/layout.hpp"

namespace ep {

constexpr float kE4m3Max = 448.0f;
constexpr float kAmaxFloor = 1e-4f;

EP_HOST_DEVICE inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
EP_HOST_DEVICE inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

EP_HOST_DEVICE inline float bf16_to_float(uint16_t x) { return float_of(uint32_t(x) << 16); }

EP_HOST_DEVICE inline uint16_t float_to_bf16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);  // NaN must not round to infinity
}

EP_HOST_DEVICE inline uint8_t float_to_e4m3(float x) {
  const uint32_t u = bits_of(x), sign = (u >> 24) & 0x80u, magnitude = u & 0x7fffffffu;
  const float a = float_of(magnitude);
  const float clamped = a > kE4m3Max ? kE4m3Max : a;
  const uint32_t c = bits_of(clamped);
  // Normal: keep 3 mantissa bits, exponent bias 127 -> 7.
  const uint32_t normal = ((c + 0x7ffffu + ((c >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6: adding 2^14 leaves multiples of 2^-9 in the low mantissa bits, rounded to nearest even.
  const uint32_t subnormal = bits_of(clamped + 16384.0f) - bits_of(16384.0f);
  const uint32_t q = clamped < 0.015625f ? subnormal : normal;
  return uint8_t(magnitude > 0x7f800000u ? 0x7fu : sign | q);  // processors differ in the sign of a NaN
}

EP_HOST_DEVICE inline float e4m3_to_float(uint8_t x) {
  const uint32_t sign = uint32_t(x & 0x80u) << 24, magnitude = x & 0x7fu;
  const float normal = float_of((magnitude << 20) + (120u << 23));
  const float subnormal = float(magnitude) * 0.001953125f;  // 2^-9
  const float size = magnitude < 8 ? subnormal : normal;
  return float_of(sign | (magnitude == 0x7fu ? 0x7fc00000u : bits_of(size)));
}

// Largest magnitude as bits: for non-negative floats the integer order is the float order, NaN above all.
EP_HOST_DEVICE inline uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }

struct Scale {
  float stored;    // what the receiver multiplies by
  float multiply;  // what the sender multiplies by
};

EP_HOST_DEVICE inline Scale scale_of(uint32_t amax_bits, bool power_of_two) {
  const float raw = float_of(amax_bits);
  const float amax = raw < kAmaxFloor ? kAmaxFloor : raw;  // false for NaN: it stays
  const float scale = amax / kE4m3Max;
  if (!power_of_two) return {scale, kE4m3Max / amax};
  const uint32_t up = bits_of(scale) + 0x7fffffu;  // next exponent unless the mantissa is zero
  const float rounded = scale == scale ? float_of(up & 0xff800000u) : scale;
  return {rounded, 1.0f / rounded};
}

EP_HOST_DEVICE inline uint8_t ue8m0_of(float power_of_two) { return uint8_t(bits_of(power_of_two) >> 23); }

}  // namespace ep

// Splits numbers on the CPU as csrc/kernels/hopper/experts does on a GPU: `two_codes` prints how many it tried and got
// wrong.
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <random>

inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
using std::max;

#include "kernels/hopper/experts/two_codes.cuh"

namespace {

using namespace ep::experts;

double of(uint16_t codes, bool second) {
  const auto code = __nv_fp8_storage_t(second ? codes >> 8 : codes);
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

// The two numbers as they come out, by the scale of a group with that largest magnitude.
struct Back {
  double first, second;
  Back(float a, float b, float largest) {
    const GroupScale scale(magnitude(largest));
    const CodePair codes(a * scale.inverse, b * scale.inverse);
    first = scale.scale * (of(codes.high, false) + of(codes.low, false));
    second = scale.scale * (of(codes.high, true) + of(codes.low, true));
  }
};

// exact: as bfloat16 is, unless far below the largest.
bool wrong(double found, double given, double largest, bool exact) {
  const double allowed = std::max(std::abs(given) / 512, largest / (1 << 17));
  return !(std::abs(found - given) <= (exact && std::abs(given) * 512 >= largest ? 0 : allowed));
}

void print(const char* name, size_t tried, size_t failed) {
  std::printf("%s %zu %zu\n", name, tried, failed);
}

void every_bfloat16() {
  size_t tried = 0, failed = 0;
  for (uint32_t exponent : {1, 7, 8, 9, 60, 127, 254})
    for (uint32_t top = exponent << 7; top < (exponent + 1) << 7; ++top) {
      const float largest = std::bit_cast<float>(top << 16);
      for (uint32_t bits = 0; bits <= top; ++bits, ++tried) {
        const float value = std::bit_cast<float>(bits << 16);
        const Back back(value, -value, largest);
        failed += wrong(back.first, value, largest, true) || wrong(back.second, -value, largest, true);
      }
    }
  print("bfloat16", tried, failed);
}

void any_float() {
  std::mt19937 draw(1);
  std::uniform_real_distribution<float> part(-1, 1), power(-20, 0);
  size_t tried = 0, failed = 0;
  for (; tried < 2'000'000; ++tried) {
    const float largest = 3.7f * std::exp2(10 * part(draw));
    const float a = largest * part(draw), b = largest * std::exp2(power(draw));
    const Back back(a, b, largest);
    failed += wrong(back.first, a, largest, false) || wrong(back.second, b, largest, false);
  }
  print("float", tried, failed);
}

void not_finite() {
  size_t failed = 0;
  for (const float largest : {INFINITY, NAN}) failed += !std::isnan(Back(1, largest, largest).first);
  print("not-finite", 2, failed);
}

}  // namespace

int main() {
  every_bfloat16();
  any_float();
  not_finite();
}

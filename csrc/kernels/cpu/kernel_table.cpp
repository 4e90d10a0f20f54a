// Detects instruction sets and looks up their tables.
#include "kernels/cpu/kernel_table.hpp"

#include <bit>
#include <stdexcept>

namespace ep::model {

static_assert(std::endian::native == std::endian::little, "packed words hold the lower k in the lower half");

std::vector<const Kernels*> supported() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back(&kAvx512Bf16);
  if (avx512) found.push_back(&kAvx512);
  if (avx2) found.push_back(&kAvx2);
#endif
  found.push_back(&kPortable);
  return found;
}

const Kernels& find(const std::string& name) {
  const auto all = supported();
  std::string names;
  for (const Kernels* kernels : all) {
    if (name == "auto" || name == kernels->name) return *kernels;
    names += std::string(", ") + kernels->name;
  }
  throw std::invalid_argument("isa = '" + name + "': must be one of auto" + names);
}

}  // namespace ep::model

// The compute kernels of one instruction set as a table of functions, and the choice of a table at run time.
#pragma once

#include <string>
#include <vector>

#include "kernels/cpu/params.hpp"
#include "kernels/cpu/thread_pool.hpp"

namespace ep::model {

// All kernels accumulate in FP32, in a fixed order for every row. So a row's result does not depend on the
// other rows of the call, on the number of threads, or on which thread computes it.
struct Kernels {
  const char* name;
  void (*linear)(const LinearParams&, Pool&);
  void (*expert_ffn)(const ExpertFfnParams&, Pool&);
  void (*attention)(const AttentionParams&, Pool&);
  void (*norm)(const NormParams&, Pool&);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512Bf16;
#endif

// The instruction sets that this machine supports, best first.
std::vector<const Kernels*> supported();

// The table with this name, or the best one for "auto". Throws std::invalid_argument naming the supported
// ones.
const Kernels& find(const std::string& name);

}  // namespace ep::model

// As much of the driver's header as the Hopper kernels name.
#pragma once

#include <cstdint>

struct CUtensorMap {
  alignas(64) uint64_t opaque[16];
};

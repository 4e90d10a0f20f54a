// Opens a translation unit that is compiled for EP_MODEL_TARGET. All headers are included before the switch,
// so no inline function of the standard library uses instructions that the machine may lack.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/cpu/kernel_table.hpp"
#include "kernels/cpu/params.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(EP_MODEL_TARGET)
#define EP_MODEL_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define EP_MODEL_PUSH(set) \
  EP_MODEL_PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
EP_MODEL_PUSH(EP_MODEL_TARGET)
#else
#define EP_MODEL_PUSH(set) EP_MODEL_PRAGMA(GCC target(set))
#pragma GCC push_options
EP_MODEL_PUSH(EP_MODEL_TARGET)
#endif
#endif

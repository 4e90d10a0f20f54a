// Rearranges weight matrices into the panels that the kernels read (layout: params.hpp). Runs once, at load.
#pragma once

#include "kernels/cpu/params.hpp"

namespace ep::model {

// weight: [n, k] row-major. out: packed_words(type, n, k) words.
void pack_linear(Dtype type, const void* weight, int64_t n, int64_t k, uint32_t* out);

// gate_up: [2 * ffn, k] row-major, gate rows first. out: packed_gated_words(type, ffn, k) words.
void pack_gated(Dtype type, const void* gate_up, int64_t ffn, int64_t k, uint32_t* out);

}  // namespace ep::model

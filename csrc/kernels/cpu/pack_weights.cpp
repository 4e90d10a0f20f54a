// Packs weights into panels.
#include "kernels/cpu/pack_weights.hpp"

#include <algorithm>
#include <cstring>

namespace ep::model {
namespace {

// Writes one matrix row as column `column` of a panel.
void pack_row(Dtype type, const void* row, int64_t k, uint32_t* panel, int64_t column) {
  const int64_t words = words_of(type, k);
  const auto* bytes = static_cast<const unsigned char*>(row);
  const int64_t row_bytes = k * (type == Dtype::kFloat32 ? 4 : 2);
  for (int64_t i = 0; i < words; ++i) {
    uint32_t word = 0;  // an odd k leaves the upper half zero
    std::memcpy(&word, bytes + i * 4, std::min<int64_t>(4, row_bytes - i * 4));
    panel[i * kPanel + column] = word;
  }
}

const void* row_at(Dtype type, const void* matrix, int64_t row, int64_t k) {
  return static_cast<const unsigned char*>(matrix) + row * k * (type == Dtype::kFloat32 ? 4 : 2);
}

}  // namespace

void pack_linear(Dtype type, const void* weight, int64_t n, int64_t k, uint32_t* out) {
  std::memset(out, 0, packed_words(type, n, k) * sizeof(uint32_t));
  const int64_t panel_words = kPanel * words_of(type, k);
  for (int64_t row = 0; row < n; ++row)
    pack_row(type, row_at(type, weight, row, k), k, out + row / kPanel * panel_words, row % kPanel);
}

void pack_gated(Dtype type, const void* gate_up, int64_t ffn, int64_t k, uint32_t* out) {
  std::memset(out, 0, packed_gated_words(type, ffn, k) * sizeof(uint32_t));
  constexpr int64_t kHalf = kPanel / 2;
  const int64_t panel_words = kPanel * words_of(type, k);
  for (int64_t channel = 0; channel < ffn; ++channel) {
    uint32_t* panel = out + channel / kHalf * panel_words;
    const int64_t column = channel % kHalf;
    pack_row(type, row_at(type, gate_up, channel, k), k, panel, column);
    pack_row(type, row_at(type, gate_up, ffn + channel, k), k, panel, kHalf + column);
  }
}

}  // namespace ep::model

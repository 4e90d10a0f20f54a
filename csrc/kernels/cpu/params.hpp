// Parameters of the compute kernels: one struct per kernel, raw pointers and sizes, no ownership.
//
// Rows are contiguous in their last dimension; strides count elements. A word is 32 bits: one float, or two
// bfloat16 that are neighbours along K. Sizes are elements unless a name says otherwise.
#pragma once

#include <cstdint>

namespace ep::model {

enum class Dtype : int { kFloat32 = 0, kBfloat16 = 1 };

// Packed weight matrix [n, k]: panels of kPanel output columns, each [k words][kPanel] words, zero-padded in
// both dimensions. A panel is read front to back, so a matrix is one sequential stream.
constexpr int64_t kPanel = 64;

inline int64_t words_of(Dtype type, int64_t k) { return type == Dtype::kFloat32 ? k : (k + 1) / 2; }
inline int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }
inline int64_t packed_words(Dtype type, int64_t n, int64_t k) {
  return panels_of(n) * kPanel * words_of(type, k);
}
// Gate and up share panels: kPanel / 2 gate columns, then the kPanel / 2 up columns of the same channels.
inline int64_t gated_panels_of(int64_t ffn) { return (ffn + kPanel / 2 - 1) / (kPanel / 2); }
inline int64_t packed_gated_words(Dtype type, int64_t ffn, int64_t k) {
  return gated_panels_of(ffn) * kPanel * words_of(type, k);
}
// Channels of the intermediate rows, rounded up to whole gated panels. Their padding is written as zeros.
inline int64_t padded_ffn(int64_t ffn) { return gated_panels_of(ffn) * (kPanel / 2); }

// out[m, b, n] = x[m, b, k] @ weight[b, n, k]^T (+ bias[n]) for `batch` matrices b, side by side in a row.
struct LinearParams {
  Dtype type;
  const void* x;
  int64_t rows, x_stride, x_batch;  // x_batch: elements between two matrices in a row
  const uint32_t* weight;           // [batch][packed_words(type, n, k)]
  const void* bias;                 // [n] of type, or null
  int64_t batch, n, k;
  void* out;  // of type, or float if out_float
  int64_t out_stride, out_batch;
  bool out_float;
};

// out[i] = down_e @ (silu(gate_e @ x[i]) * (up_e @ x[i])) for rows i in offsets[e] .. offsets[e + 1].
struct ExpertFfnParams {
  Dtype type;
  const void* x;           // [offsets[experts], hidden], contiguous
  const int64_t* offsets;  // [experts + 1]
  int64_t experts, hidden, ffn;
  const uint32_t* gate_up;  // [experts][packed_gated_words(type, ffn, hidden)]
  const uint32_t* down;     // [experts][packed_words(type, hidden, ffn)]
  void* out;                // [offsets[experts], hidden], contiguous
};

// out[i, h] = sum_t softmax_t(scale * q[i, h] . k[t]) v[t], t over the visible positions of row i.
// Position t of sequence s lies at slot blocks[s, t / block_size] * block_size + t % block_size.
struct AttentionParams {
  Dtype type;
  const void* q;  // [rows, heads, k_dim], q_stride between rows
  int64_t rows, q_stride, heads, kv_heads, k_dim, v_dim;
  const void* k;          // [slots, kv_heads, k_dim]
  const void* v;          // [slots, kv_heads, v_dim], or null: the first v_dim channels of k
  const int64_t* blocks;  // [sequences, blocks_stride]
  int64_t blocks_stride, block_size;
  const int64_t* sequence;   // [rows]
  const int64_t* positions;  // [rows]; row i sees positions 0 .. positions[i]
  int64_t window;            // only the last `window` of them; 0 = all
  float scale;
  void* out;  // [rows, heads, v_dim], contiguous
};

// out[i, g] = x[i, g] / sqrt(mean(x[i, g]^2) + eps) * weight[g]. x[i, g] are the channels from g * dim on of
// row i.
struct NormParams {
  Dtype type;
  const void* x;
  int64_t rows, x_stride, groups, dim;
  const void* weight;  // [groups, dim]
  float eps;
  void* out;  // [rows, groups, dim], contiguous
};

}  // namespace ep::model

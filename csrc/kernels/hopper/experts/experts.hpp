// The FFNs of a layer's routed experts, down(silu(gate(x)) * up(x)), in one Hopper kernel.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace ep::experts {

inline constexpr uint32_t kMaxExperts = 512;
inline constexpr uint32_t kHalf = 64;   // of the weight rows of a tile: gate and up, or two runs of channels
inline constexpr uint32_t kDepth = 64;  // input channels of a stage: one swizzled row of bfloat16, or twice
                                        // as many of codes
inline constexpr uint32_t kScaled = 128;    // weight rows and channels that share a scale
inline constexpr uint32_t kRowScaled = 64;  // channels of a row that do, where rows are split
// What a launch counts, behind the gate/up tiles of every expert that are done: pieces of rows that are split
// and that are taken, blocks that will take no more.
inline constexpr uint32_t kPiecesDone = kMaxExperts, kPiecesTaken = kMaxExperts + 1,
                          kBlocksThrough = kMaxExperts + 2, kCounts = kMaxExperts + 3;
// Units taken; which of two launches in turn this is; the counts of each of the two.
inline constexpr uint32_t kSyncWords = 2 + 2 * kCounts;

// What one launch works on; addresses of the device. Rows are bfloat16 or, beside weights in codes, codes
// with a scale for 128 channels.
struct Work {
  const void* rows;  // pitch bytes apart, 16-byte aligned
  int64_t pitch;
  const float* row_scales;         // null for bfloat16
  int64_t scale_row, scale_group;  // floats from row to row, from 128 channels to the next
  const int64_t* row_ids;          // [N] which row each row of the compact order reads, or null: its own
  const int32_t* counts;           // [experts]
  const int64_t* offsets;          // [experts + 1]
  std::byte* scratch;              // Scratch::bytes, 16-byte aligned
  void* out;                       // [N, width]
  uint32_t most;                   // N: what counts say beyond it is left out
  uint32_t held;                   // rows that there are to read; no other number is followed
};

struct Sizes {
  uint32_t experts, width, ffn;
};

// Where things lie in a launch's scratch: the rows between the two products, [N, ffn] of two bytes. Where
// weights are codes, these rows and the input's, [N, width], are split (split_rows.cuh), and scales follow
// both.
struct Scratch {
  uint64_t hidden_scales, rows, row_scales, bytes;  // hidden is at 0

  Scratch(const Sizes& sizes, uint64_t most, bool codes)
      : hidden_scales(most * sizes.ffn * 2),
        rows(hidden_scales + (codes ? scales(most, sizes.ffn) : 0)),
        row_scales(rows + (codes ? most * sizes.width * 2 : 0)),
        bytes(row_scales + (codes ? scales(most, sizes.width) : 0)) {}

 private:
  // Bytes, a multiple of 16.
  static uint64_t scales(uint64_t most, uint64_t channels) {
    return (most * (channels / kRowScaled) * sizeof(float) + 15) / 16 * 16;
  }
};

// Chosen for each launch; any gives the same bits.
struct LaunchConfig {
  uint32_t rows_of_tile;  // 32, 48, 64, 96 or, without codes, 128; of a wide one 96, 128 or 160; more rows of
                          // an expert are several tiles, which read its weights again
  bool wide;              // tiles of twice as many weight rows, see Experts::wide()
  bool reads_ahead;       // weights, before the work is known: as if no expert were without rows
};

// What the kernels take beside `Task`.
struct Weights {
  CUtensorMap gate_up, down;
  const float *gate_up_scale, *down_scale;  // [experts, 2 * ffn / 128, width / 128], [experts, width / 128,
                                            // ffn / 128]; null: weights are bfloat16
  uint32_t experts, width, ffn, depth;      // depth: channels of a stage
  uint32_t* sync;                           // kSyncWords, zero at first; then as leave_to_next() has them
};

// `Work`, and what is in its scratch. split: where weights are codes, the rows as they are multiplied.
struct Task {
  Work work;
  std::byte *hidden, *split;
  float *hidden_scales, *split_scales;

  Task(const Work& given, const Sizes& sizes, bool codes) : work(given), hidden(given.scratch) {
    const Scratch at(sizes, given.most, codes);
    split = given.scratch + at.rows;
    hidden_scales = reinterpret_cast<float*>(given.scratch + at.hidden_scales);
    split_scales = reinterpret_cast<float*>(given.scratch + at.row_scales);
  }
};

// Where weights lie. Scales: float32, see Weights; null for bfloat16.
struct Stored {
  const void *gate_up, *down;
  const float *gate_up_scale, *down_scale;
};

// The weights of a layer as the copy engine reads them. Of one device; one launch at a time: launches on the
// same weights follow each other in a stream or by events, others may run beside them.
//
// The order of kernels. Before griddepcontrol.wait a block reads weights and nothing else; every block waits,
// with work or without. A block says griddepcontrol.launch_dependents, behind that wait, once no unit is left
// for it, while it still multiplies and writes `out`, and others still take units. So the next kernel of the
// stream, if launched with programmatic stream serialization, may be on the device while `hidden`, `out` and
// the counters are written: every block of it must wait before it reads or writes what a kernel of the
// stream writes, and before it ends. Then what comes behind it is safe too, as its own wait ends behind both.
// Kernels launched without that attribute, copies and events come when this one has ended. What ran ahead of
// this kernel has ended before any that follows it is set up: of the launches on the same weights two are in
// flight at most.
class Experts {
 public:
  // gate_up: [experts, 2 * ffn, width], gate rows first. down: [experts, width, ffn]. bfloat16, or with
  // scales float8 e4m3. Not owned. Throws std::invalid_argument for sizes that no tile fits,
  // std::runtime_error for what CUDA refuses.
  Experts(int device, const Stored& stored, const Sizes& sizes);
  Experts(const Experts&) = delete;
  Experts& operator=(const Experts&) = delete;
  ~Experts();

  // Bytes of scratch that a launch needs.
  uint64_t scratch_bytes(uint64_t most) const { return Scratch(sizes_, most, codes()).bytes; }

  // Whether tiles may be wide.
  bool wide() const { return !codes() && sizes_.width % (4 * kHalf) == 0 && sizes_.ffn % (2 * kHalf) == 0; }

  // Enqueues; no wait. Weights may be read before the kernels ahead in the stream have ended: they must not
  // write them. Throws std::invalid_argument for a tile that these weights have not, or rows too far apart.
  void run(cudaStream_t stream, const Work& work, const LaunchConfig& config) const;

 private:
  void check_tile(const LaunchConfig& config) const;
  void check_work(const Work& work) const;
  bool codes() const { return weights_.gate_up_scale != nullptr; }

  int device_;
  Sizes sizes_;
  uint32_t blocks_;
  Weights weights_{};
};

// How the kernels are enqueued. blocks: as many as there are multiprocessors.
struct Launch {
  cudaStream_t stream;
  uint32_t blocks;
  LaunchConfig config;
};

cudaError_t start(const Launch& launch, const Weights& weights, const Task& task);  // bfloat16
cudaError_t start_wide(const Launch& launch, const Weights& weights, const Task& task);
cudaError_t start_of_codes(const Launch& launch, const Weights& weights, const Task& task);

}  // namespace ep::experts

// The FFNs of a layer's routed experts, down(silu(gate(x)) * up(x)), in one Hopper kernel.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace ep::experts {

inline constexpr uint32_t kMaxExperts = 512;
inline constexpr uint32_t kHalf = 64;   // half of a tile's weight rows: gate and up, or two runs of channels
inline constexpr uint32_t kDepth = 64;  // input channels of a stage: one swizzled row of bfloat16, or twice
                                        // as many of codes
inline constexpr uint32_t kScaled = 128;    // weight rows and channels that share a scale
inline constexpr uint32_t kRowScaled = 64;  // channels of a split row that share a scale
// Counters of a launch. The first kMaxExperts count finished gate/up tiles per expert. Then: pieces of rows
// that are split, pieces taken, and blocks that will take no more.
inline constexpr uint32_t kPiecesDone = kMaxExperts, kPiecesTaken = kMaxExperts + 1,
                          kBlocksThrough = kMaxExperts + 2, kCounts = kMaxExperts + 3;
// The words: units taken, which of two alternating launches this is, and the counters of both.
inline constexpr uint32_t kSyncWords = 2 + 2 * kCounts;

// Arguments of one launch; device addresses. Rows are bfloat16. With weights in codes, they may also be codes
// with a scale per 128 channels.
struct Work {
  const void* rows;  // pitch bytes apart, 16-byte aligned
  int64_t pitch;
  const float* row_scales;         // null for bfloat16
  int64_t scale_row, scale_group;  // floats between rows, and between groups of 128 channels
  const int64_t* row_ids;  // [N] the row to read for each row of the compact order; null: the same row
  const int32_t* counts;   // [experts]
  const int64_t* offsets;  // [experts + 1]
  std::byte* scratch;      // Scratch::bytes, 16-byte aligned
  void* out;               // [N, width]
  uint32_t most;           // N; larger counts are cut off
  uint32_t held;           // number of rows to read; other row ids are ignored
};

struct Sizes {
  uint32_t experts, width, ffn;
};

// Layout of a launch's scratch memory: the rows between the two products, [N, ffn] of two bytes. If weights
// are codes, these rows and the input's, [N, width], are split (split_rows.cuh), and scales follow both.
struct Scratch {
  uint64_t hidden_scales, rows, row_scales, bytes;  // hidden is at 0

  Scratch(const Sizes& sizes, uint64_t most, bool codes)
      : hidden_scales(most * sizes.ffn * 2),
        rows(hidden_scales + (codes ? scales(most, sizes.ffn) : 0)),
        row_scales(rows + (codes ? most * sizes.width * 2 : 0)),
        bytes(row_scales + (codes ? scales(most, sizes.width) : 0)) {}

 private:
  // Size in bytes, a multiple of 16.
  static uint64_t scales(uint64_t most, uint64_t channels) {
    return (most * (channels / kRowScaled) * sizeof(float) + 15) / 16 * 16;
  }
};

// Chosen for each launch. Every choice gives the same bits.
struct LaunchConfig {
  uint32_t rows_of_tile;  // 32, 48, 64, 96 or, without codes, 128; of a wide one 96, 128, 160 or 192; more
                          // rows of an expert are several tiles, which read its weights again
  bool wide;              // tiles of twice as many weight rows, see Experts::wide()
  bool reads_ahead;       // reads weights before the work is known, as if every expert had rows
};

// Arguments of the kernels besides `Task`.
struct Weights {
  CUtensorMap gate_up, down;
  const float *gate_up_scale, *down_scale;  // [experts, 2 * ffn / 128, width / 128], [experts, width / 128,
                                            // ffn / 128]; null: weights are bfloat16
  uint32_t experts, width, ffn, depth;      // depth: channels of a stage
  uint32_t* sync;                           // kSyncWords, zero at first; leave_to_next() updates them
};

// `Work`, and addresses in its scratch. split: the rows as they are multiplied, if weights are codes.
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

// Addresses of the weights. Scales: float32, see Weights; null for bfloat16.
struct Stored {
  const void *gate_up, *down;
  const float *gate_up_scale, *down_scale;
};

// The weights of a layer as the copy engine reads them. For one device and one launch at a time: launches on
// the same weights must follow each other in a stream or by events. Other kernels may run at the same time.
//
// The order of kernels. Before griddepcontrol.wait, a block reads only weights. Every block waits, with or
// without work. After that wait, a block calls griddepcontrol.launch_dependents once no unit is left for it.
// It may still multiply and write `out`, and other blocks still take units. So if the next kernel of the
// stream is launched with programmatic stream serialization, it may already run while `hidden`, `out` and the
// counters are written. Every block of it must wait before it reads or writes what a kernel of the stream
// writes, and before it ends. Then later kernels are safe too, because their own wait ends after both.
// Kernels launched without that attribute, copies and events start after this kernel has ended. Any kernel
// that ran ahead of this one has ended before a later one is set up. So at most two launches on the same
// weights are in flight.
class Experts {
 public:
  // gate_up: [experts, 2 * ffn, width], gate rows first. down: [experts, width, ffn]. bfloat16, or float8
  // e4m3 with scales. Does not own them. Throws std::invalid_argument for sizes that no tile fits,
  // std::runtime_error for errors of CUDA.
  Experts(int device, const Stored& stored, const Sizes& sizes);
  Experts(const Experts&) = delete;
  Experts& operator=(const Experts&) = delete;
  ~Experts();

  // Bytes of scratch that a launch needs.
  uint64_t scratch_bytes(uint64_t most) const { return Scratch(sizes_, most, codes()).bytes; }

  // Whether tiles may be wide.
  bool wide() const { return !codes() && sizes_.width % (4 * kHalf) == 0 && sizes_.ffn % (2 * kHalf) == 0; }

  // Enqueues the kernel without waiting. Weights may be read before the preceding kernels of the stream have
  // ended, so these must not write them. Throws std::invalid_argument for an unsupported tile, or rows too
  // far apart.
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

// How the kernels are enqueued. blocks: number of multiprocessors.
struct Launch {
  cudaStream_t stream;
  uint32_t blocks;
  LaunchConfig config;
};

cudaError_t start(const Launch& launch, const Weights& weights, const Task& task);  // bfloat16
cudaError_t start_wide(const Launch& launch, const Weights& weights, const Task& task);
cudaError_t start_of_codes(const Launch& launch, const Weights& weights, const Task& task);

}  // namespace ep::experts

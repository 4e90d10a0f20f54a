// The gated FFNs of many experts on rows whose numbers per expert are on the device, in one kernel for
// Hopper.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ep::experts {

inline constexpr uint32_t kMaxExperts = 512;
inline constexpr uint32_t kHalf = 64;   // of the weight rows of a tile: gate and up, or two runs of channels
inline constexpr uint32_t kDepth = 64;  // input channels of a stage: one swizzled row of bfloat16
// Units taken; which of two launches in turn this is; the gate/up tiles of every expert that are done, for
// each of the two.
inline constexpr uint32_t kSyncWords = 2 + 2 * kMaxExperts;

// What one launch works on; addresses of the device. Rows are bfloat16.
struct Work {
  const void* rows;  // pitch bytes apart, 16-byte aligned
  int64_t pitch;
  const int64_t* row_ids;  // [N] which row each row of the compact order reads, or null: its own
  const int32_t* counts;   // [experts]
  const int64_t* offsets;  // [experts + 1]
  void* hidden;            // [N, ffn], between the two products
  void* out;               // [N, width]
  uint32_t most;           // N: what counts say beyond it is left out
  uint32_t held;           // rows that there are to read; no other number is followed
};

// Chosen for each launch; any gives the same bits.
struct LaunchConfig {
  uint32_t rows_of_tile;  // 32, 48, 64, 96 or 128; more rows of an expert are several tiles, which read its
                          // weights again
  bool reads_ahead;       // weights, before the work is known: as if no expert were without rows
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
  // gate_up: [experts, 2 * ffn, width], gate rows first. down: [experts, width, ffn]. bfloat16, not owned.
  // Throws std::invalid_argument for sizes that no tile fits, std::runtime_error for what CUDA refuses.
  Experts(int device, const void* gate_up, const void* down, uint32_t experts, uint32_t width, uint32_t ffn);
  Experts(const Experts&) = delete;
  Experts& operator=(const Experts&) = delete;
  ~Experts();

  // Enqueues; no wait. Weights may be read before the kernels ahead in the stream have ended: they must not
  // write them.
  void run(cudaStream_t stream, const Work& work, const LaunchConfig& config) const;

 private:
  int device_;
  uint32_t experts_, width_, ffn_, blocks_;
  uint32_t* sync_ = nullptr;
  CUtensorMap gate_up_, down_;
};

// What the kernel takes beside `Work`.
struct Weights {
  CUtensorMap gate_up, down;
  uint32_t experts, width, ffn;
  uint32_t* sync;  // kSyncWords, zero at first; then as leave_to_next() has them
};

cudaError_t start(cudaStream_t stream, uint32_t blocks, const LaunchConfig& config, const Weights& weights,
                  const Work& work);

}  // namespace ep::experts

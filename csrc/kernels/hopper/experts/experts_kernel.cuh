// The kernel of the experts: gate/up and down products of all experts with SiLU in between, as one stream of
// weights through the copy engine.
//
// There is one block per multiprocessor. A block takes units, (rows of one expert) x (a tile of weight rows):
// first all gate/up tiles, then all down tiles. A down tile waits, per expert, until the gate/up tiles are
// done; its weights are already on their way. Weights are the 64-row side of the products (wgmma), rows the
// narrow side, sums are float32. One warp hands out units, three load stages, the others multiply.
#pragma once

#include <cuda_bf16.h>

#include <concepts>

#include "kernels/hopper/common/launch.hpp"
#include "kernels/hopper/experts/work_units.cuh"

namespace ep::experts {

using namespace hopper;
using bf16 = __nv_bfloat16;

constexpr uint32_t kLoaders = 3;                              // warps
constexpr uint32_t kPiece = 16;                               // bytes per copy
constexpr uint32_t kEight = 8 * kSwizzledRow;                 // bytes of eight rows of a tile
constexpr uint32_t kAlignment = kEight, kBudget = 219 << 10;  // bytes of shared memory, the
                                                              // latter all but the agenda

// What differs between kernels: products of bfloat16 (bf16_policy.cuh) or of FP8 codes (fp8_weights.cu).
//   kRows, kWeightRows: rows of a tile.
//   kSplits: the multiplying warps split rows before they are copied. Blocks take pieces in turn, so no block
//   waits
//     for one that has not started.
//   kShares: loaders share each stage. Otherwise they take turns, which needs more of their registers.
//   kTiles: runs of 128 bytes of each row in a stage.
//   kMultipliers: number of warps that multiply and report that a gate/up tile is done.
//   kStages, kWeightBytes: stages, and bytes of weights in each.
//   kResident: blocks per multiprocessor that registers allow.
//   kRegisters: registers of a multiplying thread, after the others have released all but kLoadersRegisters.
//   0: all
//     threads have the same number.
//   Room: shared memory of the multipliers, and what a stage holds besides weights and rows.
//   pieces: how many pieces there are to split. copy_weights, copy_scales: load a stage. multiply: all units.
template <class P>
concept KernelPolicy = requires(const Weights& w, const Task& task, const Unit& unit, typename P::Room& room,
                                std::byte (&to)[P::kWeightBytes], uint64_t* full, uint32_t n) {
  requires P::kRows % 16 == 0 && P::kWeightRows != 0 && P::kTiles != 0 && P::kStages >= 2;
  requires P::kMultipliers != 0 && P::kResident != 0;
  { P::kSplits } -> std::convertible_to<bool>;
  { P::kShares } -> std::convertible_to<bool>;
  { P::kRegisters } -> std::convertible_to<uint32_t>;
  { P::pieces(w, task.work) } -> std::same_as<uint32_t>;
  P::copy_weights(w, unit, n, to, full);
  P::copy_scales(w, task, unit, n, room, n, n);
};

template <class Policy>
struct Shared {
  std::byte weights[Policy::kStages][Policy::kWeightBytes];
  std::byte rows[Policy::kStages]
                [Policy::kTiles * Policy::kRows * kSwizzledRow];  // eight rows of each tile in turn
  typename Policy::Room room;
  uint64_t full[Policy::kStages], empty[Policy::kStages];
  Agenda agenda;
};

// The number of stages of `bytes` bytes that fit beside `room` other bytes.
constexpr uint32_t stages_beside(uint32_t room, uint32_t bytes) { return (kBudget - room) / bytes; }

// Stores 16 channels of a warp for the rows of the unit to global memory, kAtOnce of a tile's kRows rows at a
// time. value(i): the lane's i-th sum.
template <uint32_t kRows, uint32_t kAtOnce, class Value>
__device__ void store(bf16 (&turned)[kAtOnce][16], const Unit& unit, bf16* to, uint32_t width, uint32_t lane,
                      Value value) {
  static_assert(kRows % kAtOnce == 0);
#pragma unroll
  for (uint32_t begin = 0; begin < kRows; begin += kAtOnce) {
    if (begin >= unit.rows) break;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce / 2; ++i) {
      if (begin + i / 4 * 8 >= unit.rows) break;
      turned[i / 4 * 8 + lane % 4 * 2 + i % 2][lane / 4 + (i / 2 % 2) * 8] =
          __float2bfloat16_rn(value(begin / 2 + i));
    }
    __syncwarp();
    for (uint32_t p = lane; p < min(unit.rows - begin, kAtOnce) * 2; p += 32) {
      const auto* piece = reinterpret_cast<const uint4*>(&turned[p / 2][p % 2 * 8]);
      *reinterpret_cast<uint4*>(to + size_t(unit.first + begin + p / 2) * width + p % 2 * 8) = *piece;
    }
    __syncwarp();
  }
}

// The number-th piece behind `from`. It is not stored as a pointer: one per row would take two registers
// each.
__device__ inline const std::byte* piece_behind(const std::byte* from, uint32_t number) {
  const std::byte* found;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(found) : "r"(number), "n"(kPiece), "l"(from));
  return found;
}

// Where a lane reads its 16-byte pieces of a stage: piece `lane % 8` of rows 4 i + lane / 8. Loaders that
// share a stage each have every kLoaders-th i.
template <class Policy>
struct Sources {
  static constexpr uint32_t kRows = Policy::kRows, kSharers = Policy::kShares ? kLoaders : 1;
  static constexpr uint32_t kCount = (kRows / 4 + kSharers - 1) / kSharers;
  static constexpr uint32_t kNone = ~0u;
  static_assert(!Policy::kShares || Policy::kTiles == 1);
  const std::byte* base;
  uint32_t of[kCount];  // offset of each row from base, in pieces
  uint32_t tile_bytes;  // distance between the two tiles of a row, if there are two
  uint32_t share;       // of the loader, where they share

  __device__ Sources(const Weights& w, const Task& task, const Unit& unit, uint32_t loader, uint32_t lane)
      : share(Policy::kShares ? loader : 0) {
    const Work& work = task.work;
    tile_bytes = unit.kind == Kind::kGateUp ? w.width : w.ffn;
    const bool up = unit.kind == Kind::kGateUp, given = up && !Policy::kSplits;
    const int64_t pitch = given ? work.pitch : int64_t(up ? w.width : w.ffn) * 2;
    const auto* rows = static_cast<const std::byte*>(work.rows);
    base = (given ? rows : up ? task.split : task.hidden) + lane % 8 * kPiece;
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      const uint32_t row = 4 * (i * kSharers + share) + lane / 8, slot = unit.first + row;
      of[i] = kNone;
      if (row >= unit.rows) continue;
      const int64_t from = given && work.row_ids != nullptr ? work.row_ids[slot] : int64_t(slot);
      if (uint64_t(from) < (given ? work.held : work.most)) of[i] = uint32_t(uint64_t(from) * pitch / kPiece);
    }
  }

  // Copies a stage of all tiles, eight rows of each in turn. Missing rows keep what the stage held before:
  // nobody reads their sums.
  __device__ void copy(uint32_t stage, std::byte* to, uint32_t lane) const {
    const uint32_t row = lane / 8, at = shared_address(to) + row * kSwizzledRow + share * (kEight / 2);
    const uint32_t turned = share % 2 * 4;
    const uint32_t even = at + (lane ^ row ^ turned) % 8 * kPiece;
    const uint32_t odd = at + (lane ^ (row + 4) ^ turned) % 8 * kPiece;
#pragma unroll
    for (uint32_t tile = 0; tile < Policy::kTiles; ++tile) {
      const std::byte* from = base + tile * tile_bytes + stage * kSwizzledRow;
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i) {
        const uint32_t beyond = Policy::kShares
                                    ? i * kSharers * (kEight / 2)
                                    : (i / 2 * Policy::kTiles + tile) * kEight + i % 2 * (kEight / 2);
        if (of[i] != kNone) copy_piece((i % 2 == 0 ? even : odd) + beyond, piece_behind(from, of[i]));
      }
    }
  }
};

// What a unit waits for before its rows are read.
template <class Policy>
struct Needed {
  const uint32_t* count;
  uint32_t value = 0;

  // pieces: number of pieces of split rows, 0 if all are known to be done. counts: those of this launch.
  __device__ Needed(const Unit& unit, const uint32_t* counts, uint32_t pieces) {
    const bool down = unit.kind == Kind::kDown;
    count = counts + (down ? unit.expert : kPiecesDone);
    if (down) value = unit.gate_up_done * Policy::kMultipliers;
    if (unit.kind == Kind::kGateUp) value = pieces;
  }

  __device__ void await() {
    for (uint32_t seen = 0; seen < value;) seen = load_acquire(count);
    value = 0;
  }
};

// Fills every kLoaders-th stage, or its share of each. `ahead`: stages whose weights were already requested.
template <class Policy>
__device__ void load(Shared<Policy>& s, const Weights& w, const Task& task, uint32_t ahead, uint32_t loader,
                     uint32_t lane) {
  Place place;
  uint32_t turn = 0, asked = ahead, pieces = Policy::pieces(w, task.work);
  for (uint32_t n = 0;; ++n) {
    const Unit unit = take(s.agenda, n, lane);
    if (lane == 0) arrive(&s.agenda.begun);
    if (unit.kind == Kind::kEnd) return;
    const Sources<Policy> sources(w, task, unit, loader, lane);
    Needed<Policy> needed(unit, s.agenda.counts, pieces);
    for (uint32_t i = 0; i < unit.stages; ++i, place.next(Policy::kStages)) {
      const bool mine = Policy::kShares || turn == loader, weights = asked == 0;
      turn = turn + 1 == kLoaders ? 0 : turn + 1;
      asked -= !weights;
      if (!mine) continue;
      await_phase(&s.empty[place.stage], place.parity ^ 1);
      uint64_t* full = &s.full[place.stage];
      if (weights && lane == 0 && (!Policy::kShares || loader == 0))
        Policy::copy_weights(w, unit, i, s.weights[place.stage], full);
      needed.await();
      if (unit.kind == Kind::kGateUp) pieces = 0;
      sources.copy(i, s.rows[place.stage], lane);
      Policy::copy_scales(w, task, unit, i, s.room, place.stage, lane);
      arrive_when_copied(full);
    }
  }
}

template <KernelPolicy Policy>
__global__ void __launch_bounds__(32 * (Policy::kMultipliers + kLoaders + 1), Policy::kResident)
    experts_kernel(const __grid_constant__ Weights w, const __grid_constant__ Task task, bool reads_ahead) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::byte raw[];
  auto& s = *reinterpret_cast<Shared<Policy>*>(raw + (0u - shared_address(raw)) % kAlignment);
  const uint32_t warp = warp_number(), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < Policy::kStages; ++i) {
      // The request for weights, and each lane of a loader, or of all that share.
      init_barrier(&s.full[i], 1 + 32 * (Policy::kShares ? kLoaders : 1));
      init_barrier(&s.empty[i], Policy::kMultipliers);
    }
    init(s.agenda, kLoaders, Policy::kMultipliers);
    publish_barriers();
  }
  __syncthreads();
  const Unit ahead = reads_ahead ? guess<Policy>(w, Policy::kStages) : Unit{Kind::kEnd};
  if (warp == Policy::kMultipliers && lane == 0)
    for (uint32_t i = 0; i < ahead.stages; ++i) Policy::copy_weights(w, ahead, i, s.weights[i], &s.full[i]);
  await_previous_kernel();
  if (warp < Policy::kMultipliers) {
    if constexpr (Policy::kRegisters != 0) take_registers<Policy::kRegisters>();
    return Policy::multiply(s, w, task, warp, lane);
  }
  if constexpr (Policy::kRegisters != 0) leave_registers<Policy::kLoadersRegisters>();
  if (warp < Policy::kMultipliers + kLoaders)
    load(s, w, task, ahead.stages, warp - Policy::kMultipliers, lane);
  else
    hand_out<Policy>(s.agenda, w, task.work, ahead, Policy::kSplits ? gridDim.x : 0, lane);
#else
  __trap();  // Experts rejects other GPUs
#endif
}

// Whether the registers that a block starts with are enough for its warpgroups. Otherwise the multiplying
// warps would wait for ever.
template <class Policy>
constexpr bool registers_suffice() {
  if constexpr (Policy::kRegisters != 0) {
    constexpr uint32_t kOthers = kLoaders + 1, kWarps = Policy::kMultipliers + kOthers;
    constexpr uint32_t kBegin = (64 << 10) / (32 * kWarps * Policy::kResident) / 8 * 8;  // per thread
    return kOthers == 4 && Policy::kMultipliers % 4 == 0 &&
           Policy::kMultipliers * Policy::kRegisters + kOthers * Policy::kLoadersRegisters <= kWarps * kBegin;
  }
  return true;
}

template <KernelPolicy Policy>
cudaError_t start_kernel(const Launch& launch, const Weights& weights, const Task& task) {
  constexpr size_t kBytes = sizeof(Shared<Policy>) + kAlignment;
  static_assert(kBytes <= 227 << 10, "a block of Hopper has no more");
  static_assert(registers_suffice<Policy>(), "warpgroups take more registers than others leave");
  const Grid grid{launch.blocks, 32 * (Policy::kMultipliers + kLoaders + 1), kBytes};
  return hopper::launch(launch.stream, experts_kernel<Policy>, grid, kBytes, weights, task,
                        launch.config.reads_ahead);
}

}  // namespace ep::experts

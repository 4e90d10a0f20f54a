// What both kernels of the experts are: gate/up and down products of all experts, SiLU between them, as one
// stream of weights through the copy engine.
//
// A block per multiprocessor takes units, (rows of one expert) x (128 weight rows), first of all gate/up
// tiles, then of all down tiles; a down tile waits, per expert, until the gate/up tiles are done, while its
// weights are already under way. Weights are the 64-row side of the products (wgmma), rows the narrow one,
// sums float32. One warp hands out units, three load stages, the others multiply.
//
// A Form is what is special to weights in bfloat16 or in codes:
//   kRows: of a tile. kSplits: whether rows are split, by those who multiply, before they are copied, in
//   pieces that blocks take as they come: no block waits for one that has not begun. kTiles: runs of 128
//   bytes of each row in a stage. kMultipliers: warps that multiply, and so say that a gate/up tile is done.
//   kStages. kResident: blocks of a multiprocessor that registers allow. Room: shared memory of the
//   multipliers, with what a stage has beside weights and rows. pieces(), copy_weights(), copy_scales(),
//   multiply().
#pragma once

#include <cuda_bf16.h>

#include "experts/units.cuh"
#include "hopper/launch.hpp"

namespace ep::experts {

using namespace hopper;
using bf16 = __nv_bfloat16;

constexpr uint32_t kLoaders = 3;                                          // warps
constexpr uint32_t kWeightBytes = 2 * kHalf * kSwizzledRow, kPiece = 16;  // of a stage, of a copy
constexpr uint32_t kEight = 8 * kSwizzledRow;                             // bytes of eight rows of a tile
constexpr uint32_t kAlignment = kEight, kBudget = 219 << 10;              // bytes of shared memory, the
                                                                          // latter all but the agenda

template <class Form>
struct Shared {
  std::byte weights[Form::kStages][kWeightBytes];
  std::byte rows[Form::kStages][Form::kTiles * Form::kRows * kSwizzledRow];  // eight of each tile in turn
  typename Form::Room room;
  uint64_t full[Form::kStages], empty[Form::kStages];
  Agenda agenda;
};

// Stages that fit beside `room` bytes, each with `more` bytes of its own beside weights and rows.
constexpr uint32_t stages_beside(uint32_t room, uint32_t row_bytes, uint32_t more) {
  return (kBudget - room) / (kWeightBytes + row_bytes + more);
}

// 16 channels of a warp for the rows of the unit, to global memory; value(i): of the lane's i-th sum.
template <uint32_t kRows, class Value>
__device__ void store(bf16 (&turned)[kRows][16], const Unit& unit, bf16* to, uint32_t width, uint32_t lane,
                      Value value) {
#pragma unroll
  for (uint32_t i = 0; i < kRows / 2; ++i) {
    if (i / 4 * 8 >= unit.rows) break;
    turned[i / 4 * 8 + lane % 4 * 2 + i % 2][lane / 4 + (i / 2 % 2) * 8] = __float2bfloat16_rn(value(i));
  }
  __syncwarp();
  for (uint32_t p = lane; p < unit.rows * 2; p += 32) {
    const auto* piece = reinterpret_cast<const uint4*>(&turned[p / 2][p % 2 * 8]);
    *reinterpret_cast<uint4*>(to + size_t(unit.first + p / 2) * width + p % 2 * 8) = *piece;
  }
  __syncwarp();
}

// Where a lane reads its 16-byte pieces of a stage: piece `lane % 8` of rows 4 i + lane / 8.
template <class Form>
struct Sources {
  static constexpr uint32_t kRows = Form::kRows;
  const std::byte* of[kRows / 4];
  uint32_t tile_bytes;  // from tile to tile of a row, where it has two

  __device__ Sources(const Weights& w, const Task& task, const Unit& unit, uint32_t lane) {
    const Work& work = task.work;
    tile_bytes = unit.kind == Kind::kGateUp ? w.width : w.ffn;
    const bool up = unit.kind == Kind::kGateUp, given = up && !Form::kSplits;
    const int64_t pitch = given ? work.pitch : int64_t(up ? w.width : w.ffn) * 2;
    const auto* rows = static_cast<const std::byte*>(work.rows);
    const std::byte* base = (given ? rows : up ? task.split : task.hidden) + lane % 8 * kPiece;
#pragma unroll
    for (uint32_t i = 0; i < kRows / 4; ++i) {
      const uint32_t row = 4 * i + lane / 8, slot = unit.first + row;
      of[i] = nullptr;
      if (row >= unit.rows) continue;
      const int64_t from = given && work.row_ids != nullptr ? work.row_ids[slot] : int64_t(slot);
      if (uint64_t(from) < (given ? work.held : work.most)) of[i] = base + from * pitch;
    }
  }

  // A stage of all tiles, eight rows of each in turn. Rows that are not there keep what the stage held:
  // nobody reads their sums.
  __device__ void copy(uint32_t stage, std::byte* to, uint32_t lane) const {
#pragma unroll
    for (uint32_t tile = 0; tile < Form::kTiles; ++tile) {
      const uint32_t byte = tile * tile_bytes + stage * kSwizzledRow;
#pragma unroll
      for (uint32_t i = 0; i < kRows / 4; ++i) {
        const uint32_t row = 4 * i + lane / 8, piece = (lane ^ row) % 8;
        if (of[i] != nullptr)
          copy_piece(to + (row / 8 * Form::kTiles + tile) * kEight + row % 8 * kSwizzledRow + piece * kPiece,
                     of[i] + byte);
      }
    }
  }
};

// What must be there before the rows of a unit are read.
template <class Form>
struct Needed {
  const uint32_t* count;
  uint32_t value = 0;

  // pieces: of rows that are split, 0 where all are known to be. counts: of this launch, once it has units.
  __device__ Needed(const Unit& unit, const uint32_t* counts, uint32_t pieces) {
    const bool down = unit.kind == Kind::kDown;
    count = counts + (down ? unit.expert : kPiecesDone);
    if (down) value = unit.gate_up_done * Form::kMultipliers;
    if (unit.kind == Kind::kGateUp) value = pieces;
  }

  __device__ void await() {
    for (uint32_t seen = 0; seen < value;) seen = load_acquire(count);
    value = 0;
  }
};

// Fills every kLoaders-th stage. `ahead`: stages whose weights were asked for before.
template <class Form>
__device__ void load(Shared<Form>& s, const Weights& w, const Task& task, uint32_t ahead, uint32_t loader,
                     uint32_t lane) {
  Place place;
  uint32_t turn = 0, asked = ahead, pieces = Form::pieces(w, task.work);
  for (uint32_t n = 0;; ++n) {
    const Unit unit = take(s.agenda, n, lane);
    if (lane == 0) arrive(&s.agenda.begun);
    if (unit.kind == Kind::kEnd) return;
    const Sources<Form> sources(w, task, unit, lane);
    Needed<Form> needed(unit, s.agenda.counts, pieces);
    for (uint32_t i = 0; i < unit.stages; ++i, place.next(Form::kStages)) {
      const bool mine = turn == loader, weights = asked == 0;
      turn = turn + 1 == kLoaders ? 0 : turn + 1;
      asked -= !weights;
      if (!mine) continue;
      await_phase(&s.empty[place.stage], place.parity ^ 1);
      uint64_t* full = &s.full[place.stage];
      if (weights && lane == 0) Form::copy_weights(w, unit, i, s.weights[place.stage], full);
      needed.await();
      if (unit.kind == Kind::kGateUp) pieces = 0;
      sources.copy(i, s.rows[place.stage], lane);
      Form::copy_scales(w, task, unit, i, s.room, place.stage, lane);
      arrive_when_copied(full);
    }
  }
}

template <class Form>
__global__ void __launch_bounds__(32 * (Form::kMultipliers + kLoaders + 1), Form::kResident)
    experts_kernel(const __grid_constant__ Weights w, const __grid_constant__ Task task, bool reads_ahead) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::byte raw[];
  auto& s = *reinterpret_cast<Shared<Form>*>(raw + (0u - shared_address(raw)) % kAlignment);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < Form::kStages; ++i) {
      init_barrier(&s.full[i], 1 + 32);  // weights are asked for, and each lane of a loader
      init_barrier(&s.empty[i], Form::kMultipliers);
    }
    init(s.agenda, kLoaders, Form::kMultipliers);
    publish_barriers();
  }
  __syncthreads();
  const Unit ahead = reads_ahead ? guess(w, Form::kStages) : Unit{Kind::kEnd};
  if (warp == Form::kMultipliers && lane == 0)
    for (uint32_t i = 0; i < ahead.stages; ++i) Form::copy_weights(w, ahead, i, s.weights[i], &s.full[i]);
  await_previous_kernel();
  if (warp < Form::kMultipliers)
    Form::multiply(s, w, task, warp, lane);
  else if (warp < Form::kMultipliers + kLoaders)
    load(s, w, task, ahead.stages, warp - Form::kMultipliers, lane);
  else
    hand_out<Form::kRows>(s.agenda, w, task.work, ahead, Form::kSplits ? gridDim.x : 0, lane);
#else
  __trap();  // Experts refuses other GPUs
#endif
}

template <class Form>
cudaError_t start_kernel(const Launch& launch, const Weights& weights, const Task& task) {
  constexpr size_t kBytes = sizeof(Shared<Form>) + kAlignment;
  static_assert(kBytes <= 227 << 10, "a block of Hopper has no more");
  const Grid grid{launch.blocks, 32 * (Form::kMultipliers + kLoaders + 1), kBytes};
  return hopper::launch(launch.stream, experts_kernel<Form>, grid, kBytes, weights, task,
                        launch.config.reads_ahead);
}

}  // namespace ep::experts

// Gate/up and down products of all experts, SiLU between them, as one stream of weights through the copy
// engine.
//
// A block per multiprocessor takes units, (rows of one expert) x (128 weight rows), first of all gate/up
// tiles, then of all down tiles; a down tile waits, per expert, until the gate/up tiles are done, while its
// weights are already under way. Weights are the 64-row side of the products (wgmma m64nNk16), rows the
// narrow one, sums float32. One warp hands out units, three load stages, four multiply.
#include <cuda_bf16.h>

#include "experts/units.cuh"
#include "hopper/launch.hpp"

namespace ep::experts {
namespace {

using namespace hopper;
using bf16 = __nv_bfloat16;

constexpr uint32_t kLoaders = 3, kMultipliers = kHalf / 16;  // warps; the latter are whole warpgroups
constexpr uint32_t kThreads = 32 * (kMultipliers + kLoaders + 1);
constexpr uint32_t kHalfBytes = kHalf * kSwizzledRow, kPiece = 16;  // bytes
constexpr uint32_t kGroupRows = 64;                                 // weight rows of a half, of a warpgroup
constexpr uint32_t kAlignment = 8 * kSwizzledRow,
                   kBudget = 219 << 10;  // bytes of shared memory, the latter all but the agenda

template <uint32_t kRows>
struct Shared {
  static constexpr uint32_t kStages =
      (kBudget - kMultipliers * kRows * 32) / (2 * kHalfBytes + kRows * kSwizzledRow);
  std::byte weights[kStages][2][kHalfBytes];
  std::byte rows[kStages][kRows * kSwizzledRow];
  alignas(16) bf16 turned[kMultipliers][kRows][16];  // 16 channels of a warp, by row
  uint64_t full[kStages], empty[kStages];
  Agenda agenda;
};

__device__ uint32_t load_acquire(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ void add_release(uint32_t* at) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}

__device__ void copy_weights(const Weights& w, const Unit& unit, uint32_t depth,
                             std::byte (&to)[2][kHalfBytes], uint64_t* full) {
  const bool up = unit.kind == Kind::kGateUp;
  const CUtensorMap* map = up ? &w.gate_up : &w.down;
  const uint32_t row =
      up ? unit.expert * 2 * w.ffn + unit.tile * kHalf : unit.expert * w.width + unit.tile * 2 * kHalf;
  arrive_and_expect(full, 2 * kHalfBytes);
  copy_box(to[0], map, depth, row, full);
  copy_box(to[1], map, depth, up ? row + w.ffn : row + kHalf, full);
}

// Where a lane reads its 16-byte pieces of a stage: piece `lane % 8` of rows 4 i + lane / 8.
template <uint32_t kRows>
struct Sources {
  const std::byte* of[kRows / 4];

  __device__ Sources(const Weights& w, const Work& work, const Unit& unit, uint32_t lane) {
    const bool up = unit.kind == Kind::kGateUp;
    const auto* base = static_cast<const std::byte*>(up ? work.rows : work.hidden) + lane % 8 * kPiece;
#pragma unroll
    for (uint32_t i = 0; i < kRows / 4; ++i) {
      const uint32_t row = 4 * i + lane / 8, slot = unit.first + row;
      of[i] = nullptr;
      if (row >= unit.rows) continue;
      const int64_t from = up && work.row_ids != nullptr ? work.row_ids[slot] : int64_t(slot);
      if (uint64_t(from) < (up ? work.held : work.most))
        of[i] = base + from * (up ? work.pitch : int64_t(w.ffn) * 2);
    }
  }

  // Rows that are not there keep what the stage held: nobody reads their sums.
  __device__ void copy(uint32_t depth, std::byte* to, uint32_t lane) const {
#pragma unroll
    for (uint32_t i = 0; i < kRows / 4; ++i) {
      const uint32_t row = 4 * i + lane / 8, piece = (lane ^ row) % 8;
      if (of[i] != nullptr) copy_piece(to + row * kSwizzledRow + piece * kPiece, of[i] + depth * 2);
    }
  }
};

// Fills every kLoaders-th stage. `ahead`: stages whose weights were asked for before.
template <uint32_t kRows>
__device__ void load(Shared<kRows>& s, const Weights& w, const Work& work, uint32_t ahead, uint32_t loader,
                     uint32_t lane) {
  Place place;
  uint32_t turn = 0, asked = ahead;
  for (uint32_t n = 0;; ++n) {
    const Unit unit = take(s.agenda, n, lane);
    if (lane == 0) arrive(&s.agenda.begun);
    if (unit.kind == Kind::kEnd) return;
    const Sources<kRows> sources(w, work, unit, lane);
    bool ready = unit.kind != Kind::kDown;
    for (uint32_t i = 0; i < unit.stages; ++i, place.next(Shared<kRows>::kStages)) {
      const bool mine = turn == loader, weights = asked == 0;
      turn = turn + 1 == kLoaders ? 0 : turn + 1;
      asked -= !weights;
      if (!mine) continue;
      await_phase(&s.empty[place.stage], place.parity ^ 1);
      uint64_t* full = &s.full[place.stage];
      if (weights && lane == 0) copy_weights(w, unit, i * kDepth, s.weights[place.stage], full);
      for (; !ready; ready = load_acquire(s.agenda.done + unit.expert) >= unit.gate_up_done * kMultipliers) {
      }
      sources.copy(i * kDepth, s.rows[place.stage], lane);
      arrive_when_copied(full);
    }
  }
}

// 16 channels of a warp for all rows of the unit, to global memory; value(i): of the lane's i-th sum.
template <uint32_t kRows, class Value>
__device__ void store(bf16 (&turned)[kRows][16], const Unit& unit, bf16* to, uint32_t width, uint32_t lane,
                      Value value) {
#pragma unroll
  for (uint32_t i = 0; i < kRows / 2; ++i)
    turned[i / 4 * 8 + lane % 4 * 2 + i % 2][lane / 4 + (i / 2 % 2) * 8] = __float2bfloat16_rn(value(i));
  __syncwarp();
  for (uint32_t p = lane; p < unit.rows * 2; p += 32) {
    const auto* piece = reinterpret_cast<const uint4*>(&turned[p / 2][p % 2 * 8]);
    *reinterpret_cast<uint4*>(to + size_t(unit.first + p / 2) * width + p % 2 * 8) = *piece;
  }
  __syncwarp();
}

template <uint32_t kRows>
__device__ void multiply(Shared<kRows>& s, const Weights& w, const Work& work, uint32_t warp, uint32_t lane) {
  Place place;
  const uint32_t own = warp / 4 * kGroupRows;  // weight rows of a half that come before the warpgroup's
  const uint32_t channel = own + warp % 4 * 16;
  float first[kRows / 2], second[kRows / 2];
  for (uint32_t n = 0;; ++n) {
    const Unit unit = take(s.agenda, n, lane);
    if (unit.kind == Kind::kEnd) return;
    const bool up = unit.kind == Kind::kGateUp;
    uint32_t before = 0;
    for (uint32_t i = 0; i < unit.stages; ++i, place.next(Shared<kRows>::kStages)) {
      await_phase(&s.full[place.stage], place.parity);
      publish_to_async();
      const uint64_t a = operand(shared_address(s.weights[place.stage][0]) + own * kSwizzledRow);
      const uint64_t b = operand(shared_address(s.weights[place.stage][1]) + own * kSwizzledRow);
      const uint64_t x = operand(shared_address(s.rows[place.stage]));
      begin_products();
#pragma unroll
      for (uint32_t k = 0; k < kDepth / 16; ++k) {  // 32 bytes further
        Product<kRows>::run(first, a + 2 * k, x + 2 * k, i + k != 0);
        Product<kRows>::run(second, b + 2 * k, x + 2 * k, i + k != 0);
      }
      commit_products();
      await_products<1>();
      if (i != 0 && lane == 0) arrive(&s.empty[before]);
      before = place.stage;
    }
    await_products<0>();
    if (lane == 0) arrive(&s.empty[before]);
    if (unit.kind == Kind::kDropped) continue;
    if (up) {
      auto* to = static_cast<bf16*>(work.hidden) + unit.tile * kHalf + channel;
      store<kRows>(s.turned[warp], unit, to, w.ffn, lane,
                   [&](uint32_t i) { return second[i] * __fdividef(first[i], 1.f + __expf(-first[i])); });
      if (lane == 0) add_release(s.agenda.done + unit.expert);
    } else {
      auto* to = static_cast<bf16*>(work.out) + unit.tile * 2 * kHalf + channel;
      store<kRows>(s.turned[warp], unit, to, w.width, lane, [&](uint32_t i) { return first[i]; });
      store<kRows>(s.turned[warp], unit, to + kHalf, w.width, lane, [&](uint32_t i) { return second[i]; });
    }
  }
}

template <uint32_t kRows>
__global__ void __launch_bounds__(kThreads, kRows > 64 ? 1 : 2)
    experts_kernel(const __grid_constant__ Weights w, const __grid_constant__ Work work, bool reads_ahead) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::byte raw[];
  auto& s = *reinterpret_cast<Shared<kRows>*>(raw + (0u - shared_address(raw)) % kAlignment);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < Shared<kRows>::kStages; ++i) {
      init_barrier(&s.full[i], 1 + 32);  // weights are asked for, and each lane of a loader
      init_barrier(&s.empty[i], kMultipliers);
    }
    init(s.agenda, kLoaders, kMultipliers);
    publish_barriers();
  }
  __syncthreads();
  const Unit ahead = reads_ahead ? guess(w, Shared<kRows>::kStages) : Unit{Kind::kEnd};
  if (warp == kMultipliers && lane == 0)
    for (uint32_t i = 0; i < ahead.stages; ++i) copy_weights(w, ahead, i * kDepth, s.weights[i], &s.full[i]);
  await_previous_kernel();
  if (warp < kMultipliers)
    multiply<kRows>(s, w, work, warp, lane);
  else if (warp < kMultipliers + kLoaders)
    load<kRows>(s, w, work, ahead.stages, warp - kMultipliers, lane);
  else
    hand_out<kRows>(s.agenda, w, work, ahead, lane);
#else
  __trap();  // Experts refuses other GPUs
#endif
}

template <uint32_t kRows>
cudaError_t start(cudaStream_t stream, uint32_t blocks, bool reads_ahead, const Weights& weights,
                  const Work& work) {
  constexpr size_t kBytes = sizeof(Shared<kRows>) + kAlignment;
  static_assert(kBytes <= 227 << 10, "a block of Hopper has no more");
  const Grid grid{blocks, kThreads, kBytes};
  return launch(stream, experts_kernel<kRows>, grid, kBytes, weights, work, reads_ahead);
}

}  // namespace

cudaError_t start(cudaStream_t stream, uint32_t blocks, const LaunchConfig& config, const Weights& weights,
                  const Work& work) {
  const auto with = [&](auto kernel) { return kernel(stream, blocks, config.reads_ahead, weights, work); };
  if (config.rows_of_tile == 32) return with(start<32>);
  if (config.rows_of_tile == 48) return with(start<48>);
  if (config.rows_of_tile == 64) return with(start<64>);
  if (config.rows_of_tile == 96) return with(start<96>);
  return with(start<128>);
}

}  // namespace ep::experts

// The kernel policy for bfloat16 weights: bf16_few_rows.cu for few rows per expert, bf16_many_rows.cu for
// many.
#pragma once

#include "kernels/hopper/common/products.cuh"
#include "kernels/hopper/experts/experts_kernel.cuh"

namespace ep::experts {

// Each warpgroup has both halves of 128 weight rows; the warpgroups share the other operand. With two of
// them, only kTurned rows of sums are transposed at a time, which leaves room for the ring.
template <uint32_t kRowsOfTile, uint32_t kWarpgroups>
struct Bfloat16 {
  static constexpr uint32_t kRows = kRowsOfTile, kTiles = 1, kMultipliers = 4 * kWarpgroups;
  static constexpr uint32_t kWeightRows = kWarpgroups * 2 * kHalf, kResident = kRows > 64 ? 1 : 2;
  static constexpr bool kSplits = false, kShares = kRows > 160;  // its sums take too many registers
  static constexpr uint32_t kLoadersRegisters = kShares ? 56 : 88;
  static constexpr uint32_t kRegisters = kWarpgroups == 1 ? 0 : kShares ? 224 : 208;
  static constexpr uint32_t kTurned = kWarpgroups == 1 ? kRows : 32;
  static constexpr uint32_t kStages =
      stages_beside(kMultipliers * kTurned * 32, (kWeightRows + kRows) * kSwizzledRow);

  static constexpr uint32_t kHalfBytes = kHalf * kSwizzledRow, kWeightBytes = kWarpgroups * 2 * kHalfBytes;

  struct Room {
    alignas(16) bf16 turned[kMultipliers][kTurned][16];  // a warp's 16 channels, by row
  };

  // A thread's sums of a unit, for each half of the weight rows.
  struct Sums {
    float first[kRows / 2], second[kRows / 2];
  };

  static __device__ uint32_t pieces(const Weights&, const Work&) { return 0; }

  static __device__ void copy_weights(const Weights& w, const Unit& unit, uint32_t stage,
                                      std::byte (&to)[kWeightBytes], uint64_t* full) {
    const bool up = unit.kind == Kind::kGateUp;
    const CUtensorMap* map = up ? &w.gate_up : &w.down;
    const uint32_t tile = unit.tile * (up ? kWeightRows / 2 : kWeightRows);
    const uint32_t row = unit.expert * (up ? 2 * w.ffn : w.width) + tile, second = up ? w.ffn : kHalf;
    arrive_and_expect(full, kWeightBytes);
#pragma unroll
    for (uint32_t group = 0; group < kWarpgroups; ++group) {
      const uint32_t first = row + group * (up ? kHalf : 2 * kHalf);
      copy_half(to + 2 * group * kHalfBytes, map, stage * kDepth, first, full);
      copy_half(to + (2 * group + 1) * kHalfBytes, map, stage * kDepth, first + second, full);
    }
  }

  // With so many rows, other blocks read the same weights soon.
  static __device__ void copy_half(std::byte* to, const CUtensorMap* map, uint32_t column, uint32_t row,
                                   uint64_t* full) {
    if constexpr (kShares)
      copy_reused_box(to, map, column, row, full);
    else
      copy_box(to, map, column, row, full);
  }

  static __device__ void copy_scales(const Weights&, const Task&, const Unit&, uint32_t, Room&, uint32_t,
                                     uint32_t) {}

  // kN: rows of a product, at least as many as the unit has.
  template <uint32_t kN>
  static __device__ void sum(Shared<Bfloat16>& s, const Unit& unit, Place& place, Sums& sums, uint32_t group,
                             uint32_t lane) {
    if constexpr (kN < kRows)
      if (unit.rows > kN) return sum<kN + (kN < 64 || kN >= 96 ? 16 : 32)>(s, unit, place, sums, group, lane);
    uint32_t before = 0;
    for (uint32_t i = 0; i < unit.stages; ++i, place.next(kStages)) {
      await_phase(&s.full[place.stage], place.parity);
      publish_to_async();
      const std::byte* own = s.weights[place.stage] + 2 * group * kHalfBytes;
      const uint64_t a = operand(shared_address(own)), b = operand(shared_address(own + kHalfBytes));
      const uint64_t x = operand(shared_address(s.rows[place.stage]));
      begin_products();
#pragma unroll
      for (uint32_t k = 0; k < kDepth / 16; ++k) {  // 32 bytes further
        Product<kN>::run(sums.first, a + 2 * k, x + 2 * k, i + k != 0);
        Product<kN>::run(sums.second, b + 2 * k, x + 2 * k, i + k != 0);
      }
      commit_products();
      await_products<1>();
      if (i != 0 && lane == 0) arrive(&s.empty[before]);
      before = place.stage;
    }
    await_products<0>();
    if (lane == 0) arrive(&s.empty[before]);
  }

  static __device__ void multiply(Shared<Bfloat16>& s, const Weights& w, const Task& task, uint32_t warp,
                                  uint32_t lane) {
    const uint32_t group = warp / 4, channel = warp % 4 * 16;
    Place place;
    Sums sums;
    const auto &first = sums.first, &second = sums.second;
    for (uint32_t n = 0;; ++n) {
      const Unit unit = take(s.agenda, n, lane);
      if (unit.kind == Kind::kEnd) return;
      sum<32>(s, unit, place, sums, group, lane);
      if (unit.kind == Kind::kDropped) continue;
      auto& turned = s.room.turned[warp];
      if (unit.kind == Kind::kGateUp) {
        auto* to =
            reinterpret_cast<bf16*>(task.hidden) + unit.tile * (kWeightRows / 2) + group * kHalf + channel;
        store<kRows>(turned, unit, to, w.ffn, lane,
                     [&](uint32_t i) { return second[i] * __fdividef(first[i], 1.f + __expf(-first[i])); });
        if (lane == 0) add_release(s.agenda.counts + unit.expert);
      } else {
        auto* to = static_cast<bf16*>(task.work.out) + unit.tile * kWeightRows + group * 2 * kHalf + channel;
        store<kRows>(turned, unit, to, w.width, lane, [&](uint32_t i) { return first[i]; });
        store<kRows>(turned, unit, to + kHalf, w.width, lane, [&](uint32_t i) { return second[i]; });
      }
    }
  }
};

}  // namespace ep::experts

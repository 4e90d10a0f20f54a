// The experts' kernel for weights in bfloat16.
#include "experts/kernel.cuh"
#include "hopper/products.cuh"

namespace ep::experts {
namespace {

// One warpgroup has both halves of the weight rows.
template <uint32_t kRowsOfTile>
struct Bfloat16 {
  static constexpr uint32_t kRows = kRowsOfTile, kTiles = 1, kMultipliers = 4, kResident = kRows > 64 ? 1 : 2;
  static constexpr bool kSplits = false;
  static constexpr uint32_t kStages = stages_beside(kMultipliers * kRows * 32, kRows* kSwizzledRow, 0);

  struct Room {
    alignas(16) bf16 turned[kMultipliers][kRows][16];  // 16 channels of a warp, by row
  };

  // The sums of a unit: of a thread, for each half of the weight rows.
  struct Sums {
    float first[kRows / 2], second[kRows / 2];
  };

  static __device__ uint32_t pieces(const Weights&, const Work&) { return 0; }

  static __device__ void copy_weights(const Weights& w, const Unit& unit, uint32_t stage,
                                      std::byte (&to)[kWeightBytes], uint64_t* full) {
    const bool up = unit.kind == Kind::kGateUp;
    const CUtensorMap* map = up ? &w.gate_up : &w.down;
    const uint32_t row =
        up ? unit.expert * 2 * w.ffn + unit.tile * kHalf : unit.expert * w.width + unit.tile * 2 * kHalf;
    arrive_and_expect(full, kWeightBytes);
    copy_box(to, map, stage * kDepth, row, full);
    copy_box(to + kWeightBytes / 2, map, stage * kDepth, up ? row + w.ffn : row + kHalf, full);
  }

  static __device__ void copy_scales(const Weights&, const Task&, const Unit&, uint32_t, Room&, uint32_t,
                                     uint32_t) {}

  static __device__ void sum(Shared<Bfloat16>& s, const Unit& unit, Place& place, Sums& sums, uint32_t lane) {
    uint32_t before = 0;
    for (uint32_t i = 0; i < unit.stages; ++i, place.next(kStages)) {
      await_phase(&s.full[place.stage], place.parity);
      publish_to_async();
      const uint64_t a = operand(shared_address(s.weights[place.stage]));
      const uint64_t b = operand(shared_address(s.weights[place.stage] + kWeightBytes / 2));
      const uint64_t x = operand(shared_address(s.rows[place.stage]));
      begin_products();
#pragma unroll
      for (uint32_t k = 0; k < kDepth / 16; ++k) {  // 32 bytes further
        Product<kRows>::run(sums.first, a + 2 * k, x + 2 * k, i + k != 0);
        Product<kRows>::run(sums.second, b + 2 * k, x + 2 * k, i + k != 0);
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
    Place place;
    Sums sums;
    const auto &first = sums.first, &second = sums.second;
    for (uint32_t n = 0;; ++n) {
      const Unit unit = take(s.agenda, n, lane);
      if (unit.kind == Kind::kEnd) return;
      sum(s, unit, place, sums, lane);
      if (unit.kind == Kind::kDropped) continue;
      auto& turned = s.room.turned[warp];
      if (unit.kind == Kind::kGateUp) {
        auto* to = reinterpret_cast<bf16*>(task.hidden) + unit.tile * kHalf + warp * 16;
        store<kRows>(turned, unit, to, w.ffn, lane,
                     [&](uint32_t i) { return second[i] * __fdividef(first[i], 1.f + __expf(-first[i])); });
        if (lane == 0) add_release(s.agenda.counts + unit.expert);
      } else {
        auto* to = static_cast<bf16*>(task.work.out) + unit.tile * 2 * kHalf + warp * 16;
        store<kRows>(turned, unit, to, w.width, lane, [&](uint32_t i) { return first[i]; });
        store<kRows>(turned, unit, to + kHalf, w.width, lane, [&](uint32_t i) { return second[i]; });
      }
    }
  }
};

}  // namespace

cudaError_t start(const Launch& launch, const Weights& weights, const Task& task) {
  switch (launch.config.rows_of_tile) {
    case 32:
      return start_kernel<Bfloat16<32>>(launch, weights, task);
    case 48:
      return start_kernel<Bfloat16<48>>(launch, weights, task);
    case 64:
      return start_kernel<Bfloat16<64>>(launch, weights, task);
    case 96:
      return start_kernel<Bfloat16<96>>(launch, weights, task);
    default:
      return start_kernel<Bfloat16<128>>(launch, weights, task);
  }
}

}  // namespace ep::experts

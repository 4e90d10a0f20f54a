// Attention of prompt chunks. One block per multiprocessor walks through tiles of 128 (token, query head)
// rows. A warp of its own requests queries, then tiles of keys and values from the last position to the
// first; two warpgroups multiply 64 rows each. A warpgroup begins the scores of a tile and the sums of the
// one before, lets the other warpgroup begin its own, and computes the softmax of the scores meanwhile.
//
// Values behind the last position may be NaN and their weights are 0, so both warpgroups clear them in shared
// memory first. Keys there only make scores that are left out.
#include <algorithm>

#include "kernels/hopper/common/launch.hpp"
#include "kernels/hopper/prefill/softmax.cuh"

namespace ep::prefill {
namespace {

constexpr uint32_t kThreads = (1 + kWarpgroups) * 128, kWarps = kWarpgroups * 4;
constexpr uint32_t kLoaderRegisters = 24, kRegisters = 240;

// Copies a box to shared memory; other blocks read it too.
__device__ inline void copy_shared_box(void* to, const CUtensorMap* map, const uint32_t (&at)[4],
                                       uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
      "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(shared_address(barrier))
      : "memory");
}

// Requests the tiles of one operand. Each lane has one half of the channels of a piece, or of several.
struct Loader {
  const Params& p;
  const Item& item;
  uint32_t lane;

  __device__ uint32_t pieces(uint32_t tile) const {
    const uint32_t positions = min(item.last - tile * kPositions, kPositions);
    return (positions + (1u << p.piece_shift) - 1) >> p.piece_shift;
  }

  __device__ void copy(std::byte* to, const CUtensorMap* map, uint32_t tile, uint64_t* full) const {
    const uint32_t count = pieces(tile), bytes = kSwizzledRow << p.piece_shift;
    if (lane == 0) arrive_and_expect(full, count * 2 * bytes);
    __syncwarp();
    const int32_t* table = p.work.blocks + uint64_t(item.sequence) * p.work.blocks_pitch;
    for (uint32_t i = lane; i < 2 * count; i += 32) {
      const uint32_t piece = i / 2, half = i % 2;
      const uint32_t first = tile * kPositions + (piece << p.piece_shift);
      const uint32_t block = table[first >> p.block_shift];
      const uint32_t place = (block << p.block_shift) + (first & ((1u << p.block_shift) - 1));
      copy_shared_box(to + half * kHalfBytes + piece * bytes, map, {0, place, half, item.head}, full);
    }
  }
};

__device__ inline void load(const Params& p, Shared& s, uint32_t lane) {
  const Agenda agenda(p, lane);
  Place q, k, v;
  Item item;
  for (uint32_t n = 0; agenda.item(n, item); ++n, q.next(kStages)) {
    const Loader loader{p, item, lane};
    const uint32_t rows = p.group * p.tile_tokens;
    await_phase(&s.of_q.empty[q.stage], q.parity ^ 1);
    if (lane == 0) {
      arrive_and_expect(&s.of_q.full[q.stage], 2 * rows * kSwizzledRow);
      for (uint32_t half = 0; half < 2; ++half)
        copy_shared_box(s.q[q.stage] + half * kHalfBytes, &p.q, {0, item.head * p.group, half, item.row},
                        &s.of_q.full[q.stage]);
    }
    for (uint32_t left = item.tiles + 1; left-- > 0;) {  // keys are one tile ahead of values
      if (left != 0) {
        await_phase(&s.of_k.empty[k.stage], k.parity ^ 1);
        loader.copy(s.k[k.stage], &p.k, left - 1, &s.of_k.full[k.stage]);
        k.next(kStages);
      }
      if (left != item.tiles) {
        await_phase(&s.of_v.empty[v.stage], v.parity ^ 1);
        loader.copy(s.v[v.stage], &p.v, left, &s.of_v.full[v.stage]);
        v.next(kStages);
      }
    }
  }
}

// Lets one warpgroup at a time begin products.
class Turn {
 public:
  __device__ explicit Turn(uint32_t group) : own_(1 + group), other_(2 - group) {
    if (group == 1) pass();
  }
  __device__ void await() const { asm volatile("bar.sync %0, 256;" ::"r"(own_) : "memory"); }
  __device__ void pass() const { asm volatile("bar.arrive %0, 256;" ::"r"(other_) : "memory"); }

 private:
  uint32_t own_, other_;
};

class Multiplier {
 public:
  __device__ Multiplier(const Params& p, Shared& s, uint32_t group)
      : p_(p), s_(s), group_(group), lane_(threadIdx.x % 32), thread_(threadIdx.x % 128) {}

  __device__ void run() {
    const Agenda agenda(p_, lane_);
    const Turn turn(group_);
    for (uint32_t n = 0; agenda.item(n, item_); ++n, q_.next(kStages)) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) position_[h] = int32_t(item_.position + row(h) / p_.group);
      soft_.begin();
      await_phase(&s_.of_q.full[q_.stage], q_.parity);
      begin_scores();
      await_scores<0>(item_.tiles - 1);
      soft_.step(p_.scale);
      soft_.round_weights();
      for (uint32_t tile = item_.tiles - 1; tile-- > 0;) {
        turn.await();
        begin_scores();
        begin_sums(tile + 1);
        turn.pass();
        await_scores<1>(tile);
        soft_.step(p_.scale);
        await_sums();
        soft_.fade_sums();
        soft_.round_weights();
      }
      if (lane_ == 0) arrive(&s_.of_q.empty[q_.stage]);
      begin_sums(0);
      await_sums();
      write();
    }
  }

 private:
  // The row of the tile that holds the thread's row h.
  __device__ uint32_t row(uint32_t h) const { return group_ * 64 + thread_ / 32 * 16 + lane_ / 4 + h * 8; }

  __device__ void begin_scores() {
    await_phase(&s_.of_k.full[k_.stage], k_.parity);
    const uint64_t q = operand(shared_address(s_.q[q_.stage]) + group_ * kGroupBytes);
    const uint64_t k = operand(shared_address(s_.k[k_.stage]));
    pin(soft_.scores);
    begin_products();
#pragma unroll
    for (uint32_t i = 0; i < kDim / 16; ++i) {
      const uint32_t beyond = (i / 4 * kHalfBytes + i % 4 * 32) >> 4;
      Product<int(kPositions)>::run(soft_.scores, q + beyond, k + beyond, i != 0);
    }
    commit_products();
  }

  template <int kPending>
  __device__ void await_scores(uint32_t tile) {
    await_products<kPending>();
    pin(soft_.scores);
    if (lane_ == 0) arrive(&s_.of_k.empty[k_.stage]);
    k_.next(kStages);
    const int32_t first = int32_t(tile * kPositions);
    if (first + int32_t(kPositions) > int32_t(item_.position) + 1)
      soft_.mask({position_[0] + 1 - first, position_[1] + 1 - first}, lane_);
  }

  __device__ void begin_sums(uint32_t tile) {
    await_phase(&s_.of_v.full[v_.stage], v_.parity);
    if (tile + 1 == item_.tiles && item_.last % kPositions != 0) clear(item_.last % kPositions);
    const uint64_t v = values_operand(shared_address(s_.v[v_.stage]));
    pin(soft_.sums), pin(soft_.weights);
    begin_products();
#pragma unroll
    for (uint32_t i = 0; i < kPositions / 16; ++i)
      add_values(soft_.sums, soft_.weights + 4 * i, v + i * (16 * kSwizzledRow >> 4));
    commit_products();
  }

  __device__ void await_sums() {
    await_products<0>();
    pin(soft_.sums), pin(soft_.weights);
    if (lane_ == 0) arrive(&s_.of_v.empty[v_.stage]);
    v_.next(kStages);
  }

  // Clears the values from a position on. The other warpgroup writes the same zeros.
  __device__ void clear(uint32_t from) {
    const uint4 zeros{};
    for (uint32_t piece = from * 8 + thread_; piece < kPositions * 8; piece += 128)
      for (uint32_t half = 0; half < 2; ++half)
        *reinterpret_cast<uint4*>(s_.v[v_.stage] + half * kHalfBytes + piece * 16) = zeros;
    publish_to_async();
    asm volatile("bar.sync %0, 128;" ::"r"(3 + group_) : "memory");
  }

  __device__ void write() {
    const uint32_t heads = p_.kv_heads * p_.group;
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      float total = soft_.total[h];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const float inverse = total == 0 ? 0.0f : 1.0f / total;
      const uint32_t token = row(h) / p_.group, member = row(h) % p_.group;
      if (token >= min(item_.tokens, p_.tile_tokens)) continue;
      const uint64_t at = (uint64_t(item_.row + token) * heads + item_.head * p_.group + member) * kDim;
      auto* out = static_cast<__nv_bfloat16*>(p_.work.out) + at + lane_ % 4 * 2;
#pragma unroll
      for (uint32_t j = 0; j < kDim / 8; ++j)
        *reinterpret_cast<__nv_bfloat162*>(out + j * 8) = __floats2bfloat162_rn(
            soft_.sums[4 * j + 2 * h] * inverse, soft_.sums[4 * j + 2 * h + 1] * inverse);
    }
  }

  const Params& p_;
  Shared& s_;
  const uint32_t group_, lane_, thread_;
  Place q_, k_, v_;
  Item item_;
  int32_t position_[2];
  Softmax soft_;
};

__global__ void __launch_bounds__(kThreads, 1) prefill_kernel(const __grid_constant__ Params p) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte memory[];  // the swizzle pattern starts at these multiples
  auto& s = *reinterpret_cast<Shared*>(memory);
  const uint32_t warp = warp_number();
  if (threadIdx.x == 0) {
    fetch_map(&p.q), fetch_map(&p.k), fetch_map(&p.v);
    for (Ring* ring : {&s.of_q, &s.of_k, &s.of_v}) {
      for (uint32_t i = 0; i < kStages; ++i) {
        init_barrier(&ring->full[i], 1);
        init_barrier(&ring->empty[i], kWarps);
      }
    }
    publish_barriers();
  }
  __syncthreads();
  await_previous_kernel();
  let_next_kernel_start();  // the next kernel must wait until this one ends before it reads `out`
  if (warp < 4) {
    leave_registers<kLoaderRegisters>();
    if (warp == 0) load(p, s, threadIdx.x % 32);
  } else {
    take_registers<kRegisters>();
    Multiplier(p, s, warp / 4 - 1).run();
  }
#else
  __trap();  // Prefill rejects other GPUs
#endif
}

}  // namespace

cudaError_t start(cudaStream_t stream, uint32_t blocks, const Params& params) {
  static_assert(sizeof(Shared) <= 227 << 10, "a block of Hopper has no more");
  return hopper::launch(stream, prefill_kernel, {blocks, kThreads, sizeof(Shared)}, sizeof(Shared), params);
}

}  // namespace ep::prefill

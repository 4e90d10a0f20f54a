// Attention of prompt chunks. One block per multiprocessor processes one tile of 128 (token, query head) rows
// after another, as one of its warps takes them. Two warps request queries, and tiles of keys and values from
// the last position to the first; two warpgroups multiply 64 rows each. A warpgroup begins the scores of a
// tile and the sums of the one before, lets the other warpgroup begin its own, and computes the softmax of
// the scores meanwhile.
//
// Blocks that process parts of a context leave maxima, totals and sums in scratch memory, see join.cuh.
//
// Values behind the last position may be NaN and their weights are 0, so both warpgroups clear them in shared
// memory first. Keys there only make scores that are left out.
#include "kernels/hopper/common/launch.hpp"
#include "kernels/hopper/prefill/join.cuh"

namespace ep::prefill {
namespace {

constexpr uint32_t kThreads = (1 + kWarpgroups) * 128, kWarps = kWarpgroups * 4, kLoaders = 2;
constexpr uint32_t kLoaderRegisters = 24, kRegisters = 240;
// Otherwise the multiplying warps would wait for ever.
static_assert(128 * (kLoaderRegisters + kWarpgroups * kRegisters) <=
                  kThreads * ((64 << 10) / kThreads / 8 * 8),
              "warpgroups take more registers than a block begins with");

// Requests an item's tiles of keys or of values. Each lane has 64 of the channels of one piece.
template <Form F, uint32_t kSlices>
class Loader {
 public:
  __device__ Loader(const Params& p, const CUtensorMap* map, const Item& item, uint32_t lane)
      : p_(p), map_(map), item_(item), piece_(lane / kSlices), slice_(lane % kSlices) {
    static_assert(kPositions / (kSlices == 2 ? kLeastBlock : kLeastLatentBlock) * kSlices <= 32);
    block_ = block_of(item.tiles - 1);
  }

  // All tiles of the part, from its last one on.
  __device__ void load(std::byte (&to)[F::kStages][kSlices * kSliceBytes], Ring<F>& ring, Place& place) {
    const uint32_t bytes = kSwizzledRow << p_.piece_shift;  // of 64 channels of a piece
    for (uint32_t tile = item_.tiles; tile-- > item_.first; place.next(F::kStages)) {
      const uint32_t block = block_, first = first_of(tile);
      if (tile != item_.first) block_ = block_of(tile - 1);  // arrives while this tile is awaited
      await_phase(&ring.empty[place.stage], place.parity ^ 1);
      uint64_t* full = &ring.full[place.stage];
      const uint32_t positions = min(item_.last - tile * kPositions, kPositions);
      const uint32_t count = (positions + (1u << p_.piece_shift) - 1) >> p_.piece_shift;
      if (piece_ + slice_ == 0) arrive_and_expect(full, count * kSlices * bytes);
      __syncwarp();
      if (piece_ >= count) continue;
      const uint32_t at = (block << p_.block_shift) + (first & ((1u << p_.block_shift) - 1));
      std::byte* shared = to[place.stage] + slice_ * kSliceBytes + piece_ * bytes;
      if (kSlices > 2 && slice_ == 2)
        copy_reused_box(shared, &p_.rotary, {0, at, 0, 0}, full);
      else
        copy_reused_box(shared, map_, {0, at, slice_, item_.head}, full);
    }
  }

 private:
  __device__ uint32_t first_of(uint32_t tile) const { return tile * kPositions + (piece_ << p_.piece_shift); }

  __device__ uint32_t block_of(uint32_t tile) const {
    const uint32_t first = first_of(tile);
    const int32_t* table = p_.work.blocks + uint64_t(item_.sequence) * p_.work.blocks_pitch;
    return first < item_.last ? table[first >> p_.block_shift] : 0;
  }

  const Params& p_;
  const CUtensorMap* map_;
  const Item& item_;
  const uint32_t piece_, slice_;
  uint32_t block_;
};

template <Form F>
__device__ inline void load_queries_and_keys(const Params& p, Shared<F>& s, uint32_t lane) {
  Reader reader(s.board, lane);
  Place place;
  Item item;
  for (uint32_t n = 0; reader.next(item); ++n) {
    Loader<F, F::kSlices> loader(p, &p.k, item, lane);
    await_phase(&s.q_empty, ~n & 1);
    if (lane == 0) {
      arrive_and_expect(&s.q_full, F::kSlices * p.group * p.tile_tokens * kSwizzledRow);
      for (uint32_t slice = 0; slice < F::kSlices; ++slice)
        copy_reused_box(s.q + slice * kSliceBytes, &p.q, {0, item.head * p.group, slice, item.row},
                        &s.q_full);
    }
    loader.load(s.k, s.of_k, place);
  }
}

template <Form F>
__device__ inline void load_values(const Params& p, Shared<F>& s, uint32_t lane) {
  Reader reader(s.board, lane);
  Place place;
  Item item;
  while (reader.next(item)) Loader<F, 2>(p, &p.v, item, lane).load(s.v, s.of_v, place);
}

// Lets one warpgroup at a time begin products.
class Turn {
 public:
  __device__ explicit Turn(uint32_t group) : own_(1 + group), other_(2 - group) {
    if (group == 1) pass();
  }
  __device__ void await() const { meet_at(own_, 256); }
  __device__ void pass() const { pass_by(other_, 256); }

 private:
  uint32_t own_, other_;
};

template <Form F>
class Multiplier {
 public:
  __device__ Multiplier(const Params& p, Shared<F>& s, uint32_t group)
      : p_(p), s_(s), group_(group), lane_(threadIdx.x % 32), thread_(threadIdx.x % 128) {}

  __device__ void run() {
    Reader reader(s_.board, lane_);
    const Turn turn(group_);
    for (uint32_t n = 0; reader.next(item_); ++n) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h)
        position_[h] = int32_t(item_.position + row_in_tile(group_, thread_, h) / p_.group);
      scale_ = scale_of(p_, item_);
      soft_.begin();
      await_phase(&s_.q_full, n & 1);
      begin_scores();
      await_scores<0>(item_.tiles - 1);
      soft_.step(scale_);
      soft_.round_weights();
      for (uint32_t tile = item_.tiles - 1; tile-- > item_.first;) {
        turn.await();
        begin_scores();
        begin_sums(tile + 1);
        turn.pass();
        await_scores<1>(tile);
        soft_.step(scale_);
        await_sums();
        soft_.fade_sums();
        soft_.round_weights();
      }
      begin_sums(item_.first);
      await_sums();
      if (item_.parts == 1)
        write();
      else
        leave_part();
    }
    if (item_.parts > 1) join_tiles(p_, group_, thread_);
  }

 private:
  __device__ void begin_scores() {
    await_phase(&s_.of_k.full[k_.stage], k_.parity);
    const uint64_t q = operand(shared_address(s_.q) + group_ * kGroupBytes);
    const uint64_t k = operand(shared_address(s_.k[k_.stage]));
    pin(soft_.scores);
    begin_products();
#pragma unroll
    for (uint32_t i = 0; i < F::kSlices * 4; ++i) {
      const uint32_t beyond = (i / 4 * kSliceBytes + i % 4 * 32) >> 4;
      Product<int(kPositions)>::run(soft_.scores, q + beyond, k + beyond, i != 0);
    }
    commit_products();
  }

  template <int kPending>
  __device__ void await_scores(uint32_t tile) {
    await_products<kPending>();
    pin(soft_.scores);
    if (lane_ == 0) arrive(&s_.of_k.empty[k_.stage]);
    if (lane_ == 0 && tile == item_.first) arrive(&s_.q_empty);
    k_.next(F::kStages);
    const int32_t first = int32_t(tile * kPositions);
    if (first + int32_t(kPositions) > int32_t(item_.position) + 1)
      soft_.mask({position_[0] + 1 - first, position_[1] + 1 - first}, lane_);
  }

  __device__ void begin_sums(uint32_t tile) {
    await_phase(&s_.of_v.full[v_.stage], v_.parity);
    if ((tile + 1) * kPositions > item_.last) clear(item_.last % kPositions);
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
    v_.next(F::kStages);
  }

  // Clears the values from a position on. The other warpgroup writes the same zeros.
  __device__ void clear(uint32_t from) {
    const uint4 zeros{};
    for (uint32_t piece = from * 8 + thread_; piece < kPositions * 8; piece += 128)
      for (uint32_t half = 0; half < 2; ++half)
        *reinterpret_cast<uint4*>(s_.v[v_.stage] + half * kSliceBytes + piece * 16) = zeros;
    publish_to_async();
    meet(group_);
  }

  // Stores the warpgroup's sums of a part.
  __device__ void leave_part() const {
    float4* to = part_at(p_, item_.unit + item_.part, group_) + thread_;
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i)
      to[i * 128] = {soft_.sums[4 * i], soft_.sums[4 * i + 1], soft_.sums[4 * i + 2], soft_.sums[4 * i + 3]};
    to[kQuads * 128] = {soft_.top[0], soft_.top[1], soft_.total[0], soft_.total[1]};
    count_part(p_, item_, group_, thread_);
  }

  __device__ void write() {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      __nv_bfloat16* out = row_of(p_, item_, row_in_tile(group_, thread_, h));
      const float factor = factor_of(p_, item_, soft_.total[h]);
      if (out == nullptr) continue;
#pragma unroll
      for (uint32_t j = 0; j < kQuads; ++j)
        *reinterpret_cast<__nv_bfloat162*>(out + j * 8 + lane_ % 4 * 2) =
            __floats2bfloat162_rn(soft_.sums[4 * j + 2 * h] * factor, soft_.sums[4 * j + 2 * h + 1] * factor);
    }
  }

  const Params& p_;
  Shared<F>& s_;
  const uint32_t group_, lane_, thread_;
  Place k_, v_;
  Item item_;
  int32_t position_[2];
  float scale_;  // of the scores, as Params::scale, with that of the item's keys
  Softmax soft_;
};

template <Form F>
__global__ void __launch_bounds__(kThreads, 1) prefill_kernel(const __grid_constant__ Params p) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  auto& s = *reinterpret_cast<Shared<F>*>(dynamic_shared());
  const uint32_t warp = warp_number();
  if (threadIdx.x == 0) {
    fetch_map(&p.q), fetch_map(&p.k), fetch_map(&p.v);
    if constexpr (F::kSlices > 2) fetch_map(&p.rotary);
    init_barrier(&s.q_full, 1), init_barrier(&s.q_empty, kWarps);
    init_barrier(&s.board.full, 1), init_barrier(&s.board.empty, kWarps + kLoaders);
    for (Ring<F>* ring : {&s.of_k, &s.of_v}) {
      for (uint32_t i = 0; i < F::kStages; ++i) {
        init_barrier(&ring->full[i], 1);
        init_barrier(&ring->empty[i], kWarps);
      }
    }
    publish_barriers();
  }
  __syncthreads();
  await_previous_kernel();  // The next kernel starts when this one ends: before, it would find room on the
                            // few idle multiprocessors alone, and stay there.
  if (warp < 4) {
    leave_registers<kLoaderRegisters>();
    if (warp == 0) load_queries_and_keys(p, s, threadIdx.x % 32);
    if (warp == 1) load_values(p, s, threadIdx.x % 32);
    if (warp == 2) post_items(p, s.board, threadIdx.x % 32);
  } else {
    take_registers<kRegisters>();
    Multiplier<F>(p, s, warp / 4 - 1).run();
  }
#else
  __trap();  // Prefill rejects other GPUs
#endif
}

template <Form F>
cudaError_t start_form(cudaStream_t stream, const Params& params) {
  constexpr size_t kBytes = sizeof(Shared<F>);
  static_assert(kBytes <= 227 << 10, "a block of Hopper has no more");
  return hopper::launch(stream, prefill_kernel<F>, {params.blocks, kThreads, kBytes}, kBytes, params);
}

}  // namespace

cudaError_t start(cudaStream_t stream, bool latent, const Params& params) {
  return latent ? start_form<Latent>(stream, params) : start_form<Plain>(stream, params);
}

}  // namespace ep::prefill

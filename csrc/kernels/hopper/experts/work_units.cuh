// Hands out work units: which tile of which product a block does next. Units come from a common counter and
// are taken as late as possible, when the loaders reach the unit before, so that blocks finish together.
#pragma once

#include "kernels/hopper/common/instructions.cuh"
#include "kernels/hopper/experts/experts.hpp"

namespace ep::experts {

__device__ inline uint32_t load_acquire(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ inline void add_release(uint32_t* at) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}

inline constexpr uint32_t kLeast = 16;  // rows of a chunk are a multiple, but of an expert's last one
inline constexpr uint32_t kUnits = 4;   // between loaders and multipliers, at most

enum class Kind : uint32_t { kGateUp, kDown, kDropped, kEnd };

// `rows` rows of one expert, from `first` on, times the weight rows of a tile. Dropped: weights read in vain.
struct Unit {
  Kind kind;
  uint32_t stages, expert, tile, first, rows;
  uint32_t gate_up_done;  // number of the expert's gate/up tiles
};

// Written by one warp, read by all others.
struct Agenda {
  uint64_t full[kUnits], empty[kUnits];
  uint64_t begun;  // counts loaders that have begun the unit published last
  Unit units[kUnits];
  uint32_t* counts;  // kCounts of this launch
  uint32_t first[kMaxExperts], rows[kMaxExperts];
  uint32_t chunk_end[kMaxExperts];  // chunks of this and all earlier experts
};

__device__ inline uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

__device__ inline void init(Agenda& a, uint32_t loaders, uint32_t multipliers) {
  hopper::init_barrier(&a.begun, loaders);
  for (uint32_t slot = 0; slot < kUnits; ++slot) {
    hopper::init_barrier(&a.full[slot], 1);
    hopper::init_barrier(&a.empty[slot], loaders + multipliers);
  }
}

// The rows of an expert, limited to the available room: a failed dispatch may leave any numbers.
struct Span {
  uint32_t first, rows;

  __device__ Span(const Work& work, int64_t offset, int32_t count)
      : first(uint32_t(min(uint64_t(offset), uint64_t(work.most)))),
        rows(min(uint32_t(max(count, 0)), work.most - first)) {}
};

// Reads the counts of every expert. Returns the number of chunks of all. Called by a whole warp.
template <uint32_t kRows>
__device__ uint32_t read_counts(Agenda& a, const Weights& w, const Work& work, uint32_t lane) {
  constexpr uint32_t kAtOnce = 4;  // experts whose numbers a lane loads together
  uint32_t before = 0;
  for (uint32_t begin = lane; begin < w.experts + lane; begin += kAtOnce * 32) {
    int64_t offsets[kAtOnce];
    int32_t counts[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t e = begin + i * 32;
      offsets[i] = e < w.experts ? work.offsets[e] : 0;
      counts[i] = e < w.experts ? work.counts[e] : 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t e = begin + i * 32;
      if (e - lane >= w.experts) break;
      const Span span(work, offsets[i], counts[i]);
      uint32_t end = ceil_div(span.rows, kRows);
      for (uint32_t by = 1; by < 32; by *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, end, by);
        if (lane >= by) end += other;
      }
      if (e < w.experts) a.first[e] = span.first, a.rows[e] = span.rows, a.chunk_end[e] = before + end;
      before += __shfl_sync(~0u, end, 31);
    }
  }
  __syncwarp();
  return before;
}

// A Policy's tiles have kWeightRows weight rows. For gate/up, half of them are gate's.
template <class Policy>
__device__ uint32_t up_tiles(const Weights& w) {
  return w.ffn / (Policy::kWeightRows / 2);
}

template <class Policy>
__device__ uint32_t down_tiles(const Weights& w) {
  return w.width / Policy::kWeightRows;
}

template <class Policy>
__device__ Unit unit_of(const Agenda& a, const Weights& w, uint32_t chunks, uint32_t number) {
  constexpr uint32_t kRows = Policy::kRows;
  const uint32_t up_units = chunks * up_tiles<Policy>(w);
  Unit unit{Kind::kGateUp, w.width / w.depth};
  uint32_t tiles = up_tiles<Policy>(w);
  if (number >= up_units) {
    number -= up_units;
    if (number >= chunks * down_tiles<Policy>(w)) return {Kind::kEnd};
    unit = {Kind::kDown, w.ffn / w.depth};
    tiles = down_tiles<Policy>(w);
  }
  const uint32_t chunk = number / tiles;                                     // any chunk of the same expert
  for (uint32_t low = 0, high = w.experts; low < high; unit.expert = low) {  // the first that ends after it
    const uint32_t middle = (low + high) / 2;
    if (a.chunk_end[middle] > chunk)
      high = middle;
    else
      low = middle + 1;
  }
  const uint32_t e = unit.expert, before = e == 0 ? 0 : a.chunk_end[e - 1];
  const uint32_t own = a.chunk_end[e] - before, place = number - before * tiles;
  const uint32_t even = ceil_div(ceil_div(a.rows[e], own), kLeast) * kLeast;  // a small chunk reads as many
                                                                              // weights as a large one
  const uint32_t at = place % own * even;  // all chunks, then the next tile: one reads weights, the others L2
  unit.tile = place / own;
  unit.first = a.first[e] + at;
  unit.rows = min(a.rows[e] - at, even);
  unit.gate_up_done = up_tiles<Policy>(w) * ceil_div(a.rows[e], kRows);
  return unit;
}

// Guesses the block's first unit: right if every expert has one chunk of rows. `stages` of its weights are
// read ahead.
template <class Policy>
__device__ Unit guess(const Weights& w, uint32_t stages) {
  const uint32_t tiles = up_tiles<Policy>(w), expert = blockIdx.x / tiles;
  if (expert >= w.experts) return {Kind::kEnd};
  return {Kind::kGateUp, min(stages, w.width / w.depth), expert, blockIdx.x % tiles};
}

// Returns once all loaders have begun the unit. They need the next one when they have requested all its
// stages.
__device__ inline void publish(Agenda& a, uint32_t& n, const Unit& unit) {
  hopper::await_phase(&a.empty[n % kUnits], ~(n / kUnits) & 1);
  a.units[n % kUnits] = unit;
  hopper::arrive(&a.full[n % kUnits]);
  hopper::await_phase(&a.begun, n & 1);
  ++n;
}

__device__ inline uint32_t* counts_of(const Weights& w) {
  return w.sync + 2 + *static_cast<const volatile uint32_t*>(w.sync + 1) * kCounts;
}

// Called by the block that takes the last number. Every block with a unit has already read which launch this
// is, and will not take another unit. A block without a unit may read either launch. It uses no counts except
// those of pieces, and this function waits for all `splitting` blocks to finish these. The next launch
// numbers units from the first on. It uses the other set of counts, because loaders still read this one's.
__device__ inline void leave_to_next(const Weights& w, const uint32_t* counts, uint32_t splitting) {
  while (splitting != 0 && load_acquire(counts + kBlocksThrough) < splitting) {
  }
  const uint32_t turn = counts == w.sync + 2 ? 1 : 0;
  uint32_t* next = w.sync + 2 + turn * kCounts;
  for (uint32_t e = 0; e < w.experts; ++e) next[e] = 0;
  next[kPiecesDone] = next[kPiecesTaken] = next[kBlocksThrough] = 0;
  w.sync[0] = 0;
  w.sync[1] = turn;
}

// Hands out units until none is left. The first one follows from the block's number, the others go to blocks
// as they ask. Called by a whole warp. `ahead`: the guessed unit, kEnd if none. splitting: see
// leave_to_next().
template <class Policy>
__device__ void hand_out(Agenda& a, const Weights& w, const Work& work, const Unit& ahead, uint32_t splitting,
                         uint32_t lane) {
  uint32_t* counts = counts_of(w);
  const uint32_t chunks = read_counts<Policy::kRows>(a, w, work, lane);
  if (lane != 0) return;
  a.counts = counts;
  const uint32_t units = chunks * (up_tiles<Policy>(w) + down_tiles<Policy>(w));
  uint32_t n = 0, number = blockIdx.x;
  Unit unit = unit_of<Policy>(a, w, chunks, number);
  const bool right = unit.kind == ahead.kind && unit.expert == ahead.expert && unit.tile == ahead.tile;
  if (ahead.kind != Kind::kEnd && !right) publish(a, n, {Kind::kDropped, ahead.stages});
  while (unit.kind != Kind::kEnd) {
    publish(a, n, unit);
    number = gridDim.x + atomicAdd(w.sync, 1u);
    unit = unit_of<Policy>(a, w, chunks, number);
  }
  // Takes effect when all blocks have called it or ended. By then all of them have started, and blocks of the
  // next kernel start one by one where these end. The comment of Experts says what this demands of that
  // kernel.
  hopper::let_next_kernel_start();
  // Every unit takes one number, so there are as many numbers as units. Without units, the last block's own
  // number ends.
  if (number + 1 == gridDim.x + units) leave_to_next(w, counts, splitting);
  publish(a, n, unit);
}

// The n-th unit of the block. Called by a whole warp.
__device__ inline Unit take(Agenda& a, uint32_t n, uint32_t lane) {
  hopper::await_phase(&a.full[n % kUnits], n / kUnits & 1);
  const Unit unit = a.units[n % kUnits];
  __syncwarp();
  if (lane == 0) hopper::arrive(&a.empty[n % kUnits]);
  return unit;
}

}  // namespace ep::experts

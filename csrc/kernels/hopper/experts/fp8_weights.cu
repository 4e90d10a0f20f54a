// The experts' kernel for float8 e4m3 weights with a scale per 128 x 128 block. Rows are split into codes too
// (split_rows.cuh), so products multiply codes by codes. Nothing is widened, and a product is as wide as for
// bfloat16.
//
// Each run of 64 channels (two products) is summed separately: it has its own row scale, and tensor cores
// keep 14 bits of e4m3 sums.
#include "kernels/hopper/common/products.cuh"
#include "kernels/hopper/experts/experts_kernel.cuh"
#include "kernels/hopper/experts/split_rows.cuh"

namespace ep::experts {
namespace {

constexpr uint32_t kGroups = kScaled / kRowScaled;  // per stage

// Copies 4 or 8 bytes, asynchronously like copy_piece().
template <int kBytes>
__device__ void copy_scale(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes)
               : "memory");
}

// Two warpgroups have 64 of a tile's weight rows each.
template <uint32_t kRowsOfTile>
struct Codes {
  static constexpr uint32_t kRows = kRowsOfTile, kTiles = 2, kMultipliers = 8, kResident = 1;
  static constexpr uint32_t kWeightRows = 2 * kHalf, kWeightBytes = kWeightRows * kSwizzledRow,
                            kRegisters = 0;
  static constexpr bool kSplits = true, kShares = false;
  static constexpr uint32_t kStages =
      stages_beside(kMultipliers * kRows * 32,
                    (kWeightRows + kTiles * kRows) * kSwizzledRow + kRows * kGroups * sizeof(float));
  static constexpr uint32_t kHiddenRow = 2 * kHalf + kPiece;  // bytes; spreads rows over banks
  static constexpr uint32_t kThreads = 32 * kMultipliers;
  static constexpr uint32_t kRun = 2;  // stages

  struct Room {
    alignas(16) float of_rows[kStages][kRows][kGroups];  // scales
    alignas(16) float of_weights[kStages][2];
    union alignas(16) {
      std::byte hidden[kRows][kHiddenRow];  // of a gate/up tile: high codes, then low ones
      bf16 turned[kMultipliers][kRows][16];
    };
    uint32_t largest[2][kRows];  // largest magnitude in a row of hidden, for two units in turn
    uint32_t piece[2];           // the current piece, and the next one
  };

  static __device__ uint32_t pieces(const Weights& w, const Work& work) {
    return Piece<kThreads>::count(Piece<kThreads>::all(w, work));
  }

  static __device__ void copy_weights(const Weights& w, const Unit& unit, uint32_t stage,
                                      std::byte (&to)[kWeightBytes], uint64_t* full) {
    arrive_and_expect(full, kWeightBytes);
    if (unit.kind == Kind::kGateUp)
      copy_box(to, &w.gate_up, {stage * kScaled, 0, 0, unit.tile * (kHalf / 8), unit.expert}, full);
    else
      copy_box(to, &w.down, stage * kScaled, unit.expert * w.width + unit.tile * 2 * kHalf, full);
  }

  static __device__ void copy_scales(const Weights& w, const Task& task, const Unit& unit, uint32_t stage,
                                     Room& room, uint32_t place, uint32_t lane) {
    const bool up = unit.kind == Kind::kGateUp;
    const uint32_t wide = w.width / kScaled, deep = w.ffn / kScaled;
    const float* scales = up ? task.split_scales : task.hidden_scales;
    const uint32_t pitch = kGroups * (up ? wide : deep);
    for (uint32_t row = lane; row < unit.rows; row += 32)
      copy_scale<8>(room.of_rows[place][row], scales + size_t(unit.first + row) * pitch + stage * kGroups);
    if (lane >= 2 || unit.kind == Kind::kDropped) return;
    const float* of_weights =  // of gate and up, or twice the same block
        up ? w.gate_up_scale + size_t((2 * unit.expert + lane) * deep + unit.tile * kHalf / kScaled) * wide +
                 stage
           : w.down_scale + size_t(unit.expert * wide + unit.tile) * deep + stage;
    copy_scale<4>(&room.of_weights[place][lane], of_weights);
  }

  // Operands of a stage. rows: high and low codes, eight rows of each in turn.
  struct Operands {
    uint64_t weights, rows;
  };

  // How kN rows are multiplied: in slices that share a product of high and low codes. The sums of both are
  // kept apart, so neither kN nor the tile size changes a bit. A part is a slice and a group of channels.
  template <uint32_t kN>
  struct Parts {
    static constexpr uint32_t kSlices = kN > 48 ? 2 : 1, kSlice = kN / kSlices;  // rows
    static constexpr uint32_t kCount = kGroups * kSlices;                        // of a stage
    static constexpr uint32_t kUnderWay = kN < 96 ? 2 : 1;                       // registers
    static __device__ constexpr uint32_t slice(uint32_t part) { return part % kSlices; }
    static __device__ constexpr uint32_t group(uint32_t part) { return part / kSlices; }
  };

  // A thread's sums of a part.
  template <uint32_t kN>
  struct Part {
    using P = Parts<kN>;
    float sums[P::kSlice];

    __device__ void ask(const Operands& of, uint32_t part) {
      const uint64_t rows = of.rows + P::slice(part) * (P::kSlice / 8 * 2 * kEight >> 4);
      begin_products();
#pragma unroll
      for (uint32_t k = 0; k < kRowScaled / 32; ++k) {
        const uint32_t to = 2 * (P::group(part) * (kRowScaled / 32) + k);  // 32 bytes further for each
        Product<2 * P::kSlice, Numbers::kE4m3>::run(sums, of.weights + to, rows + to, k != 0);
      }
      commit_products();
    }

    __device__ float of(uint32_t i) const {
      return sums[i / 4 * 8 + i % 4] + sums[i / 4 * 8 + 4 + i % 4];  // of high codes, and of low ones
    }

    // total += these sums, times the scales of weights and rows.
    __device__ void add_to(float (&total)[kRows / 2], const Room& room, uint32_t stage, uint32_t part,
                           uint32_t lane) const {
      const float2 of_weights = *reinterpret_cast<const float2*>(room.of_weights[stage]);
      constexpr uint32_t kColumns = P::kSlice / 4;
#pragma unroll
      for (uint32_t i = 0; i < kColumns; i += 2) {
        const uint32_t column = P::slice(part) * kColumns + i;
        const float4 of_rows = *reinterpret_cast<const float4*>(room.of_rows[stage][row_of(column, lane)]);
        const bool first_group = P::group(part) == 0;
        const float scale[2] = {first_group ? of_rows.x : of_rows.y, first_group ? of_rows.z : of_rows.w};
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
          float &first = total[at(column + j)], &second = total[at(column + j) + 2];
          first = __fmaf_rn(of_weights.x * scale[j], of(at(i + j)), first);
          second = __fmaf_rn(of_weights.y * scale[j], of(at(i + j) + 2), second);
        }
      }
    }
  };

  // Sums kStagesOfRun stages. Within them, the products of one part run while the sums of another are added.
  // If products stayed in flight between passes of a loop, the compiler would wait for each of them.
  template <uint32_t kN, uint32_t kStagesOfRun>
  static __device__ void sum_run(Shared<Codes>& s, Place& place, float (&sums)[kRows / 2], uint32_t half,
                                 uint32_t lane) {
    using P = Parts<kN>;
    constexpr uint32_t kParts = P::kCount, kAll = kStagesOfRun * kParts, kAhead = P::kUnderWay - 1;
    Part<kN> parts[P::kUnderWay];
    Operands now;
    uint32_t stage[kStagesOfRun];
#pragma unroll
    for (uint32_t i = 0; i < kAll + kAhead; ++i) {
      if (i < kAll) {
        if (i % kParts == 0) {
          now = begin(s, place, half);
          stage[i / kParts] = place.stage;
          place.next(kStages);
        }
        parts[i % P::kUnderWay].ask(now, i % kParts);
      }
      if (i + 1 < P::kUnderWay) continue;
      if (i < kAll)
        await_products<kAhead>();
      else
        await_products<0>();
      const uint32_t done = i - kAhead;
      parts[done % P::kUnderWay].add_to(sums, s.room, stage[done / kParts], done % kParts, lane);
      if ((done + 1) % kParts == 0) release(s, stage[done / kParts], lane);
    }
  }

  // kN: rows of a product, at least as many as the unit has.
  template <uint32_t kN>
  static __device__ void sum(Shared<Codes>& s, const Unit& unit, Place& place, float (&sums)[kRows / 2],
                             uint32_t half, uint32_t lane) {
    if constexpr (kN < kRows)
      if (unit.rows > kN) return sum<kN + (kN < 64 ? 16 : 32)>(s, unit, place, sums, half, lane);
#pragma unroll
    for (uint32_t i = 0; i < kRows / 2; ++i) sums[i] = 0;
    uint32_t i = 0;
    for (; i + kRun <= unit.stages; i += kRun) sum_run<kN, kRun>(s, place, sums, half, lane);
    for (; i < unit.stages; ++i) sum_run<kN, 1>(s, place, sums, half, lane);
  }

  // Waits for a stage, and returns its operands.
  static __device__ Operands begin(Shared<Codes>& s, const Place& place, uint32_t half) {
    await_phase(&s.full[place.stage], place.parity);
    publish_to_async();
    return {operand(shared_address(s.weights[place.stage] + half * (kWeightBytes / 2))),
            operand(shared_address(s.rows[place.stage]))};
  }

  // Called by a warp that no longer reads a stage.
  static __device__ void release(Shared<Codes>& s, uint32_t stage, uint32_t lane) {
    __syncwarp();
    if (lane == 0) arrive(&s.empty[stage]);
  }

  // A barrier for all warps that multiply.
  static __device__ void meet() {
    __syncwarp();
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
  }

  // Takes pieces of the rows until none is left. The number of the next piece is requested meanwhile.
  template <class Given>
  static __device__ void split_rows(Room& room, const Weights& w, const Task& task) {
    uint32_t* counts = counts_of(w);
    const bool first = threadIdx.x == 0;
    if (first) room.piece[0] = atomicAdd(counts + kPiecesTaken, 1);
    const uint32_t all = Piece<kThreads>::all(w, task.work), pieces = Piece<kThreads>::count(all);
    meet();
    for (uint32_t n = 0; room.piece[n % 2] < pieces; ++n) {
      uint32_t next = 0;
      if (first) next = atomicAdd(counts + kPiecesTaken, 1);
      Piece<kThreads>::template split<Given>(w, task, room.piece[n % 2], all);
      if (first) room.piece[(n + 1) % 2] = next;
      meet();
      if (first) add_release(counts + kPiecesDone);
    }
    if (first) add_release(counts + kBlocksThrough);
  }

  // The row of a thread's i-th column. Its sums are at(i) and, for the other weight row, at(i) + 2.
  static __device__ uint32_t row_of(uint32_t i, uint32_t lane) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
  static constexpr __device__ uint32_t at(uint32_t i) { return i / 2 * 4 + i % 2; }

  // Replaces gate's sums by hidden, from gate and up of 64 channels, and finds the largest magnitude of each
  // row.
  static __device__ void gate(uint32_t (&largest)[kRows], uint32_t rows, float (&sums)[kRows / 2],
                              uint32_t lane) {
#pragma unroll
    for (uint32_t i = 0; i < kRows / 4; ++i) {
      if (i / 2 * 8 >= rows) break;
      float& value = sums[at(i)];
      value = sums[at(i) + 2] * __fdividef(value, 1.f + __expf(-value));
      uint32_t most = magnitude(value);
#pragma unroll
      for (uint32_t by = 4; by < 32; by *= 2) most = max(most, __shfl_xor_sync(~0u, most, by));
      if (lane < 4) atomicMax(&largest[row_of(i, lane)], most);
    }
  }

  // Splits hidden into `room.hidden`. The tile is one group of each row. scales: of the unit's first row.
  static __device__ void split_hidden(Room& room, const uint32_t (&largest)[kRows], uint32_t rows,
                                      const float (&hidden)[kRows / 2], float* scales, uint32_t pitch,
                                      uint32_t warp, uint32_t lane) {
    const uint32_t channel = warp * 8 + lane / 4;
#pragma unroll
    for (uint32_t i = 0; i < kRows / 4; i += 2) {
      if (i / 2 * 8 >= rows) break;
      const uint32_t row = row_of(i, lane);
      const GroupScale scale[2] = {GroupScale(largest[row]), GroupScale(largest[row + 1])};
      const CodePair codes(hidden[at(i)] * scale[0].inverse, hidden[at(i + 1)] * scale[1].inverse);
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        room.hidden[row + j][channel] = std::byte(codes.high >> 8 * j);
        room.hidden[row + j][kHalf + channel] = std::byte(codes.low >> 8 * j);
        if (warp == 0 && lane < 4 && row + j < rows) scales[(row + j) * pitch] = scale[j].scale;
      }
    }
  }

  // turn: alternates between 0 and 1.
  static __device__ void store_hidden(Room& room, const Weights& w, const Task& task, const Unit& unit,
                                      uint32_t turn, float (&sums)[kRows / 2], uint32_t warp, uint32_t lane) {
    gate(room.largest[turn], unit.rows, sums, lane);
    meet();
    if (threadIdx.x < kRows) room.largest[turn ^ 1][threadIdx.x] = 0;  // all threads have read them
    const uint32_t groups = w.ffn / kRowScaled;
    split_hidden(room, room.largest[turn], unit.rows, sums,
                 task.hidden_scales + size_t(unit.first) * groups + unit.tile, groups, warp, lane);
    meet();
    constexpr uint32_t kPieces = kHalf / kPiece;  // of high codes, and as many of low ones
    std::byte* to = task.hidden + size_t(unit.first) * (2 * w.ffn) + unit.tile * kHalf;
    for (uint32_t p = threadIdx.x; p < unit.rows * 2 * kPieces; p += kThreads) {
      const uint32_t row = p / (2 * kPieces), piece = p % (2 * kPieces);
      *reinterpret_cast<uint4*>(to + size_t(row) * (2 * w.ffn) + piece / kPieces * w.ffn +
                                piece % kPieces * kPiece) =
          *reinterpret_cast<const uint4*>(room.hidden[row] + piece * kPiece);
    }
    __syncwarp();
  }

  static __device__ void multiply(Shared<Codes>& s, const Weights& w, const Task& task, uint32_t warp,
                                  uint32_t lane) {
    if (threadIdx.x < kRows) s.room.largest[0][threadIdx.x] = s.room.largest[1][threadIdx.x] = 0;
    meet();
    if (task.work.row_scales == nullptr)
      split_rows<Values>(s.room, w, task);
    else
      split_rows<GivenCodes>(s.room, w, task);
    Place place;
    float sums[kRows / 2];
    bool stored = true;  // the whole block has stored what `hidden` held
    for (uint32_t n = 0, turn = 0;; ++n) {
      const Unit unit = take(s.agenda, n, lane);
      if (unit.kind == Kind::kEnd) return;
      sum<16>(s, unit, place, sums, warp / 4, lane);
      if (unit.kind == Kind::kGateUp) {
        store_hidden(s.room, w, task, unit, turn, sums, warp, lane);
        if (lane == 0) add_release(s.agenda.counts + unit.expert);
        turn ^= 1, stored = false;
      } else if (unit.kind == Kind::kDown) {
        if (!stored) meet(), stored = true;  // `turned` shares its memory with `hidden`
        auto* to = static_cast<bf16*>(task.work.out) + unit.tile * 2 * kHalf + warp * 16;
        store<kRows>(s.room.turned[warp], unit, to, w.width, lane, [&](uint32_t i) { return sums[i]; });
      }
    }
  }
};

}  // namespace

cudaError_t start_of_codes(const Launch& launch, const Weights& weights, const Task& task) {
  switch (launch.config.rows_of_tile) {
    case 32:
      return start_kernel<Codes<32>>(launch, weights, task);
    case 48:
      return start_kernel<Codes<48>>(launch, weights, task);
    case 64:
      return start_kernel<Codes<64>>(launch, weights, task);
    default:
      return start_kernel<Codes<96>>(launch, weights, task);
  }
}

}  // namespace ep::experts

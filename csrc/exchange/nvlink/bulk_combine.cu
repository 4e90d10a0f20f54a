// Returns rows to their tokens' source and sums them there, in float32 and in rank order. Some blocks copy
// rows to their sources, and one warp of each publishes which have arrived: only that warp waits until writes
// have reached another GPU. The other blocks sum tokens whose rows are here.
#include "exchange/nvlink/bulk_copy.cuh"
#include "exchange/nvlink/weighted_sum.cuh"

namespace ep::cuda {
namespace {

constexpr uint32_t kChunkRows = BulkLayout::kChunkRows;

// Where the rows of each source begin in this rank's block. In shared memory.
struct Begins {
  uint32_t at[kMaxPeers + 1];

  __device__ __forceinline__ void find(const Device& g, const int32_t* prefix) {
    if (threadIdx.x < g.num_ranks) at[threadIdx.x + 1] = uint32_t(prefix[threadIdx.x * g.num_ranks + g.rank]);
    if (threadIdx.x == 0) at[0] = 0;
  }
  __device__ __forceinline__ uint32_t rows(uint32_t source) const { return at[source + 1] - at[source]; }
};

// The block of a source has a part for each other rank.
__device__ __forceinline__ uint32_t part_of(uint32_t source, uint32_t expert_rank) {
  return expert_rank < source ? expert_rank : expert_rank - 1;
}

// Rows that return together, of a list that takes all sources in turn. count: 0 = none.
struct Chunk {
  uint32_t source, number;  // number: among the rows from the source
  uint32_t begin, count;    // begin: in this rank's block
};
__device__ __forceinline__ Chunk chunk_of(const Device& g, const Begins& begins, uint32_t place) {
  const uint32_t others = g.num_ranks - 1, number = place / others, i = place - number * others;
  const uint32_t source = g.rank + 1 + i < g.num_ranks ? g.rank + 1 + i : g.rank + 1 + i - g.num_ranks;
  const uint32_t begin = begins.at[source] + number * kChunkRows, end = begins.at[source + 1];
  return {source, number, begin, begin < end ? min(kChunkRows, end - begin) : 0};
}

// What the blocks do. Some return rows: one warp publishes, the others copy. The rest only sum, since loads
// for sums would wait behind stores that wait for the link. A single block does both.
struct Roles {
  static constexpr uint32_t kMostReturning = 12;  // blocks that fill the link; more of them slow down sums
  uint32_t returning, copying, summing;  // blocks that return; warps that copy, and that sum, of this block

  __device__ __forceinline__ explicit Roles(uint32_t ranks) {
    const uint32_t warps = blockDim.x / kWarp;
    returning = ranks == 1 ? 0 : max(1u, min((gridDim.x * 5 + 6) / 12, kMostReturning));
    const bool both = gridDim.x == 1, returns = blockIdx.x < returning;
    copying = !returns ? 0 : both ? warps / 2 : warps - 1;
    summing = !returns ? warps : both ? warps - copying - 1 : 0;
  }
  // Among all warps that sum.
  __device__ __forceinline__ uint32_t first_sum(uint32_t warp) const {
    return gridDim.x == 1 ? warp + summing - blockDim.x / kWarp
                          : warp * (gridDim.x - returning) + blockIdx.x - returning;
  }
  __device__ __forceinline__ uint32_t sums() const {
    return summing * (gridDim.x == 1 ? 1 : gridDim.x - returning);
  }
};

// The rows that return: chunks, of which a block takes some at once, and returns them in pieces of rows.
struct Returned {
  static constexpr uint32_t kTakeBytes = 48 << 10;  // at least, so that a block need not take too often
  uint32_t chunks, chunks_of_take;
  Pieces pieces;

  __device__ __forceinline__ Returned(const Device& g, const Begins& begins, uint32_t row_bytes)
      : chunks(0), pieces(row_bytes) {
    for (uint32_t s = 0; s < g.num_ranks; ++s)
      if (s != g.rank) chunks = max(chunks, begins.rows(s));
    const uint32_t others = g.num_ranks - 1, chunk_bytes = kChunkRows * row_bytes;
    chunks = (chunks + kChunkRows - 1) / kChunkRows * others;
    chunks_of_take = (kTakeBytes + chunk_bytes - 1) / chunk_bytes * others;  // one may have all the rows
  }
  __device__ __forceinline__ uint32_t pieces_of_chunk() const { return kChunkRows * pieces.count; }
  __device__ __forceinline__ uint32_t pieces_of_take() const { return chunks_of_take * pieces_of_chunk(); }
};

// What a block has taken. It takes more when it is ready for it, because multiprocessors differ in what the
// link takes from them, by a half. Its warps take pieces. Waits here have no deadline: what they wait for is
// done by warps of the same block, none of which waits for another rank. In shared memory.
struct Taken {
  static constexpr uint32_t kAhead = 2;   // takes of this block that are known before their pieces are taken
  static constexpr uint32_t kKnown = 16;  // takes whose numbers are kept
  uint32_t next;                          // piece that no warp has
  uint32_t piece[kWarp];                  // of each copying warp, which has written those before
  uint32_t known[kKnown];                 // slot i % kKnown is i + 1 when take i of this block is in `number`
  uint32_t number[kKnown];                // of the take, among those of all blocks
  uint32_t published;                     // takes of which all chunks are

  // The first takes are known at once: one of each `blocks`. The whole block calls it.
  __device__ __forceinline__ void start(uint32_t blocks) {
    const uint32_t i = threadIdx.x;
    if (i < kWarp) piece[i] = 0;
    if (i < kKnown) known[i] = i < kAhead ? i + 1 : 0;
    if (i < kAhead) number[i] = i * blocks + blockIdx.x;
    if (i == 0) next = published = 0;
  }
  __device__ __forceinline__ uint32_t await_number(uint32_t i) const {
    while (load_acquire_block(&known[i % kKnown]) != i + 1) {
    }
    return number[i % kKnown];
  }
  // One lane. all: takes of all blocks behind the first. In order, so behind a take past the end of the list
  // come only such.
  __device__ __forceinline__ void take(uint32_t i, uint32_t blocks, uint32_t& all) {
    await_number(i - 1);
    while (load_acquire_block(&published) + kKnown <= i) {
    }
    number[i % kKnown] = kAhead * blocks + atomicAdd(&all, 1u);
    store_release_block(&known[i % kKnown], i + 1);
  }
  // The whole warp, once it has written the piece before.
  __device__ __forceinline__ uint32_t take_piece(uint32_t warp, uint32_t pieces_of_take, uint32_t blocks,
                                                 uint32_t& all) {
    uint32_t mine = 0;
    __syncwarp();
    if (threadIdx.x % kWarp == 0) {
      mine = atomicAdd(&next, 1u);
      store_release_block(&piece[warp], mine);
      if (mine % pieces_of_take == 0) take(mine / pieces_of_take + kAhead, blocks, all);
    }
    return __shfl_sync(kFull, mine, 0);
  }
  // Where the block's chunk `i` is in the list.
  __device__ __forceinline__ uint32_t place_of(uint32_t i, uint32_t chunks_of_take) const {
    const uint32_t take = i / chunks_of_take;
    return await_number(take) * chunks_of_take + i - take * chunks_of_take;
  }
};

// Past the end of the list each warp takes one more piece: not so many that a take would wait for its slot.
static_assert(Returned::kTakeBytes / (kCopyWords * kWarp * sizeof(uint4)) * (Taken::kKnown - 4) >=
              kBulkCombineThreads / kWarp);

// One warp signals the sources which chunks have arrived, until all have.
__device__ __forceinline__ void publish_chunks(const Device& g, const Begins& begins, const Roles& roles,
                                               const Returned& returned, Taken& taken, uint64_t operation) {
  const uint32_t lane = threadIdx.x % kWarp, warp = min(lane, roles.copying - 1);
  bool over = false;
#pragma unroll 1
  for (uint32_t published = 0; !__any_sync(kFull, over);) {
    const uint32_t least = __reduce_min_sync(kFull, load_acquire_block(&taken.piece[warp]));
    const uint32_t written = least / returned.pieces_of_chunk();
    if (written == published) continue;
    __syncwarp();
    fence_system();
    for (uint32_t i = published + lane; i < written; i += kWarp) {
      const uint32_t place = taken.place_of(i, returned.chunks_of_take);
      const Chunk c = chunk_of(g, begins, place);
      if (c.count != 0) store_relaxed(g.regions[c.source] + g.bulk.chunk_at(g.rank, c.number), operation);
      over |= place >= returned.chunks;
    }
    __syncwarp();
    published = written;
    if (lane == 0) store_release_block(&taken.published, published / returned.chunks_of_take);
  }
}

// One warp returns pieces of rows until none is left.
__device__ __forceinline__ void return_rows(const Device& g, const BulkCombineArgs& a, const BulkOpened& o,
                                            const Begins& begins, const Roles& roles,
                                            const Returned& returned, uint32_t warp, Taken& taken) {
  const uint32_t lane = threadIdx.x % kWarp, others = g.num_ranks - 1, of_chunk = returned.pieces_of_chunk();
  uint32_t& all = g.state->bulk_taken[o.operation & 1][0];
  const auto* x = static_cast<const std::byte*>(a.x);
#pragma unroll 1
  while (true) {
    const uint32_t piece = taken.take_piece(warp, returned.pieces_of_take(), roles.returning, all);
    const uint32_t i = piece / of_chunk, in_chunk = piece - i * of_chunk;
    const uint32_t place = taken.place_of(i, returned.chunks_of_take);
    if (place >= returned.chunks) {
      __syncwarp();
      if (lane == 0) store_release_block(&taken.piece[warp], (i + 1) * of_chunk);  // lets the publisher end
      return;
    }
    const uint32_t row = in_chunk / returned.pieces.count;
    const uint32_t at = (in_chunk - row * returned.pieces.count) * returned.pieces.bytes;
    const Chunk c = chunk_of(g, begins, place);
    const BulkPeer peer = o.peers[c.source];
    const uint32_t tokens = peer.capacity / others, number = c.number * kChunkRows + row;
    if (row >= c.count || number >= tokens) continue;  // no such row, or its source has no room
    const uint64_t from = c.begin + row, to = uint64_t(part_of(c.source, g.rank)) * tokens + number;
    if (a.weights != nullptr && at == 0 && lane < a.top_k) {
      const BulkBlock b = BulkBlock::of(peer.capacity, a.row_bytes, 0, a.top_k, false, false);
      reinterpret_cast<float*>(peer.block + b.weights)[to * a.top_k + lane] =
          a.weights[from * a.top_k + lane];
    }
    copy_row(x + from * a.row_bytes + at, min(returned.pieces.bytes, a.row_bytes - at),
             [&](auto&& put) { put(peer.block + to * a.row_bytes + at); });
  }
}

// 8 bf16 channels added to 8 sums.
__device__ __forceinline__ void add_words(float (&sums)[8], const uint4& v) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    sums[2 * i] += __uint_as_float(words[i] << 16);
    sums[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
  }
}

// Loads of one thread in flight: words of a row, from two ranks each.
constexpr uint32_t kSumWords = 4;

// Adds the words of `row` at first, first + kWarp, ... to the sums.
struct Words {
  uint4 v[kSumWords];

  __device__ __forceinline__ void load(const std::byte* row, uint32_t first, uint32_t words) {
#pragma unroll
    for (uint32_t i = 0; i < kSumWords; ++i)
      if (first + i * kWarp < words) v[i] = load16(row + uint64_t(first + i * kWarp) * sizeof(uint4));
  }
  __device__ __forceinline__ void add_to(float (&sums)[kSumWords][8], uint32_t first, uint32_t words) const {
#pragma unroll
    for (uint32_t i = 0; i < kSumWords; ++i)
      if (first + i * kWarp < words) add_words(sums[i], v[i]);
  }
};

// Where the row of each rank for a token is; lane = rank. null = none. begin: of this rank's own rows.
__device__ __forceinline__ const std::byte* row_from(const Device& g, const BulkCombineArgs& a, int32_t place,
                                                     uint32_t rank, const BulkPeer& own, uint32_t begin) {
  if (place < 0) return nullptr;
  if (rank == g.rank)
    return static_cast<const std::byte*>(a.x) + uint64_t(begin + uint32_t(place)) * a.row_bytes;
  return own.block + (uint64_t(part_of(g.rank, rank)) * a.tokens + uint32_t(place)) * a.row_bytes;
}

__device__ __forceinline__ const std::byte* from_lane(const std::byte* mine, uint32_t lane) {
  return reinterpret_cast<const std::byte*>(__shfl_sync(kFull, reinterpret_cast<uint64_t>(mine), lane));
}

// One warp sums one token. row: of rank `lane`.
__device__ __forceinline__ void sum_token(const Device& g, const BulkCombineArgs& a, uint32_t token,
                                          const std::byte* row) {
  const uint32_t lane = threadIdx.x % kWarp, words = a.row_bytes / sizeof(uint4);
  const uint64_t at = uint64_t(token) * a.row_bytes;
#pragma unroll 1
  for (uint32_t first = lane; first - lane < words; first += kSumWords * kWarp) {
    float sums[kSumWords][8] = {};
    Words one, two;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      if (a.bias[i] == nullptr) continue;
      one.load(static_cast<const std::byte*>(a.bias[i]) + at, first, words);
      one.add_to(sums, first, words);
    }
#pragma unroll 1
    for (uint32_t r = 0; r < g.num_ranks; r += 2) {
      const std::byte* lower = from_lane(row, r);
      const std::byte* upper = r + 1 < g.num_ranks ? from_lane(row, r + 1) : nullptr;
      if (lower != nullptr) one.load(lower, first, words);
      if (upper != nullptr) two.load(upper, first, words);
      if (lower != nullptr) one.add_to(sums, first, words);
      if (upper != nullptr) two.add_to(sums, first, words);
    }
#pragma unroll
    for (uint32_t i = 0; i < kSumWords; ++i) {
      const uint32_t word = first + i * kWarp;
      if (word < words)
        store16(static_cast<std::byte*>(a.out) + at + uint64_t(word) * sizeof(uint4),
                {to_bf16x2(sums[i][0], sums[i][1]), to_bf16x2(sums[i][2], sums[i][3]),
                 to_bf16x2(sums[i][4], sums[i][5]), to_bf16x2(sums[i][6], sums[i][7])});
    }
  }
}

// Lane = choice.
__device__ __forceinline__ void sum_weights(const Device& g, const BulkCombineArgs& a, const BulkPeer& own,
                                            uint32_t token, int32_t place, uint32_t begin) {
  const uint32_t lane = threadIdx.x % kWarp;
  const BulkBlock b = BulkBlock::of(a.target.capacity, a.row_bytes, 0, a.top_k, false, false);
  const auto* returned = reinterpret_cast<const float*>(own.block + b.weights);
  float sum = 0.0f;
  for (uint32_t r = 0; r < g.num_ranks; ++r) {
    const int32_t at = __shfl_sync(kFull, place, r);
    if (at < 0 || lane >= a.top_k) continue;
    const bool mine = r == g.rank;
    const uint64_t row = mine ? begin + uint32_t(at) : uint64_t(part_of(g.rank, r)) * a.tokens + uint32_t(at);
    sum += (mine ? a.weights : returned)[row * a.top_k + lane];
  }
  if (lane < a.top_k) a.out_weights[uint64_t(token) * a.top_k + lane] = sum;
}

__device__ __forceinline__ void sum_tokens(const Device& g, const BulkCombineArgs& a, const BulkOpened& o,
                                           uint32_t begin, uint32_t first, uint32_t step) {
  const uint32_t lane = threadIdx.x % kWarp, ranks = g.num_ranks;
  const BulkPeer& own = o.peers[g.rank];
  const auto find = [&](uint32_t token) {
    return lane < ranks && token < a.tokens ? a.places[uint64_t(token) * ranks + lane] : -1;
  };
  int32_t next = find(first);
  uint64_t waited = 0;  // for rank `lane`
#pragma unroll 1
  for (uint32_t token = first; token < a.tokens; token += step) {
    const int32_t place = next;
    next = find(token + step);
    bool here = true;
    if (place >= 0 && lane != g.rank)
      here = await_cell(g, g.own() + g.bulk.chunk_at(lane, uint32_t(place) / kChunkRows), o.operation,
                        {Op::kCombine, Phase::kRecvReduce, lane, o.operation}, waited);
    if (!__all_sync(kFull, here)) return;
    sum_token(g, a, token, row_from(g, a, place, lane, own, begin));
    if (a.out_weights != nullptr) sum_weights(g, a, own, token, place, begin);
  }
  if (blockIdx.x == gridDim.x - 1 && waited != 0)
    raise(g.state->bulk[uint32_t(Op::kCombine)].wait_ns[lane], waited);
}

__global__ void __launch_bounds__(kBulkCombineThreads, 1)
    bulk_combine_kernel(const __grid_constant__ Device g, const __grid_constant__ BulkCombineArgs a) {
  __shared__ BulkOpened o;
  __shared__ Begins begins;
  __shared__ Taken taken;
  begins.find(g, a.prefix);
  const Roles roles(g.num_ranks);
  taken.start(roles.returning);
  open_bulk(g, Op::kCombine, &a.target, o);
  const Returned returned(g, begins, a.row_bytes);
  const uint32_t warp = threadIdx.x / kWarp;
  if (o.alive && warp < roles.copying) {
    return_rows(g, a, o, begins, roles, returned, warp, taken);
  } else if (o.alive && roles.copying != 0 && warp == roles.copying) {
    publish_chunks(g, begins, roles, returned, taken, o.operation);
    if (blockIdx.x == 0 && threadIdx.x % kWarp == 0) note_sent(g, Op::kCombine);
  } else if (o.alive) {
    sum_tokens(g, a, o, begins.at[g.rank], roles.first_sum(warp), roles.sums());
  }
  close_bulk(g, o, false);  // a flag follows each row
  if (threadIdx.x == 0 && o.alive) raise(g.state->bulk[uint32_t(Op::kCombine)].end_ns, clock_ns());
  if (blockIdx.x == 0 && threadIdx.x == kWarp) flush_bulk_times(g, Op::kDispatch);
}

}  // namespace

cudaError_t bulk_combine(const BulkLaunch& launch, const Device& device, const BulkCombineArgs& args) {
  return start_bulk_kernel(launch, bulk_combine_kernel, kBulkCombineThreads, 0, device, args);
}

}  // namespace ep::cuda

// Which ranks every token goes to, its choices as their owners number them, and for FP8 its row as it
// travels.
#include "exchange/nvlink/bulk_times.cuh"
#include "exchange/nvlink/many_rows.hpp"
#include "exchange/nvlink/row.cuh"
#include "exchange/nvlink/wait.cuh"

namespace ep::cuda {
namespace {

constexpr uint32_t kThreads = 128;

// One warp. Lane = choice, then rank.
__device__ __forceinline__ void route(const Device& g, const ManyRouteArgs& a, uint32_t token) {
  const uint32_t lane = threadIdx.x % kWarp, top_k = g.layout.top_k;
  const int64_t id = lane < top_k ? a.ids[uint64_t(token) * top_k + lane] : -1;
  const bool known = id >= -1 && id < int64_t(g.num_experts), chosen = known && id >= 0;
  const uint32_t same = __match_any_sync(kFull, chosen ? int32_t(id) : -1 - int32_t(lane));
  if (!known || __popc(same) > 1) fail(g, kBadIds, Op::kDispatch, Phase::kSendRows, g.rank, token, lane);
  const uint32_t entry = chosen ? g.table[id] : 0, owner = entry >> kOwnerShift;
  if (lane < top_k)
    a.placed[uint64_t(token) * top_k + lane] =
        chosen ? int64_t(owner) * a.stride + int64_t(entry & kLocalMask) : -1;
  const uint32_t ranks = __reduce_or_sync(kFull, chosen ? 1u << owner : 0u) & ~g.state->control.absent;
  if (lane < g.num_ranks) a.in_rank[uint64_t(token) * g.num_ranks + lane] = ranks >> lane & 1;
}

__device__ __forceinline__ void quantise(const Device& g, const ManyRouteArgs& a, uint32_t token) {
  Row<true, false> row;
  begin_row(row, a.x, g.hidden, token, 0, 0);
  auto* codes = static_cast<std::byte*>(a.codes) + uint64_t(token) * g.hidden;
  uint32_t* scales = a.scales + uint64_t(token) * g.scale_words;
#pragma unroll 1
  do {
    row.load();
#pragma unroll
    for (uint32_t i = 0; i < row.kAhead; ++i) {
      const Piece piece = row.piece(i, g.payload);
      if (piece.active) store16(codes + piece.at, piece.words);
      if (piece.leads) scales[piece.scale_at] = piece.scale;
    }
  } while (row.next());
}

// Block = tokens in turn. Without FP8 each warp takes a token.
__global__ void __launch_bounds__(kThreads)
    many_route_kernel(const __grid_constant__ Device g, const __grid_constant__ ManyRouteArgs a) {
  const uint32_t warp = threadIdx.x / kWarp, warps = kThreads / kWarp;
  if (blockIdx.x == 0 && threadIdx.x == 0) start_bulk_times(g, Op::kDispatch);
  if (a.codes == nullptr) {
    for (uint32_t t = blockIdx.x * warps + warp; t < a.tokens; t += gridDim.x * warps) route(g, a, t);
    return;
  }
  for (uint32_t t = blockIdx.x; t < a.tokens; t += gridDim.x) {
    if (warp == 0) route(g, a, t);
    quantise(g, a, t);
  }
}

}  // namespace

cudaError_t many_route(const BulkLaunch& launch, const Device& device, const ManyRouteArgs& args) {
  if (args.tokens == 0) return cudaSuccess;
  const uint32_t warps = kThreads / kWarp;
  const uint32_t wanted = args.codes == nullptr ? (args.tokens + warps - 1) / warps : args.tokens;
  const uint32_t most = 8 * launch.num_sms;
  return start_bulk_kernel({launch.stream, wanted < most ? wanted : most}, many_route_kernel, kThreads, 0,
                           device, args);
}

}  // namespace ep::cuda

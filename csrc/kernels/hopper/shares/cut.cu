// One block reads all lengths: for the size of a share, for the number of shares of contexts that are cut,
// and to write the shares.
#include "kernels/hopper/shares/shares.hpp"

namespace ep::shares {
namespace {

constexpr uint32_t kThreads = 512, kWarps = kThreads / 32;

// Sums over the threads of the block. All threads call them.
class Sums {
 public:
  // Of the values of the threads before this one; `all` gets the sum of all threads.
  template <class Number>
  __device__ Number before(Number value, Number& all) {
    __shared__ Number warps[kWarps];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Number until = value;
    for (uint32_t step = 1; step < 32; step *= 2) {
      const Number more = __shfl_up_sync(~0u, until, step);
      if (lane >= step) until += more;
    }
    __syncthreads();  // the sums of the last call were read
    if (lane == 31) warps[warp] = until;
    __syncthreads();
    Number ahead = 0;
    all = 0;
    for (uint32_t w = 0; w < kWarps; ++w) {
      if (w < warp) ahead += warps[w];
      all += warps[w];
    }
    return ahead + until - value;
  }

  template <class Number>
  __device__ Number all(Number value) {
    Number sum;
    before(value, sum);
    return sum;
  }
};

class Cuts {
 public:
  __device__ Cuts(const Request& r, Sums& sums) : r_(r) {
    uint64_t tiles = 0;
    for (uint32_t s = threadIdx.x; s < r.sequences; s += kThreads) tiles += tiles_of(s);
    const uint64_t even = (sums.all(tiles) * r.heads + r.teams - 1) / r.teams, step = (even + 3) / 4;
    const uint64_t first = max(even, uint64_t(r.least));
    for (share_ = first; share_ < 2 * even; share_ += step) {
      uint64_t shares = 0;
      for (uint32_t s = threadIdx.x; s < r.sequences; s += kThreads) shares += of(s);
      if (sums.all(shares) * r.heads <= r.teams) return;
    }
    share_ = first;
  }

  __device__ uint32_t tiles_of(uint32_t sequence) const {
    return (uint32_t(max(r_.lengths[sequence], 0)) + r_.tile - 1) / r_.tile;
  }

  // Number of shares, at least 1.
  __device__ uint32_t of(uint32_t sequence) const {
    return max(uint32_t((2 * uint64_t(tiles_of(sequence)) + share_) / (2 * share_)), 1u);
  }

 private:
  const Request& r_;
  uint64_t share_;  // tiles that a share should have
};

__global__ void __launch_bounds__(kThreads, 1) cut_kernel(Request r, Shares shares) {
  Sums sums;
  const Cuts cuts(r, sums);
  for (uint32_t i = threadIdx.x; i < kMostPairs * r.teams; i += kThreads) shares.finished[i] = 0;
  uint32_t own = 0;
  for (uint32_t s = threadIdx.x; s < r.sequences; s += kThreads) own += cuts.of(s) > 1 ? cuts.of(s) : 0;
  uint32_t next_cut = 0, next_whole = sums.all(own);
  for (uint32_t base = 0; base < r.sequences; base += kThreads) {
    const uint32_t s = base + threadIdx.x, of = s < r.sequences ? cuts.of(s) : 0;
    uint32_t all_cut, all_whole;
    const uint32_t at_cut = sums.before(of > 1 ? of : 0, all_cut);
    const uint32_t at_whole = sums.before(uint32_t(of == 1), all_whole);
    const uint32_t at = of > 1 ? next_cut + at_cut : next_whole + at_whole;
    next_cut += all_cut, next_whole += all_whole;
    if (of == 0) continue;
    const uint32_t tiles = cuts.tiles_of(s);
    const int32_t length = max(r.lengths[s], 0), slot = r.slots == nullptr ? -1 : r.slots[s];
    for (uint64_t n = 0; n < of; ++n)
      shares.at[at + n] = {
          int32_t(s),  length, slot, uint32_t(tiles * n / of), uint32_t(tiles * (n + 1) / of),
          uint32_t(n), of,     0};
  }
  if (threadIdx.x == 0) *shares.total = next_whole;
}

}  // namespace

cudaError_t start(cudaStream_t stream, const Request& request, const Shares& shares) {
  cut_kernel<<<1, kThreads, 0, stream>>>(request, shares);
  return cudaGetLastError();
}

}  // namespace ep::shares

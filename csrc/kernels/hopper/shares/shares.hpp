// Cuts the contexts of a decode step into shares, once for all layers. Lengths are known on the device only,
// and one context may be much longer than the others: without cuts, few multiprocessors would read it while
// all others have finished.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ep::shares {

// Tiles first to last - 1 of a sequence's context. The kernel processes it once for each KV head.
struct Share {
  int32_t sequence, length, slot;    // slot: of the sequence's newest token in the cache
  uint32_t first, last, number, of;  // it is the number-th of `of` shares of its sequence, counted from 0
  uint32_t unused;
};
static_assert(sizeof(Share) == 32);

// Results of cut(): device addresses. All shares of contexts that are cut come first, those of a sequence one
// after the other. Then every other sequence is one share, also one without positions.
struct Shares {
  Share* at;           // [most], 16-byte aligned
  uint32_t most;       // sequences + kMostPairs * teams / heads
  uint32_t* total;     // number of shares
  uint32_t* finished;  // [kMostPairs * teams], zero: counts the finished shares of a (sequence, KV head)
};

struct Request {
  const int32_t *lengths, *slots;  // slots: null for none
  uint32_t sequences, heads;       // heads: KV heads of each share
  uint32_t teams;                  // that process (share, KV head) pairs at the same time
  uint32_t tile, least;            // positions of a tile; tiles that a share should have at least
};

// (share, KV head) pairs of contexts that are cut, for each team, at most. A context is cut from 1.5 times
// the wanted size s on, into t / s + 1/2 shares of its t tiles at most, which is 4/3 t / s; and s is at least
// what a team would get.
inline constexpr uint32_t kMostPairs = 2;

// Enqueues the kernel. A context is cut into as many shares as one of the wanted size goes into it, rounded.
// That size is what each team would get of all contexts, or up to twice as much if all pairs then run at
// once; `least` tiles at least. Shares may have a quarter less. Throws std::invalid_argument for unsupported
// sizes, std::runtime_error for errors of CUDA.
void cut(cudaStream_t stream, int device, const Request& request, const Shares& shares);

cudaError_t start(cudaStream_t stream, const Request& request, const Shares& shares);

}  // namespace ep::shares

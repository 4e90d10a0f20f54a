// Host side of the cuts: checks, launch.
#include "kernels/hopper/shares/shares.hpp"

#include "exchange/nvlink/device_guard.hpp"
#include "kernels/hopper/common/requirements.hpp"

namespace ep::shares {

void cut(cudaStream_t stream, int device, const Request& request, const Shares& shares) {
  using hopper::require;
  require(request.heads != 0, "heads", request.heads, "at least 1");
  require(request.teams != 0, "teams", request.teams, "at least 1");
  require(request.tile != 0, "tile", request.tile, "at least 1");
  require(request.least != 0, "least", request.least, "at least 1");
  const uint32_t most = request.sequences + kMostPairs * request.teams / request.heads;
  require(shares.most == most, "most", shares.most, std::to_string(most));
  const cuda::OnDevice here(device);
  cuda::check(start(stream, request, shares), "shares of contexts");
}

}  // namespace ep::shares

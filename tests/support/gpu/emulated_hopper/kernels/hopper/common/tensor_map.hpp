// Tensor maps that the emulated copy engine reads: the sizes themselves in place of the driver's encoding.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;

namespace ep::hopper {

inline int find_encode_tiled() { return 0; }

template <uint32_t kRank>
struct Boxes {
  const void* data;
  cuuint64_t sizes[kRank], pitches[kRank - 1];
  cuuint32_t box[kRank];
};

// Four dimensions.
struct Encoded {
  const void* data;
  uint64_t sizes[4], pitches[3];
  uint32_t box[4];
};
static_assert(sizeof(Encoded) <= sizeof(CUtensorMap));

template <uint32_t kRank>
CUtensorMap map_of(int, const Boxes<kRank>& boxes) {
  static_assert(kRank == 4);
  CUtensorMap map{};
  auto& to = *reinterpret_cast<Encoded*>(&map);
  to.data = boxes.data;
  for (uint32_t i = 0; i < 4; ++i) to.sizes[i] = boxes.sizes[i], to.box[i] = boxes.box[i];
  for (uint32_t i = 0; i < 3; ++i) to.pitches[i] = boxes.pitches[i];
  return map;
}

}  // namespace ep::hopper

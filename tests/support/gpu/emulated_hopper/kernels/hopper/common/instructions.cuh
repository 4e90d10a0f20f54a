// csrc/kernels/hopper/common/instructions.cuh on a CPU, as far as attention of chunks uses it. A block's
// threads are fibers of one thread of the host, so what is in its shared memory needs no atomics. Copies are
// done when they are requested.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/hopper/common/tensor_map.hpp"

namespace ep::hopper {

inline constexpr uint32_t kSwizzledRow = 128;

inline void await_previous_kernel() {}
inline uint32_t warp_number() { return threadIdx.x / 32; }
inline std::byte* dynamic_shared() { return reinterpret_cast<std::byte*>(emulated::dynamic_shared()); }
inline uint32_t shared_address(const void* p) {
  return uint32_t(static_cast<const std::byte*>(p) - dynamic_shared());
}
inline float exp2_fast(float x) { return std::exp2(x); }

// A barrier in shared memory. bytes: that are still to be copied in; negative if they came first.
struct Barrier {
  int32_t bytes;
  uint8_t phase, arrivals, left;
};
static_assert(sizeof(Barrier) == sizeof(uint64_t));
inline Barrier& of(uint64_t* barrier) { return *reinterpret_cast<Barrier*>(barrier); }
inline void end_phase(Barrier& barrier) {
  if (barrier.left == 0 && barrier.bytes == 0) ++barrier.phase, barrier.left = barrier.arrivals;
}

// A barrier of the block by number.
struct Named {
  uint32_t called = 0;
  uint64_t turn = 0;
};
inline thread_local Named named[16];

inline void init_barrier(uint64_t* barrier, uint32_t arrivals) {
  of(barrier) = {0, 0, uint8_t(arrivals), uint8_t(arrivals)};
}
inline void publish_barriers() {
  for (Named& each : named) each = {};
}
inline void arrive(uint64_t* barrier) {
  if (of(barrier).left == 0) std::fputs("a barrier has too many arrivals\n", stderr), std::abort();
  --of(barrier).left, end_phase(of(barrier));
}
inline void arrive_and_expect(uint64_t* barrier, uint32_t bytes) {
  of(barrier).bytes += int32_t(bytes);
  arrive(barrier);
}
inline void await_phase(uint64_t* barrier, uint32_t parity) {
  while ((of(barrier).phase & 1) == parity) emulated::give_way();
  emulated::saw(barrier, of(barrier).phase);
}

inline void pass_by(uint32_t number, uint32_t threads) {
  if (++named[number].called == threads) named[number] = {0, named[number].turn + 1};
}
inline void meet_at(uint32_t number, uint32_t threads) {
  const uint64_t turn = named[number].turn;
  pass_by(number, threads);
  while (named[number].turn == turn) emulated::give_way();
  emulated::saw(&named[number], turn);
}

inline uint32_t load_acquire(const uint32_t* word) {
  emulated::give_way();
  const uint32_t value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  emulated::saw(word, value);
  return value;
}

struct Place {
  uint32_t stage = 0, parity = 0;
  void next(uint32_t stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

inline void publish_to_async() {}
inline void fetch_map(const CUtensorMap*) {}

// Where the byte at a logical address of shared memory is in the 128-byte swizzle.
inline std::byte* swizzled(uint32_t address) {
  return dynamic_shared() + (address ^ (address >> 7 & 7) << 4);
}

// Zeros outside of the tensor; all bytes of the box count.
inline void copy_reused_box(void* to, const CUtensorMap* map, const uint32_t (&at)[4], uint64_t* barrier) {
  const auto& from = *reinterpret_cast<const Encoded*>(map);
  uint32_t address = shared_address(to);
  if (address % 128 != 0) std::fputs("a copy to an odd address\n", stderr), std::abort();
  int32_t bytes = 0;
  for (uint32_t d = 0; d < from.box[3]; ++d)
    for (uint32_t c = 0; c < from.box[2]; ++c)
      for (uint32_t b = 0; b < from.box[1]; ++b)
        for (uint32_t a = 0; a < from.box[0]; a += 8, address += 16, bytes += 16) {
          const uint64_t place[4] = {at[0] + a, at[1] + b, at[2] + c, at[3] + d};
          bool inside = true;
          uint64_t offset = place[0] * 2;
          for (uint32_t i = 0; i < 4; ++i) inside &= place[i] < from.sizes[i];
          for (uint32_t i = 0; i < 3; ++i) offset += place[i + 1] * from.pitches[i];
          if (inside)
            std::memcpy(swizzled(address), static_cast<const std::byte*>(from.data) + offset, 16);
          else
            std::memset(swizzled(address), 0, 16);
        }
  of(barrier).bytes -= bytes;
  end_phase(of(barrier));
}

template <uint32_t kRegisters>
void take_registers() {}
template <uint32_t kRegisters>
void leave_registers() {}

// As the product reads it: 16-byte units in the low bits.
inline uint64_t operand(uint32_t address) { return address >> 4; }
inline uint32_t address_of(uint64_t operand) { return uint32_t(operand & 0x3fff) << 4; }
inline void begin_products() {}
inline void commit_products() {}
template <int kPending>
void await_products() {}

}  // namespace ep::hopper

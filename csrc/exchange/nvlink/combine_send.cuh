// [8] combine_send, on the GPU.
//
// Afterwards, for every unmasked source s and every token t it sent here with an expert of this rank:
//   RANK    s.outputs[bank][this rank][t] = sum over its experts here, in top-k order, of weight * output
//   SOURCE  s.outputs[bank][this rank][t][k] = output, unweighted
// and s.headers of combine [bank][this rank] = (epoch, reduction, wire), with or without rows. Weights given
// with the call go to all ranks first: d.weights[bank][this rank][t][k]. The experts' output is read in
// place. An in-place view of the dispatch is emptied, and its bank freed.
// Grid: block 0 writes headers and weights, the others take parts of (token, source) in turn.
#pragma once

#include "exchange/nvlink/combine_wire.cuh"
#include "exchange/nvlink/dispatch_recv.cuh"

namespace ep::cuda {

// The part of a header on which all callers must agree.
__device__ __forceinline__ uint32_t manner_of(Reduction reduction, Wire wire) {
  return uint32_t(reduction) | uint32_t(wire) << 8;
}

// Sends the weights that were passed with the call. Each thread has several loads in flight. All warps but
// the first do this while the first opens the kernel. The warps that sum wait for the weights.
struct Weights {
  static constexpr uint32_t kAhead = 6;
  uint32_t count;
  float weight[kAhead];

  static __device__ __forceinline__ uint32_t step() { return blockDim.x - kWarp; }
  static __device__ __forceinline__ uint32_t at(uint32_t from, uint32_t i) {
    return from + threadIdx.x - kWarp + i * step();
  }
  __device__ __forceinline__ void load(const CombineSendArgs& a, uint32_t from) {
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) weight[i] = at(from, i) < count ? a.weights[at(from, i)] : 0.0f;
  }
  __device__ __forceinline__ void send(const Device& g, const CombineSendArgs& a, const Opened& o,
                                       uint32_t peers) {
#pragma unroll 1
    for (uint32_t from = 0; from < count;) {
#pragma unroll 1
      for (uint32_t r = 0; r < g.num_ranks; ++r) {
        if (!(peers >> r & 1)) continue;
        std::byte* to = g.regions[r] + g.layout.weight_at(o.bank, g.rank, 0, 0);
#pragma unroll
        for (uint32_t i = 0; i < kAhead; ++i) {
          if (at(from, i) >= count) break;
          store_relaxed(to + at(from, i) * sizeof(uint64_t),
                        uint64_t(bits_of(weight[i])) << 32 | uint32_t(o.epoch));
        }
      }
      from += kAhead * step();
      load(a, from);
    }
  }
};

__device__ __forceinline__ void send_combine_headers(const Device& g, const CombineSendArgs& a,
                                                     std::byte* handle, const Opened& o, Weights& weights) {
  bool paused;
  const uint32_t peers = writable(g, Op::kCombine, Phase::kSendHeader, o, &paused);
  if (threadIdx.x >= kWarp) weights.send(g, a, o, peers);
  if (threadIdx.x < g.num_ranks && peers >> threadIdx.x & 1)
    store_relaxed(g.regions[threadIdx.x] + Head::header(Op::kCombine, o.bank, g.rank),
                  uint64_t(manner_of(a.reduction, a.wire)) << 32 | uint32_t(o.epoch));
  if (threadIdx.x == 0) reinterpret_cast<DeviceHandle*>(handle)->combine_epoch = o.epoch;
}

// Choice `lane` of one received token, as stored by the dispatch.
struct Output {
  int32_t row;  // row of the experts' output, or -1
  float weight;

  static __device__ __forceinline__ Output load(const Device& g, const std::byte* handle, uint32_t source,
                                                uint32_t token) {
    const DeviceLayout& l = g.layout;
    const uint32_t lane = threadIdx.x % kWarp;
    if (lane >= l.top_k) return {-1, 0.0f};
    const uint64_t n = (uint64_t(source) * l.max_tokens + token) * l.top_k + lane;
    return {reinterpret_cast<const int32_t*>(handle + DeviceHandle::entry_rows(l))[n],
            reinterpret_cast<const float*>(handle + DeviceHandle::entry_weights(l))[n]};
  }
};

// Waits for a weight that the token's rank sends with combine.
__device__ __forceinline__ float await_weight(const Device& g, const Opened& o, uint32_t source,
                                              uint32_t token) {
  uint64_t cell = 0;
  await_word<Match::kHeader>(g, g.own() + g.layout.weight_at(o.bank, source, token, threadIdx.x % kWarp),
                             {Op::kCombine, Phase::kSendRows, source, o.epoch}, &cell);
  return float_of(uint32_t(cell >> 32));
}

template <bool kNarrow>
__device__ __forceinline__ void send_sum(const Terms& terms, std::byte* slot, uint32_t begin, uint32_t end,
                                         uint32_t bytes) {
#pragma unroll 1
  for (uint32_t at = begin + threadIdx.x * 16; at < end; at += blockDim.x * 16) {
    Sum sum;
    sum_rows<kNarrow>(terms, at, bytes, sum);
    put16(slot + at, sum.rounded());
  }
}

// Sends bytes [begin, end) of the sum, counted in a bf16 row, in the wire format. Returns the bytes sent.
template <Wire kWire, bool kNarrow>
__device__ __forceinline__ uint32_t send_output(const Device& g, const Terms& terms, std::byte* slot,
                                                uint32_t begin, uint32_t end) {
  if constexpr (kWire == Wire::kBf16) {
    send_sum<kNarrow>(terms, slot, begin, end, uint32_t(g.layout.output_bytes));
    return end - begin;
  } else if constexpr (kWire == Wire::kFp8) {
    send_packed<Fp8Wire>(terms, slot, g.hidden, begin / 32, end / 32);
    return (end - begin) / 256 * 132;
  } else {
    send_packed<Log10Wire>(terms, slot, g.hidden, begin / 32, end / 32);
    return (end - begin) / 256 * 168;
  }
}

template <bool kNarrow>
__device__ __forceinline__ void send_row(const std::byte* row, std::byte* slot, uint32_t begin, uint32_t end,
                                         uint32_t bytes) {
#pragma unroll 1
  for (uint32_t at = begin + threadIdx.x * 16; at < end; at += blockDim.x * 16)
    put16(slot + at, sendable(load_row<kNarrow>(row, at, bytes)));
}

template <Wire kWire, bool kNarrow>
__device__ __forceinline__ Done combine_send(const Device& g, const CombineSendArgs& a, std::byte* handle,
                                             Opened& o, uint32_t block, uint32_t blocks) {
  const DeviceLayout& l = g.layout;
  const auto* h = reinterpret_cast<const DeviceHandle*>(handle);
  // Takes parts of the tokens of all sources in turn, so that not all ranks write to one source at once.
  const uint32_t bytes = uint32_t(l.output_bytes);
  const auto token_of = [&](uint32_t i) { return g.token_of(i) >> a.split; };
  const auto source_of = [&](uint32_t i) { return g.source_of(i); };

  // 1. Start loading what the first rows need before waiting for anything.
  Terms terms = own_terms();
  Output output{-1, 0.0f};
  const uint32_t arrived = h->arrived, dispatch_bank = g.bank_of(h->epoch);
  // Each lane holds the number of tokens of one source. Behind the largest number there is nothing to return.
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t tokens = lane < g.num_ranks && arrived >> lane & 1 ? h->source_tokens[lane] : 0;
  const uint32_t items = __reduce_max_sync(kFull, tokens) * g.num_ranks << a.split;
  if (block != 0 && block - 1 < l.max_tokens * g.num_ranks << a.split)
    output = Output::load(g, handle, source_of(block - 1), token_of(block - 1));
  Weights weights;
  weights.count = block == 0 && a.pushes_weights ? h->tokens * l.top_k : 0;
  if (threadIdx.x < kWarp)
    open(g, Op::kCombine, nullptr, o);
  else
    weights.load(a, 0);
  __syncthreads();
  Done done;
  if (!o.alive) return done;
  if (block == 0) {
    send_combine_headers(g, a, handle, o, weights);
    return done;
  }
  if (block - 1 >= items) return done;
  bool paused;
  const uint32_t returned = arrived & writable(g, Op::kCombine, Phase::kSendRows, o, &paused);
  if (paused) output = Output::load(g, handle, source_of(block - 1), token_of(block - 1));

  // 2. Send the rows.
#pragma unroll 1
  for (uint32_t i = block - 1;;) {
    const uint32_t part = g.token_of(i) & ((1u << a.split) - 1), token = token_of(i), source = source_of(i);
    const bool present = token < __shfl_sync(kFull, tokens, source);  // otherwise the slot holds older data
    if (present && a.frees_dispatch && part == 0) empty_slot(g, dispatch_bank, source, token);
    if (present && returned >> source & 1) {
      const bool valid = output.row >= 0;
      if (valid && a.pushes_weights) output.weight = await_weight(g, o, source, token);
      terms.collect(valid, {const_cast<std::byte*>(static_cast<const std::byte*>(a.expert_out)) +
                                uint64_t(uint32_t(output.row)) * bytes,
                            output.weight, threadIdx.x % kWarp});
      const uint32_t begin = part_at(bytes, part, a.split), end = part_at(bytes, part + 1, a.split);
      uint32_t rows = terms.count, sent = end - begin;
      if (a.reduction == Reduction::kRank) {
        rows = min(rows, 1u);
        std::byte* slot = g.regions[source] + l.output_at(o.bank, g.rank, token, 0);
        if (rows != 0) sent = send_output<kWire, kNarrow>(g, terms, slot, begin, end);
      } else if constexpr (kWire == Wire::kBf16) {
#pragma unroll 1
        for (uint32_t n = 0; n < rows; ++n)
          send_row<kNarrow>(terms.list[n].row,
                            g.regions[source] + l.output_at(o.bank, g.rank, token, terms.list[n].of), begin,
                            end, bytes);
      }
      (source == g.rank ? done.bytes_local : done.bytes) += rows * sent;
    }
    i += blocks - 1;
    if (i >= items) return done;
    output = Output::load(g, handle, source_of(i), token_of(i));
  }
}

}  // namespace ep::cuda

// Every byte offset of an exchange buffer, for host and device code. No other file computes one.
//
// Each rank owns one region, which all ranks write:
//
//   [0, kHeadBytes)            head: cells only; its layout does not depend on the model's sizes
//   meta    [bank][source]     a completion record, ids int32 [T, K], then weights float [T, K]
//   rows    [bank][source][token]           dispatched rows: channels, then scales, padded to 64 bytes
//   combine RANK   [bank][expert rank][token]   partial sums that return
//           SOURCE [bank][expert rank][token][k]   one row per choice
//
// (bank, writing rank, token) alone determines a slot: there are no counters and nothing to clean. No two
// ranks share a slot, so a late write of a masked rank reaches only its own rows.
// Units: bytes.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define EP_HOST_DEVICE __host__ __device__
#else
#define EP_HOST_DEVICE
#endif

namespace ep {

constexpr uint32_t kMaxRanks = 64;  // masks of ranks are one 64-bit word
constexpr uint32_t kMaxBanks = 16;
constexpr uint32_t kMaxTopK = 16;
constexpr uint64_t kLine = 64;    // cells of different writers never share a cache line
constexpr uint64_t kPage = 4096;  // regions of different owners never share a page
constexpr uint32_t kVoteBytes = 64;
constexpr uint32_t kVoteBanks = 2;  // a vote cannot start before all ranks have read the one before the last
constexpr uint32_t kGroup = 128;    // channels per FP8 scale
constexpr uint32_t kPackedGroup = 512;  // channels per int32 of four UE8M0 scales

enum class Payload : uint32_t { kFp32, kBf16, kFp8, kFp8Pow2, kFp8Ue8m0 };
enum class Reduction : uint32_t { kRank, kSource };
enum class Op : uint32_t { kDispatch, kCombine, kVote, kReset };  // the first two have banks
constexpr uint32_t kBankedOps = 2;

EP_HOST_DEVICE constexpr uint64_t align_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

// What all ranks agree on. Compared field by field when a rank attaches.
struct Geometry {
  uint32_t num_ranks, num_experts, max_tokens, hidden, top_k, num_banks;
  Payload payload;
  Reduction reduction;
  uint64_t placement_hash;
};

EP_HOST_DEVICE constexpr bool is_fp8(Payload payload) { return payload >= Payload::kFp8; }

// The fixed part of a rank's region.
struct Head {
  static constexpr uint64_t kIdentity = 0;                   // u64 generation of the group this rank is in
  static constexpr uint64_t kDoorbell = kIdentity + kLine;   // u32 futex word, u32 whom the owner sleeps on
  static constexpr uint64_t kHeartbeat = kDoorbell + kLine;  // Pulse (wait_attribution.hpp)
  static constexpr uint64_t kAbort = kHeartbeat + kLine;     // cell: generation + 1 | writer + 1
  static constexpr uint64_t kAbortStatus = kAbort + kLine;   // [rank] line: status word of each writer
  static constexpr uint64_t kJoin = kAbortStatus + kMaxRanks * kLine;  // [parity][rank] line: cell, u64 epoch
  static constexpr uint64_t kConsumed = kJoin + kVoteBanks * kMaxRanks * kLine;    // [op][rank] cell
  static constexpr uint64_t kHeader = kConsumed + kBankedOps * kMaxRanks * kLine;  // [op][bank][rank] cell
  static constexpr uint64_t kVote = kHeader + kBankedOps * kMaxBanks * kMaxRanks * kLine;
  static constexpr uint64_t kVotePitch = kLine + kVoteBytes;  // cell line, then the record
  static constexpr uint64_t kBytes = align_up(kVote + kVoteBanks * kMaxRanks * kVotePitch, kPage);

  EP_HOST_DEVICE static constexpr uint64_t abort_status(uint32_t rank) { return kAbortStatus + rank * kLine; }
  EP_HOST_DEVICE static constexpr uint64_t join(uint32_t bank, uint32_t rank) {
    return kJoin + (uint64_t(bank) * kMaxRanks + rank) * kLine;
  }
  EP_HOST_DEVICE static constexpr uint64_t consumed(Op op, uint32_t rank) {
    return kConsumed + (uint64_t(op) * kMaxRanks + rank) * kLine;
  }
  EP_HOST_DEVICE static constexpr uint64_t header(Op op, uint32_t bank, uint32_t rank) {
    return kHeader + ((uint64_t(op) * kMaxBanks + bank) * kMaxRanks + rank) * kLine;
  }
  EP_HOST_DEVICE static constexpr uint64_t vote(uint32_t bank, uint32_t rank) {
    return kVote + (uint64_t(bank) * kMaxRanks + rank) * kVotePitch;
  }
};

// The part that depends on the model. Plain data that can be copied to a device.
struct Layout {
  static constexpr uint64_t kNote = 2 * kLine;  // in front of ids, so that one write brings both
  uint32_t num_ranks, max_tokens, top_k, num_banks, choices_per_token;
  uint64_t meta_weights, meta_pitch;  // from ids to weights; size of a block
  uint64_t row_bytes, scale_offset, scale_bytes, row_pitch;
  uint64_t combine_bytes, combine_pitch;  // one row coming back; its slot
  uint64_t meta, rows, combine, total;    // offsets of the three arrays; size of one rank's region

  EP_HOST_DEVICE static constexpr Layout of(const Geometry& g) {
    Layout l{};
    l.num_ranks = g.num_ranks;
    l.max_tokens = g.max_tokens;
    l.top_k = g.top_k;
    l.num_banks = g.num_banks;
    const uint64_t choices = uint64_t(g.max_tokens) * g.top_k;
    l.meta_weights = align_up(choices * sizeof(int32_t), kLine);
    l.meta_pitch = align_up(kNote + l.meta_weights + choices * sizeof(float), kLine);
    const bool fp32 = g.payload == Payload::kFp32;
    l.row_bytes = uint64_t(g.hidden) * (is_fp8(g.payload) ? 1 : fp32 ? 4 : 2);
    l.scale_offset = l.row_bytes;  // H is a multiple of 128 where there are scales: aligned
    l.scale_bytes = !is_fp8(g.payload)                ? 0
                    : g.payload == Payload::kFp8Ue8m0 ? uint64_t(g.hidden) / kPackedGroup * sizeof(int32_t)
                                                      : uint64_t(g.hidden) / kGroup * sizeof(float);
    l.row_pitch = align_up(l.row_bytes + l.scale_bytes, kLine);
    l.combine_bytes = uint64_t(g.hidden) * (fp32 ? 4 : 2);
    l.combine_pitch = align_up(l.combine_bytes, kLine);
    // A SOURCE slot is large enough for RANK too: direct users may choose per operation.
    l.choices_per_token = g.reduction == Reduction::kSource ? g.top_k : 1;
    l.meta = Head::kBytes;
    l.rows = align_up(l.meta + uint64_t(g.num_banks) * g.num_ranks * l.meta_pitch, kPage);
    l.combine = align_up(l.rows + uint64_t(g.num_banks) * g.num_ranks * g.max_tokens * l.row_pitch, kPage);
    l.total = align_up(l.combine + uint64_t(g.num_banks) * g.num_ranks * g.max_tokens * l.choices_per_token *
                                       l.combine_pitch,
                       kPage);
    return l;
  }

  // Used if rows are in device memory. A rank receives into device_in(), laid out from `rows` on, and sends
  // expert outputs from device_out(), laid out from `combine` on. Rows that it dispatches are sent from the
  // slots where its own rows arrive.
  EP_HOST_DEVICE constexpr uint64_t device_in() const { return total - rows; }
  EP_HOST_DEVICE constexpr uint64_t device_out() const { return total - combine; }

  EP_HOST_DEVICE constexpr uint64_t note_at(uint32_t bank, uint32_t source) const {
    return meta + (uint64_t(bank) * num_ranks + source) * meta_pitch;
  }
  EP_HOST_DEVICE constexpr uint64_t ids_at(uint32_t bank, uint32_t source) const {
    return note_at(bank, source) + kNote;
  }
  EP_HOST_DEVICE constexpr uint64_t weights_at(uint32_t bank, uint32_t source) const {
    return ids_at(bank, source) + meta_weights;
  }
  EP_HOST_DEVICE constexpr uint64_t row_at(uint32_t bank, uint32_t source, uint32_t token) const {
    return rows + ((uint64_t(bank) * num_ranks + source) * max_tokens + token) * row_pitch;
  }
  EP_HOST_DEVICE constexpr uint64_t rank_sum_at(uint32_t bank, uint32_t expert_rank, uint32_t token) const {
    return choice_at(bank, expert_rank, 0, 0) + token * combine_pitch;
  }
  EP_HOST_DEVICE constexpr uint64_t choice_at(uint32_t bank, uint32_t expert_rank, uint32_t token,
                                              uint32_t k) const {
    const uint64_t block = (uint64_t(bank) * num_ranks + expert_rank) * max_tokens * choices_per_token;
    return combine + (block + uint64_t(token) * choices_per_token + k) * combine_pitch;
  }
};

// What a region in GPU memory holds behind `Head`. The data is its own flag: an empty slot holds all ones,
// senders never write a word of all ones, and the reader restores the ones. Words that many blocks read carry
// their epoch instead. Banks are freed one by one, because receives may end in any order.
//
//   headers  [bank][source][word]                u64 value << 32 | epoch
//              word 0: tokens, kHasWeights; word 1 + i: rows for experts 2i and 2i + 1 of the owner
//   slots    [bank][source][token]               row, scales, then per choice {place, weight}
//   outputs  [bank][expert rank][token][choice]  rows that return
//   weights  [bank][source][token][choice]       u64 weight << 32 | epoch, if they are sent with combine
//   read     [op][bank][reader]                  u64 epoch that the reader has read there
struct DeviceLayout {
  static constexpr uint32_t kWord = 16;            // bytes of one access
  static constexpr uint32_t kAbsent = 0xfffffffe;  // place: no expert here
  uint32_t num_ranks, max_tokens, top_k, choices, num_banks, header_words, position_bits;
  uint64_t row_bytes, scale_offset, entry_offset, slot_pitch, output_bytes, output_pitch;
  uint64_t headers, slots, outputs, weights, read_cells, total;

  EP_HOST_DEVICE static constexpr DeviceLayout of(const Geometry& g) {
    const Layout l = Layout::of(g);
    DeviceLayout d{};
    d.num_ranks = g.num_ranks;
    d.max_tokens = g.max_tokens;
    d.top_k = g.top_k;
    d.choices = l.choices_per_token;
    d.num_banks = g.num_banks;
    d.header_words = 1 + (g.num_experts + 1) / 2;
    while (1u << d.position_bits < g.max_tokens) ++d.position_bits;
    d.row_bytes = l.row_bytes;
    d.scale_offset = align_up(l.row_bytes, kWord);
    d.entry_offset = align_up(d.scale_offset + l.scale_bytes, kWord);
    d.slot_pitch = align_up(d.entry_offset + g.top_k * sizeof(uint64_t), 2 * kLine);
    d.output_bytes = l.combine_bytes;
    d.output_pitch = align_up(l.combine_bytes, 2 * kLine);
    const uint64_t blocks = uint64_t(g.num_banks) * g.num_ranks, tokens = blocks * g.max_tokens;
    d.headers = Head::kBytes;
    d.weights = align_up(d.headers + blocks * d.header_words * sizeof(uint64_t), kPage);
    d.read_cells = align_up(d.weights + tokens * g.top_k * sizeof(uint64_t), kPage);
    d.slots = align_up(d.read_cells + kBankedOps * blocks * sizeof(uint64_t), kPage);
    d.outputs = align_up(d.slots + tokens * d.slot_pitch, kPage);
    d.total = align_up(d.outputs + tokens * d.choices * d.output_pitch, kPage);
    return d;
  }

  EP_HOST_DEVICE constexpr uint64_t header_at(uint32_t bank, uint32_t source, uint32_t word) const {
    return headers + ((uint64_t(bank) * num_ranks + source) * header_words + word) * sizeof(uint64_t);
  }
  EP_HOST_DEVICE constexpr uint64_t slot_at(uint32_t bank, uint32_t source, uint32_t token) const {
    return slots + ((uint64_t(bank) * num_ranks + source) * max_tokens + token) * slot_pitch;
  }
  EP_HOST_DEVICE constexpr uint64_t output_at(uint32_t bank, uint32_t expert_rank, uint32_t token,
                                              uint32_t choice) const {
    const uint64_t row = ((uint64_t(bank) * num_ranks + expert_rank) * max_tokens + token) * choices + choice;
    return outputs + row * output_pitch;
  }
  EP_HOST_DEVICE constexpr uint64_t weight_at(uint32_t bank, uint32_t source, uint32_t token,
                                              uint32_t choice) const {
    const uint64_t row = (uint64_t(bank) * num_ranks + source) * max_tokens + token;
    return weights + (row * top_k + choice) * sizeof(uint64_t);
  }
  EP_HOST_DEVICE constexpr uint64_t read_cell(Op op, uint32_t bank, uint32_t reader) const {
    return read_cells + ((uint64_t(op) * num_banks + bank) * num_ranks + reader) * sizeof(uint64_t);
  }
};

// What follows DeviceLayout in the region of a rank that also moves many rows at once ("bulk"): cells, then a
// heap. Ranks receive into blocks of their own heap, whose offset they publish with every operation, so a row
// is written once, at its final place. Operations are numbered alike on all ranks.
//
//   done    [source] line              u64 kOperation per operation that the source has finished writing
//   ready   [parity][receiver] line    u64 offset / kUnit << 32 | operation, u64 capacity << 32 | operation
//   counts  [parity][source]           u32 rows for each rank, then rows for each expert of this rank
//   chunks  [expert rank][chunk]       u64 last operation whose rows of this chunk have returned
struct BulkLayout {
  static constexpr uint32_t kMaxRanks = 8, kMaxLocalExperts = 1024;
  static constexpr uint32_t kChunkRows = 2, kMaxChunks = 1 << 16;
  static constexpr uint32_t kMaxRows = kChunkRows * kMaxChunks;  // from one rank to another
  static constexpr uint64_t kUnit = 256;                         // of offsets and sizes in the heap
  uint64_t done, ready, counts, chunks, heap, total;             // offsets in the region; its size

  EP_HOST_DEVICE static constexpr BulkLayout of(uint64_t begin, uint64_t heap_bytes) {
    BulkLayout b{};
    b.done = begin;
    b.ready = b.done + kMaxRanks * kLine;
    b.counts = b.ready + 2 * kMaxRanks * kLine;
    b.chunks = align_up(b.counts + 2 * kMaxRanks * counts_pitch(), kPage);
    b.heap = align_up(b.chunks + uint64_t(kMaxRanks) * kMaxChunks * sizeof(uint64_t), kPage);
    b.total = b.heap + align_up(heap_bytes, kPage);
    if (heap_bytes == 0) b.total = begin;
    return b;
  }
  EP_HOST_DEVICE static constexpr uint64_t counts_pitch() {
    return (kMaxRanks + kMaxLocalExperts) * sizeof(uint32_t);
  }
  EP_HOST_DEVICE constexpr uint64_t done_at(uint32_t source) const { return done + source * kLine; }
  EP_HOST_DEVICE constexpr uint64_t ready_at(uint32_t parity, uint32_t receiver) const {
    return ready + (parity * kMaxRanks + receiver) * kLine;
  }
  EP_HOST_DEVICE constexpr uint64_t counts_at(uint32_t parity, uint32_t source) const {
    return counts + (parity * kMaxRanks + source) * counts_pitch();
  }
  EP_HOST_DEVICE constexpr uint64_t chunk_at(uint32_t expert_rank, uint32_t chunk) const {
    return chunks + (uint64_t(expert_rank) * kMaxChunks + chunk) * sizeof(uint64_t);
  }
};

// The arrays of one block of a heap. `scales`, `ids` ... are offsets in the block; `total` is its size.
struct BulkBlock {
  uint64_t scales, ids, weights, sources, total;

  // rows: capacity. scale_words: 32-bit words a row. top_k: 0 = without ids and weights. with_ids: combine
  // returns weights alone. with_sources: the number of each row's token at its source.
  EP_HOST_DEVICE static constexpr BulkBlock of(uint64_t rows, uint64_t row_bytes, uint32_t scale_words,
                                               uint32_t top_k, bool with_ids, bool with_sources) {
    BulkBlock b{};
    b.scales = align_up(rows * row_bytes, BulkLayout::kUnit);
    b.ids = align_up(b.scales + rows * scale_words * sizeof(uint32_t), BulkLayout::kUnit);
    b.weights = align_up(b.ids + (with_ids ? rows * top_k * sizeof(int64_t) : 0), BulkLayout::kUnit);
    b.sources = align_up(b.weights + rows * top_k * sizeof(float), BulkLayout::kUnit);
    b.total = align_up(b.sources + (with_sources ? rows * sizeof(int32_t) : 0), BulkLayout::kUnit);
    return b;
  }
};

// What a dispatch on a GPU stores for the later halves, in one block of the caller's device memory.
struct DeviceHandle {
  uint64_t epoch, combine_epoch;
  uint32_t tokens, arrived;  // of this rank; bit per rank whose header arrived
  uint32_t sent_to, unused;  // bit per rank
  uint32_t source_tokens[kMaxRanks];

  // Arrays that follow it. places, weights: [T, K] of this rank, place = owner << 24 | local expert, or -1.
  // entries: [R * max_tokens, K] row of the view or -1, and its weight.
  EP_HOST_DEVICE static constexpr uint64_t places() { return align_up(sizeof(DeviceHandle), kLine); }
  EP_HOST_DEVICE static constexpr uint64_t weights(const DeviceLayout& l) {
    return align_up(places() + uint64_t(l.max_tokens) * l.top_k * sizeof(int32_t), kLine);
  }
  EP_HOST_DEVICE static constexpr uint64_t entry_rows(const DeviceLayout& l) {
    return align_up(weights(l) + uint64_t(l.max_tokens) * l.top_k * sizeof(float), kLine);
  }
  EP_HOST_DEVICE static constexpr uint64_t entry_weights(const DeviceLayout& l) {
    return align_up(entry_rows(l) + uint64_t(l.num_ranks) * l.max_tokens * l.top_k * sizeof(int32_t), kLine);
  }
  EP_HOST_DEVICE static constexpr uint64_t bytes(const DeviceLayout& l) {
    return align_up(entry_weights(l) + uint64_t(l.num_ranks) * l.max_tokens * l.top_k * sizeof(float), kLine);
  }
};

// A group's memory on one host: a page that identifies the group, then the regions of the host's ranks in
// rank order, `pitch` bytes apart.
struct GroupPage {
  static constexpr uint64_t kMagic = 0x0031'5045'5645'5345;
  static constexpr uint32_t kVersion = 2;
  uint64_t magic;
  uint32_t version;
  uint32_t regions;
  uint64_t pitch;
  Geometry geometry;

  EP_HOST_DEVICE static constexpr uint64_t region(const Layout& l, uint32_t rank) {
    return kPage + rank * l.total;
  }
  EP_HOST_DEVICE static constexpr uint64_t bytes(const Layout& l) { return region(l, l.num_ranks); }
};
static_assert(sizeof(GroupPage) <= kPage);

}  // namespace ep

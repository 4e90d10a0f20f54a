// Allocates and resets a rank's region and device state; reads its statistics.
#include "exchange/nvlink/group.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "exchange/nvlink/await_stream.hpp"
#include "exchange/nvlink/kernel_times.hpp"

namespace ep::cuda {

namespace {

// Adds the times of a kernel that no other kernel followed. bookkeeping.cuh adds those of all others.
void add_times(Totals& t, Slot slot, const Scratch& s) {
  if (s.end_ns == 0 || s.start_ns == 0) return;
  const uint32_t of = uint32_t(op_of(slot));
  uint64_t longest = 0;
  for (uint32_t peer = 0; peer < kMaxPeers; ++peer) {
    longest = std::max(longest, s.wait_ns[peer]);
    t.peer_wait_ns[of][peer] += s.wait_ns[peer];
    t.peer_wait_max_ns[of][peer] = std::max(t.peer_wait_max_ns[of][peer], s.wait_ns[peer]);
  }
  const KernelTimes times{s.start_ns, s.sent_ns, s.end_ns, s.both != 0, longest};
  for_each_time(slot, times, [&](Op op, Part part, uint64_t ns) {
    ++t.times[uint32_t(op)][uint32_t(part)][bucket_of(ns)];
    t.sums[uint32_t(op)][uint32_t(part)] += ns;
  });
}

// The same for an operation for many rows.
void add_bulk_times(Totals& t, Op op, const BulkTimes& s) {
  if (s.end_ns == 0) return;
  const uint32_t kind = kind_of(op, true);
  uint64_t longest = 0;
  for (uint32_t peer = 0; peer < kMaxPeers; ++peer) {
    longest = std::max(longest, s.wait_ns[peer]);
    t.peer_wait_ns[kind][peer] += s.wait_ns[peer];
    t.peer_wait_max_ns[kind][peer] = std::max(t.peer_wait_max_ns[kind][peer], s.wait_ns[peer]);
  }
  for_each_bulk_time(op, s, longest, [&](Part part, uint64_t ns) {
    ++t.times[kind][uint32_t(part)][bucket_of(ns)];
    t.sums[kind][uint32_t(part)] += ns;
  });
}

}  // namespace

Group::Group(const Geometry& g, uint32_t rank, const std::vector<int32_t>& placement, const Options& options)
    : options_(options) {
  const OnDevice here(options.device);
  device_.layout = DeviceLayout::of(g);
  device_.bulk = BulkLayout::of(device_.layout.total, options.heap_bytes);
  for (uint32_t r = 0; r < g.num_ranks; ++r)
    regions_[r] = r == rank ? nvlink::Region::create(options.device, device_.bulk.total, options.idle_seconds)
                            : nvlink::Region::reserve(options.device, device_.bulk.total);
  std::vector<uint32_t> table(placement.size());
  for (size_t e = 0; e < placement.size(); ++e) {
    uint32_t& count = device_.experts_of[placement[e]];
    table[e] = uint32_t(placement[e]) << kOwnerShift | count++;
  }
  device_.rank = rank;
  device_.num_ranks = g.num_ranks;
  device_.rank_inverse = ((1ull << 32) + g.num_ranks - 1) / g.num_ranks;
  device_.num_experts = g.num_experts;
  device_.local_experts = device_.experts_of[rank];
  device_.hidden = g.hidden;
  device_.scale_words = uint32_t(Layout::of(g).scale_bytes / sizeof(uint32_t));
  for (uint32_t r = 1; r < g.num_ranks; ++r)
    device_.experts_before[r] = device_.experts_before[r - 1] + device_.experts_of[r - 1];
  device_.payload = g.payload;
  for (uint32_t r = 0; r < g.num_ranks; ++r) device_.regions[r] = regions_[r]->data();

  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, options.device),
        "cudaDeviceGetAttribute");
  num_sms_ = uint32_t(sms);
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, options.device),
        "cudaDeviceGetAttribute");
  overlaps_ = major >= 9;
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaMalloc(reinterpret_cast<void**>(&device_.state), sizeof(DeviceState)), "cudaMalloc");
  table.resize((table.size() + 3) / 4 * 4);  // kernels read four at a time
  check(cudaMalloc(reinterpret_cast<void**>(&table_), table.size() * sizeof(uint32_t)), "cudaMalloc");
  const size_t counters = (device_.local_experts + 1) * sizeof(uint64_t);
  check(cudaMalloc(reinterpret_cast<void**>(&device_.expert_tokens), counters), "cudaMalloc");
  check(cudaMemsetAsync(device_.expert_tokens, 0, counters, stream_), "cudaMemset");
  const size_t most_copied = std::max({sizeof(DeviceState), sizeof(DelayState), counters});
  check(cudaHostAlloc(&copied_, most_copied, cudaHostAllocPortable), "cudaHostAlloc");
  check(cudaHostAlloc(reinterpret_cast<void**>(&device_.status), sizeof(Status),
                      cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
  *device_.status = {};
  if (options.heap_bytes != 0) {
    check(cudaHostAlloc(reinterpret_cast<void**>(&report_), sizeof(BulkReport),
                        cudaHostAllocMapped | cudaHostAllocPortable),
          "cudaHostAlloc");
    *report_ = {};
  }
  device_.table = table_;
  copy_in(table_, table.data(), table.size() * sizeof(uint32_t));
  DeviceState state{};
  state.control.timeout_ns = options.timeout_ns;
  state.control.mask_on_timeout = options.mask_on_timeout;
  copy_in(device_.state, &state, sizeof state);
  empty_slots();
  start_bulk(0);
}

// Operations up to this one are over, here and on all other ranks.
void Group::start_bulk(uint64_t operation) {
  if (options_.heap_bytes == 0) return;
  const uint64_t all = operation << kTicketShift;
  const uint32_t none[2][2] = {};
  copy_in(&device_.state->bulk_operations, &all, sizeof all);
  copy_in(&device_.state->bulk_taken, none, sizeof none);
  for (uint32_t r = 0; r < device_.num_ranks; ++r)
    copy_in(device_.own() + device_.bulk.done_at(r), &all, sizeof all);
}

void Group::empty_slots() {
  const OnDevice here(options_.device);
  std::byte* slots = device_.own() + device_.layout.slots;
  check(cudaMemsetAsync(slots, 0xff, device_.layout.total - device_.layout.slots, stream_), "cudaMemset");
  await("emptying the slots of the exchange");
}

Group::~Group() {
  watch_.reset();
  const OnDevice here(options_.device);
  // Kernels in flight still use all of this. To free it beside one that hangs would wait for that.
  if (!ends_work(options_.device, double(options_.timeout_ns) / 1e9 + options_.idle_seconds)) {
    for (auto& region : regions_) region.release();
    return;
  }
  cudaFree(device_.state);
  cudaFree(table_);
  cudaFree(device_.expert_tokens);
  cudaFree(delay_);
  cudaFreeHost(device_.status);
  cudaFreeHost(report_);
  cudaFreeHost(copied_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void Group::attach(uint32_t rank, int fd) {
  const OnDevice here(options_.device);
  regions_[rank]->attach(options_.device, fd);
}

uint64_t Group::bytes() const {
  return regions_[device_.rank]->bytes() + sizeof(DeviceState) + device_.num_experts * sizeof(uint32_t) +
         (device_.local_experts + 1) * sizeof(uint64_t);
}

Status Group::status() const {
  const volatile Status* seen = device_.status;
  if (seen->code == Code::kOk) return {};
  __sync_synchronize();
  return *device_.status;
}

DeviceState Group::snapshot(std::vector<uint64_t>* expert_tokens) {
  DeviceState state;
  expert_tokens->resize(device_.local_experts);
  copy_out(&state, device_.state, sizeof state);
  copy_out(expert_tokens->data(), device_.expert_tokens, device_.local_experts * sizeof(uint64_t));
  return state;
}

DeviceState Group::flushed(std::vector<uint64_t>* expert_tokens) {
  DeviceState state = snapshot(expert_tokens);
  for (uint32_t slot = 0; slot < kSlots; ++slot)
    for (const Scratch& s : state.scratch[slot]) add_times(state.totals, Slot(slot), s);
  for (Op op : {Op::kDispatch, Op::kCombine}) add_bulk_times(state.totals, op, state.bulk[uint32_t(op)]);
  return state;
}

void Group::copy_in(void* to, const void* from, size_t bytes) {
  const OnDevice here(options_.device);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpy");
  await("a copy to the state of the exchange");
}

// By way of pinned memory: the runtime waits for a copy to any other, without a deadline. One that comes
// after the deadline finds this memory still there.
void Group::copy_out(void* to, const void* from, size_t bytes) {
  const OnDevice here(options_.device);
  const std::lock_guard lock(copying_);
  check(cudaMemcpyAsync(copied_, from, bytes, cudaMemcpyDeviceToHost, stream_), "cudaMemcpy");
  await("a copy of the state of the exchange");
  std::memcpy(to, copied_, bytes);
}

void Group::await(const char* what) { await_stream(stream_, options_.idle_seconds, what); }

void Group::reset(uint64_t base, uint64_t masked) {
  DeviceState state{};
  {
    std::vector<uint64_t> unused;
    state = flushed(&unused);  // totals never go back: they were reported with the times of pending kernels
  }
  const Control before = state.control;
  state.control = {};
  for (Tally& tally : state.tally) {
    tally.sends = base << kTicketShift;
    std::memset(tally.reads, 0, sizeof tally.reads);
  }
  state.control.base = base;
  state.control.masked_by_host = state.control.absent = uint32_t(masked);
  state.control.timeout_ns = before.timeout_ns;
  state.control.mask_on_timeout = before.mask_on_timeout;
  state.control.num_faults = before.num_faults;
  std::memset(state.published, 0, sizeof state.published);
  std::memset(state.scratch, 0, sizeof state.scratch);
  std::memset(state.bulk, 0, sizeof state.bulk);
  std::memset(state.masked_since_ns, 0, sizeof state.masked_since_ns);
  const std::lock_guard lock(masking_);
  masked_by_host_ = uint32_t(masked);
  base_ = base;
  const uint64_t none = 0;
  copy_in(device_.state, &state, sizeof state);
  copy_in(device_.own() + Head::kAbort, &none, sizeof none);
  empty_slots();
  start_bulk(base);
  if (delay_ != nullptr) set_delay(0);  // other ranks may have other GPUs now
  *device_.status = {};
}

void Group::set_faults(const std::vector<DeviceFault>& faults) {
  if (faults.size() > kMaxFaults)
    throw std::runtime_error("at most " + std::to_string(kMaxFaults) + " faults");
  const uint32_t count = uint32_t(faults.size());
  if (count != 0) copy_in(device_.state->faults, faults.data(), count * sizeof(DeviceFault));
  copy_in(&device_.state->control.num_faults, &count, sizeof count);
}

void Group::set_delay(uint64_t ns) {
  const OnDevice here(options_.device);
  if (delay_ == nullptr) {
    check(cudaMalloc(reinterpret_cast<void**>(&delay_), sizeof(DelayState)), "cudaMalloc");
    const DelayState none{};
    copy_in(delay_, &none, sizeof none);
  }
  copy_in(&delay_->delay_ns, &ns, sizeof ns);
}

void Group::empty_clock_cells() {
  const OnDevice here(options_.device);
  const uint64_t bytes = answer_at(kMaxPeers) - asked_at(0);
  check(cudaMemsetAsync(device_.own() + asked_at(0), 0, bytes, stream_), "cudaMemset");
  await("emptying the cells of clocks");
}

std::vector<int64_t> Group::clocks_ahead() {
  DelayState state;
  copy_out(&state, delay_, sizeof state);
  return {state.ahead_ns, state.ahead_ns + device_.num_ranks};
}

void Group::mask(uint64_t ranks) {
  const std::lock_guard lock(masking_);  // an older mask must not overwrite a newer one
  masked_by_host_ |= uint32_t(ranks);
  copy_in(&device_.state->control.masked_by_host, &masked_by_host_, sizeof masked_by_host_);
}

void Group::abort() {
  const std::lock_guard lock(masking_);
  abort_locked();
}

// As a peer's kernel would, see fail(): with what it says of the error, then with the cell that names it.
void Group::abort_locked() {
  const uint32_t rank = device_.rank;
  const Status status{Code::kRequested,          Op::kVote, Phase::kGather, rank, rank, 0,
                      uint32_t(Code::kRequested)};  // `seen` is what the kernels pass on
  copy_in(device_.own() + Head::abort_status(rank), &status, sizeof status);
  const uint64_t cell = uint64_t(rank + 1) << 32 | (uint32_t(base_) + 1);
  copy_in(device_.own() + Head::kAbort, &cell, sizeof cell);
  aborted_base_ = base_;
}

void Group::watch(std::byte* head) {
  watch_ = std::make_unique<AbortWatch>(head, [this](const AbortWatch& watch) {
    if (cudaSetDevice(options_.device) != cudaSuccess) return;  // of this thread, which has no other
    const std::lock_guard lock(masking_);
    try {  // a reset meanwhile has ended the abort
      if (watch.aborted() && aborted_base_ != base_) abort_locked();
    } catch (const std::runtime_error&) {  // of the GPU: the rank's own thread finds it too
    }
  });
}

}  // namespace ep::cuda

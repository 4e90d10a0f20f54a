// Host side of one rank's end of a group of GPUs: its region, its peers' regions, its state in device memory.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "exchange/nvlink/abort_watch.hpp"
#include "exchange/nvlink/bulk.hpp"
#include "exchange/nvlink/delay.hpp"
#include "exchange/nvlink/device_guard.hpp"
#include "exchange/nvlink/peer_memory.hpp"
#include "exchange/nvlink/state.hpp"

namespace ep::cuda {

struct Options {
  int device;
  uint64_t timeout_ns;
  bool mask_on_timeout;
  uint64_t heap_bytes;  // for bulk.hpp; 0 = none
  double idle_seconds;  // for work that waits for no peer, such as copies of the state
};

// Throws std::runtime_error if the GPU or its driver refuses something, or the GPU does not end a copy.
class Group {
 public:
  Group(const Geometry& geometry, uint32_t rank, const std::vector<int32_t>& placement,
        const Options& options);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int export_fd() const { return regions_[device_.rank]->export_fd(); }
  // Maps a peer's region, or that of its successor. No kernel of the group may be running.
  void attach(uint32_t rank, int fd);

  const Device& device() const { return device_; }
  int ordinal() const { return options_.device; }
  uint32_t num_sms() const { return num_sms_; }
  bool overlaps() const { return overlaps_; }  // see Launch
  uint64_t bytes() const;                      // of device memory

  Status status() const;  // the first failure so far; needs no synchronisation
  // Copies the state without stopping the caller's streams. flushed() includes times that no kernel has added
  // to the totals yet.
  DeviceState snapshot(std::vector<uint64_t>* expert_tokens);
  DeviceState flushed(std::vector<uint64_t>* expert_tokens);
  // Starts a new generation; no kernel of the group may be running. Epochs up to `base` are over.
  void reset(uint64_t base, uint64_t masked);
  void mask(uint64_t ranks);  // also affects running kernels; any thread may call it
  // Ends the waits of this rank's kernels until reset(): they report kAborted. Any thread may call it.
  void abort();
  // From now on calls abort() once the group in host memory is aborted. head: this rank's, see AbortWatch.
  void watch(std::byte* head);
  void set_faults(const std::vector<DeviceFault>& faults);

  // See delay.hpp. The first call of set_delay() makes its state, null before; a reset sets 0.
  DelayState* delay_state() const { return delay_; }
  void set_delay(uint64_t ns);          // replays of captured kernels have the new one too
  void empty_clock_cells();             // before compare_clocks(); no rank may be running it
  std::vector<int64_t> clocks_ahead();  // by rank, ns: how far its clock is ahead of this rank's

  // What bulk_plan() reports: host memory that the kernel writes, or null without a heap.
  volatile BulkReport* report() const { return report_; }
  std::byte* heap() const { return device_.own() + device_.bulk.heap; }

 private:
  void empty_slots();
  void start_bulk(uint64_t operation);
  void abort_locked();
  void copy_in(void* to, const void* from, size_t bytes);
  void copy_out(void* to, const void* from, size_t bytes);
  void await(const char* what);

  Options options_;
  Device device_{};
  uint32_t num_sms_ = 0;
  bool overlaps_ = false;
  std::array<std::unique_ptr<nvlink::Region>, kMaxPeers> regions_;
  uint32_t* table_ = nullptr;
  BulkReport* report_ = nullptr;
  DelayState* delay_ = nullptr;
  std::mutex masking_;  // also guards base_ and aborted_base_
  uint64_t base_ = 0, aborted_base_ = UINT64_MAX;
  uint32_t masked_by_host_ = 0;  // bits of ranks; kernels keep their own mask
  std::mutex copying_;           // guards copied_, pinned memory
  void* copied_ = nullptr;
  cudaStream_t stream_ = nullptr;  // for copies of state; never waits for the caller's streams
  std::unique_ptr<AbortWatch> watch_;
};

}  // namespace ep::cuda

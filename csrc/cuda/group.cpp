#include "cuda/group.hpp"

#include <stdexcept>
#include <string>

namespace ep::cuda {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

Group::Group(const Geometry& g, uint32_t rank, const std::vector<int32_t>& placement, const Options& options)
    : options_(options) {
  regions_[rank] = nvlink::Region::create(options.device, DeviceLayout::of(g).total);
  std::vector<uint32_t> table(placement.size());
  for (size_t e = 0; e < placement.size(); ++e) {
    uint32_t& count = device_.experts_of[placement[e]];
    table[e] = uint32_t(placement[e]) << kOwnerShift | count++;
  }
  device_.layout = Layout::of(g);
  device_.cells = DeviceLayout::of(g);
  device_.rank = rank;
  device_.num_ranks = g.num_ranks;
  device_.num_experts = g.num_experts;
  device_.local_experts = device_.experts_of[rank];
  device_.hidden = g.hidden;
  device_.payload = g.payload;
  device_.regions[rank] = regions_[rank]->data();

  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, options.device),
        "cudaDeviceGetAttribute");
  num_sms_ = uint32_t(sms);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaMalloc(reinterpret_cast<void**>(&device_.state), sizeof(DeviceState)), "cudaMalloc");
  check(cudaMalloc(reinterpret_cast<void**>(&table_), table.size() * sizeof(uint32_t)), "cudaMalloc");
  const size_t counters = (device_.local_experts + 1) * sizeof(uint64_t);
  check(cudaMalloc(reinterpret_cast<void**>(&device_.expert_tokens), counters), "cudaMalloc");
  check(cudaMemset(device_.expert_tokens, 0, counters), "cudaMemset");
  check(cudaHostAlloc(reinterpret_cast<void**>(&device_.status), sizeof(Status),
                      cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
  *device_.status = {};
  device_.table = table_;
  copy_in(table_, table.data(), table.size() * sizeof(uint32_t));
  DeviceState state{};
  state.control.timeout_ns = options.timeout_ns;
  state.control.mask_on_timeout = options.mask_on_timeout;
  copy_in(device_.state, &state, sizeof state);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

Group::~Group() {
  cudaSetDevice(options_.device);
  cudaDeviceSynchronize();  // kernels in flight still use all of this
  cudaFree(device_.state);
  cudaFree(table_);
  cudaFree(device_.expert_tokens);
  cudaFreeHost(device_.status);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void Group::attach(uint32_t rank, int fd) {
  regions_[rank] = nvlink::Region::import(options_.device, device_.cells.total, fd);
  device_.regions[rank] = regions_[rank]->data();
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
  check(cudaSetDevice(options_.device), "cudaSetDevice");
  DeviceState state;
  expert_tokens->resize(device_.local_experts);
  check(cudaMemcpyAsync(&state, device_.state, sizeof state, cudaMemcpyDeviceToHost, stream_), "cudaMemcpy");
  check(cudaMemcpyAsync(expert_tokens->data(), device_.expert_tokens,
                        device_.local_experts * sizeof(uint64_t), cudaMemcpyDeviceToHost, stream_),
        "cudaMemcpy");
  check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  return state;
}

void Group::copy_in(void* to, const void* from, size_t bytes) {
  check(cudaSetDevice(options_.device), "cudaSetDevice");
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpy");
  check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

void Group::reset(uint64_t base, uint64_t masked) {
  Control control{};
  for (uint64_t& next : control.next) next = base;
  control.base = base;
  control.masked = masked;
  control.timeout_ns = options_.timeout_ns;
  control.mask_on_timeout = options_.mask_on_timeout;
  const Scratch scratch[kSlots]{};
  const uint64_t none = 0;
  copy_in(&device_.state->control, &control, sizeof control);
  copy_in(device_.state->scratch, scratch, sizeof scratch);
  copy_in(device_.own() + Head::kAbort, &none, sizeof none);
  *device_.status = {};
}

void Group::mask(uint64_t ranks) {
  std::vector<uint64_t> unused;
  const uint64_t masked = snapshot(&unused).control.masked | ranks;
  copy_in(&device_.state->control.masked, &masked, sizeof masked);
}

}  // namespace ep::cuda

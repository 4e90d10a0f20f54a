#include "model/pool.hpp"

#include <algorithm>
#include <chrono>
#include <new>

namespace ep::model {
namespace {

constexpr std::align_val_t kAlignment{64};
// Longer than the Python between two kernels of a layer, shorter than a scheduler quantum.
constexpr std::chrono::microseconds kSpin{200};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void* Scratch::get(size_t bytes) {
  if (bytes > size_) {
    size_ = std::max(bytes, 2 * size_);
    memory_.reset(::operator new(size_, kAlignment));
  }
  return memory_.get();
}

void Scratch::Free::operator()(void* memory) const { ::operator delete(memory, kAlignment); }

Pool::Pool(int threads) : scratch_(static_cast<size_t>(std::max(threads, 1))) {
  for (size_t worker = 1; worker < scratch_.size(); ++worker)
    workers_.emplace_back([this, worker] { work(worker); });
}

Pool::~Pool() {
  stop_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run(int64_t count, Task task, const void* context) {
  job_ = {count, task, context};
  next_.store(0, std::memory_order_relaxed);
  if (workers_.empty() || count <= 1) return drain(scratch_[0]);
  running_.store(static_cast<uint32_t>(workers_.size()), std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);  // publishes job_ and next_
  epoch_.notify_all();
  drain(scratch_[0]);
  // Every worker must have left the job before the next one overwrites it; one that was asleep has little to
  // do.
  while (running_.load(std::memory_order_acquire) != 0) {
    for (int i = 0; i < 64; ++i) pause();
    std::this_thread::yield();
  }
}

void Pool::drain(Scratch& scratch) {
  for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < job_.count;)
    job_.task(job_.context, i, scratch);
}

void Pool::work(size_t worker) {
  for (uint32_t seen = 0;;) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    while (epoch_.load(std::memory_order_acquire) == seen) {
      for (int i = 0; i < 64; ++i) pause();
      if (std::chrono::steady_clock::now() > deadline) epoch_.wait(seen, std::memory_order_acquire);
    }
    ++seen;  // a job starts only after all workers left the one before, so none is skipped
    if (stop_.load(std::memory_order_relaxed)) return;
    drain(scratch_[worker]);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace ep::model

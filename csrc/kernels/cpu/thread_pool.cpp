// Starts, feeds and stops the compute threads.
#include "kernels/cpu/thread_pool.hpp"

#include <algorithm>
#include <chrono>
#include <new>

namespace ep::model {
namespace {

constexpr std::align_val_t kAlignment{64};
// Longer than the Python code between two kernels of a layer, shorter than a scheduler quantum.
constexpr std::chrono::microseconds kSpin{200};

constexpr uint64_t kNextJob = uint64_t{1} << 32;
constexpr uint64_t kTasksLeft = kNextJob - 1;

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
  left_.fetch_add(kNextJob, std::memory_order_release);
  left_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run(int64_t count, Task task, const void* context) {
  if (workers_.empty() || count <= 1) {
    for (int64_t i = 0; i < count; ++i) task(context, i, scratch_[0]);
    return;
  }
  job_ = {count, task, context};
  done_.store(0, std::memory_order_relaxed);
  const uint64_t number = (left_.load(std::memory_order_relaxed) & ~kTasksLeft) + kNextJob;
  // Publishes job_ and done_. Sequentially consistent: notify_all reads the count of sleepers after it.
  left_.store(number | static_cast<uint64_t>(count), std::memory_order_seq_cst);
  left_.notify_all();
  drain(scratch_[0]);
  while (done_.load(std::memory_order_acquire) != count) {
    for (int i = 0; i < 64 && done_.load(std::memory_order_relaxed) != count; ++i) pause();
    if (done_.load(std::memory_order_relaxed) != count) std::this_thread::yield();
  }
}

void Pool::drain(Scratch& scratch) {
  uint64_t left = left_.load(std::memory_order_acquire);
  while (left & kTasksLeft) {
    if (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel, std::memory_order_acquire))
      continue;
    job_.task(job_.context, job_.count - static_cast<int64_t>(left & kTasksLeft), scratch);
    done_.fetch_add(1, std::memory_order_release);
    left = left_.load(std::memory_order_acquire);
  }
}

void Pool::work(size_t worker) {
  while (true) {
    drain(scratch_[worker]);
    const uint64_t seen = left_.load(std::memory_order_acquire);
    // Check after the load: if `seen` is the destructor's job number, stop_ is visible, and no later job
    // would end the wait below.
    if (stop_.load(std::memory_order_relaxed)) return;
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    while (!(seen & kTasksLeft) && left_.load(std::memory_order_acquire) == seen) {
      for (int i = 0; i < 64 && left_.load(std::memory_order_relaxed) == seen; ++i) pause();
      if (std::chrono::steady_clock::now() > deadline) left_.wait(seen, std::memory_order_acquire);
    }
  }
}

}  // namespace ep::model

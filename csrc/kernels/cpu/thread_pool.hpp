// Compute threads of one rank, and their scratch memory.
//
// A job is `count` independent tasks. The caller and the workers claim tasks one by one from a single word
// {job number, tasks left}. A late worker finds nothing to claim, and the caller waits only for claimed
// tasks. Between jobs, workers spin briefly, because a decode step is a series of short jobs. Then they sleep
// on a futex.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace ep::model {

// A buffer that grows and never shrinks; contents are undefined after a growth. Aligned to a cache line.
class Scratch {
 public:
  void* get(size_t bytes);

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  std::unique_ptr<void, Free> memory_;
  size_t size_ = 0;
};

class Pool {
 public:
  // threads: includes the caller; 1 starts none.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }
  // Memory that all tasks of a job share: one buffer per use, valid until the next call for that use.
  void* shared(size_t bytes, size_t use) { return shared_[use].get(bytes); }

  using Task = void (*)(const void* context, int64_t index, Scratch& scratch);
  // Runs task(context, 0 .. count - 1) and returns when all are done. One caller at a time. Tasks must not
  // throw. count < 2^32.
  void run(int64_t count, Task task, const void* context);

 private:
  struct Job {
    int64_t count = 0;
    Task task = nullptr;
    const void* context = nullptr;
  };
  void work(size_t worker);
  void drain(Scratch& scratch);

  Job job_;  // written only while no task is left or claimed, so threads with a claim may read it
  Scratch shared_[3];
  std::vector<Scratch> scratch_;  // [0] is the caller's
  std::vector<std::thread> workers_;
  alignas(64) std::atomic<uint64_t> left_{0};  // job number << 32 | tasks not yet claimed
  alignas(64) std::atomic<int64_t> done_{0};   // tasks of this job that have ended
  std::atomic<bool> stop_{false};
};

}  // namespace ep::model

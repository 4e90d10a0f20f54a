// Blocks of a kernel on a CPU: a thread each, from a pool; their threads are fibers that take turns.
#include <cuda_runtime.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

thread_local uint3 threadIdx, blockIdx;
thread_local dim3 blockDim, gridDim;

extern "C" void emulated_switch(void** from, void* to);
asm(R"(
.text
.globl emulated_switch
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace {

constexpr size_t kStack = 128 * 1024;
constexpr uint32_t kMostThreads = 640, kSharedWords = emulated::kSharedBytes / 4;

struct Barrier {
  uint32_t arrived = 0, bits = 0, result = 0;
  uint64_t turn = 0;
};

struct Fiber {
  void* stack = nullptr;
  void* at = nullptr;
  bool done = true;
  const uint64_t* waits_on = nullptr;  // runs again when this is not `turn`
  uint64_t turn = 0;
};

// One to a thread of the pool; runs a block after the other.
struct Block {
  Fiber fibers[kMostThreads];
  Barrier all, warps[kMostThreads / 32], read[kMostThreads / 32];
  uint64_t values[kMostThreads];
  void* scheduler = nullptr;
  uint32_t current = 0;
  const std::function<void()>* kernel = nullptr;

  void run(uint32_t threads) {
    for (uint32_t i = 0; i < threads; ++i) begin(fibers[i]);
    for (uint32_t left = threads; left != 0; sched_yield()) {
      for (uint32_t i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        if (fiber.done || (fiber.waits_on != nullptr && *fiber.waits_on == fiber.turn)) continue;
        current = i;
        threadIdx = {i, 0, 0};
        emulated_switch(&scheduler, fiber.at);
        left -= fiber.done;
      }
    }
  }
  void begin(Fiber& fiber);
  void wait(const uint64_t* word, uint64_t turn) {
    Fiber& fiber = fibers[current];
    fiber.waits_on = word;
    fiber.turn = turn;
    emulated_switch(&fiber.at, scheduler);
  }
  // The bits of all `count` threads that meet here.
  uint32_t meet(Barrier& barrier, uint32_t count, uint32_t bits) {
    barrier.bits |= bits;
    if (++barrier.arrived == count) {
      barrier.result = barrier.bits;
      barrier.arrived = barrier.bits = 0;
      ++barrier.turn;
    } else {
      wait(&barrier.turn, barrier.turn);
    }
    return barrier.result;
  }
};

std::atomic<uint32_t> most_late_us = 0;
thread_local Block block;
thread_local uint32_t shared_words[kSharedWords];

void fiber_main() {
  (*block.kernel)();
  Fiber& fiber = block.fibers[block.current];
  fiber.done = true;
  emulated_switch(&fiber.at, block.scheduler);
}

void Block::begin(Fiber& fiber) {
  if (fiber.stack == nullptr)
    fiber.stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* top = reinterpret_cast<void**>(static_cast<char*>(fiber.stack) + kStack);
  *--top = nullptr;  // nobody returns there
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.at = top;
  fiber.done = false;
  fiber.waits_on = nullptr;
}

// Threads that run blocks: as many as have to run at once.
class Pool {
 public:
  void run(const std::function<void()>& task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(task);
    if (idle_ < tasks_.size()) std::thread(&Pool::work, this).detach();
    some_.notify_one();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      some_.wait(lock, [&] { return !tasks_.empty(); });
      --idle_;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }
  std::mutex mutex_;
  std::condition_variable some_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;
};
Pool& pool() {
  static Pool* one = new Pool;  // its threads outlive main
  return *one;
}

}  // namespace

namespace emulated {

uint64_t clock_ahead_ns = 0;
int multiprocessors = 2;

void launch(uint32_t blocks, uint32_t threads, const std::function<void()>& kernel) {
  std::mutex mutex;
  std::condition_variable ended;
  uint32_t left = blocks;
  for (uint32_t i = 0; i < blocks; ++i) {
    pool().run([&, i] {
      blockIdx = {i, 0, 0};
      blockDim = {threads, 1, 1};
      gridDim = {blocks, 1, 1};
      std::memset(shared_words, 0x5a, sizeof shared_words);
      block.kernel = &kernel;
      if (most_late_us != 0 && i % 2 != 0) usleep(uint32_t(rand()) % most_late_us);
      block.run(threads);
      const std::lock_guard lock(mutex);
      if (--left == 0) ended.notify_one();
    });
  }
  std::unique_lock lock(mutex);
  ended.wait(lock, [&] { return left == 0; });
}

void give_way() {
  if (block.kernel != nullptr) block.wait(nullptr, 0);
}
const uint64_t* with_warp(uint64_t mine) {
  const uint32_t warp = threadIdx.x / 32;
  block.values[threadIdx.x] = mine;
  block.meet(block.warps[warp], 32, 0);
  return block.values + warp * 32;
}
void leave_warp() { block.meet(block.read[threadIdx.x / 32], 32, 0); }
uint32_t* dynamic_shared() { return shared_words; }

}  // namespace emulated

// From now on every second block begins up to so many us late, as where a GPU has other work.
extern "C" __attribute__((visibility("default"))) void emulated_late_blocks(uint32_t us) {
  most_late_us = us;
}

// From now on the GPU's clock is so far ahead of the host's.
extern "C" __attribute__((visibility("default"))) void emulated_clock_ahead(uint64_t ns) {
  emulated::clock_ahead_ns = ns;
}

// A group made from now on finds a GPU of so many.
extern "C" __attribute__((visibility("default"))) void emulated_multiprocessors(int count) {
  emulated::multiprocessors = count;
}

bool __syncthreads_or(bool mine) { return block.meet(block.all, blockDim.x, mine) != 0; }

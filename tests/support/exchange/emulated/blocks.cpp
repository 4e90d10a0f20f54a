// Blocks of a kernel on a CPU: a thread each, from a pool; their threads are fibers that take turns.
#include <cuda_runtime.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

constinit thread_local uint3 threadIdx, blockIdx;
constinit thread_local dim3 blockDim, gridDim;

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
constexpr uint32_t kMostThreads = 640, kSharedWords = emulated::kMostSharedBytes / 4;

struct Barrier {
  uint32_t arrived = 0, bits = 0, result = 0;
  uint64_t turn = 0;
};

// What a fiber has read lately of memory that others write. A polling fiber reads the same few words again.
struct Seen {
  static constexpr uint32_t kWords = 16;
  const void* at[kWords] = {};
  uint64_t values[kWords] = {};
  uint32_t next = 0;

  // False if it was read before, with this value.
  bool note(const void* word, uint64_t value) {
    for (uint32_t i = 0; i < kWords; ++i)
      if (at[i] == word && values[i] == value) return false;
    at[next] = word;
    values[next] = value;
    next = (next + 1) % kWords;
    return true;
  }
};

struct Fiber {
  void* stack = nullptr;
  void* at = nullptr;
  bool done = true;
  const uint64_t* waits_on = nullptr;  // runs again when this is not `turn`
  uint64_t turn = 0;
  Seen seen;

  bool runs() const { return !done && (waits_on == nullptr || *waits_on != turn); }
};

// One to a thread of the pool; runs a block after the other.
struct Block {
  Fiber fibers[kMostThreads];
  Barrier all, warps[kMostThreads / 32];
  uint64_t values[2][kMostThreads];
  void* scheduler = nullptr;
  uint32_t current = 0, threads = 0, left = 0;
  bool moved = false;  // a fiber has read something new, or ended
  const std::function<void()>* kernel = nullptr;
  alignas(1024) uint32_t shared[kSharedWords];

  // All fibers in turn, again and again. While all of them poll, the block sleeps: what they wait for is done
  // by other threads and processes, which need the cores.
  void run(uint32_t count) {
    constexpr uint32_t kPatience = 4, kMostUs = 300;
    threads = left = count;
    for (uint32_t i = 0; i < threads; ++i) begin(fibers[i]);
    for (uint32_t idle = 0; left != 0;) {
      moved = false;
      if (Fiber* first = from(0)) emulated_switch(&scheduler, first->at);
      idle = moved ? 0 : idle + 1;
      if (idle > kPatience)
        usleep(std::min(10 * idle, kMostUs));
      else
        sched_yield();
    }
  }
  void begin(Fiber& fiber);
  // The first from `i` on that can run is the current one.
  Fiber* from(uint32_t i) {
    while (i < threads && !fibers[i].runs()) ++i;
    if (i == threads) return nullptr;
    current = i;
    threadIdx = {i, 0, 0};
    return &fibers[i];
  }
  // Lets the fibers behind this one run, then those before it.
  void leave(Fiber& fiber) {
    const Fiber* next = from(current + 1);
    emulated_switch(&fiber.at, next != nullptr ? next->at : scheduler);
  }
  void wait(const uint64_t* word, uint64_t turn) {
    Fiber& fiber = fibers[current];
    fiber.waits_on = word;
    fiber.turn = turn;
    leave(fiber);
  }
  void end() {
    Fiber& fiber = fibers[current];
    fiber.done = moved = true;
    --left;
    leave(fiber);
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
constinit thread_local Block* block = nullptr;  // not of threads outside the pool

void fiber_main() {
  (*block->kernel)();
  block->end();
}

void Block::begin(Fiber& fiber) {
  if (fiber.stack == nullptr)
    fiber.stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const size_t colour = size_t(&fiber - fibers) % 128 * 5 * 64;  // stacks do not share the sets of a cache
  auto* top = reinterpret_cast<void**>(static_cast<char*>(fiber.stack) + kStack - colour);
  *--top = nullptr;  // nobody returns there
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.at = top;
  fiber.done = false;
  fiber.waits_on = nullptr;
  fiber.seen = {};
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
    block = new Block;
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
      std::memset(block->shared, 0x5a, sizeof block->shared);
      block->kernel = &kernel;
      if (most_late_us != 0 && i % 2 != 0) usleep(uint32_t(rand()) % most_late_us);
      block->run(threads);
      const std::lock_guard lock(mutex);
      if (--left == 0) ended.notify_one();
    });
  }
  std::unique_lock lock(mutex);
  ended.wait(lock, [&] { return left == 0; });
}

void give_way() {
  if (block != nullptr) block->wait(nullptr, 0);
}
void saw(const void* word, uint64_t value) {
  if (block != nullptr) block->moved |= block->fibers[block->current].seen.note(word, value);
}
// Two sets of values alternate. A lane may give its next value while others still read this one, but not the
// one after that: for the next one all lanes meet again.
const uint64_t* with_warp(uint64_t mine) {
  const uint32_t warp = threadIdx.x / 32;
  Barrier& barrier = block->warps[warp];
  uint64_t* values = block->values[barrier.turn % 2];
  values[threadIdx.x] = mine;
  block->meet(barrier, 32, 0);
  return values + warp * 32;
}
uint32_t* dynamic_shared() { return block->shared; }

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

bool __syncthreads_or(bool mine) { return block->meet(block->all, blockDim.x, mine) != 0; }

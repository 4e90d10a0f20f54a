// Waits for cells with deadlines, wakes sleepers, aborts and resets a group.
#include "exchange/common/cells.hpp"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstring>
#include <mutex>

#include "exchange/common/group.hpp"
#include "exchange/common/wait_attribution.hpp"

namespace ep {
namespace {

constexpr uint32_t kNobody = 0;
constexpr uint32_t kYields = 4;             // enough to let a runnable peer on the same core finish
constexpr uint64_t kSliceNs = 100'000'000;  // longest sleep between checks of heartbeats and signals
constexpr uint32_t kPausesPerLook = 16;     // cost about as much as one reading of the clock

struct Doorbell {
  uint32_t word;
  uint32_t sleeps_on;  // rank + 1
};

Doorbell& doorbell(std::byte* region) { return *reinterpret_cast<Doorbell*>(region + Head::kDoorbell); }

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

void ring(Doorbell& bell) {
  std::atomic_ref<uint32_t>(bell.word).fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, &bell.word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// One wait in progress: which peers are missing and since when.
class Waiter {
 public:
  Waiter(Group& group, const Wait& wait)
      : group_(group),
        wait_(wait),
        start_(now_ns()),
        deadline_ns_(wait.limit_ns != 0 ? wait.limit_ns : group.timing.timeout_ns),
        looked_(start_),
        pending_(wait.peers & group.unmasked()) {}

  Waited run() {
    const Waited waited = wait();
    if (slept_) publish_wait(group_, 0, 0);
    return waited;
  }

 private:
  Waited wait() {
    uint32_t yields = 0;
    for (;;) {
      if (group_.carrier != nullptr) group_.carrier->drive();
      if (Status failed = look()) return fail(failed);
      pending_ &= group_.unmasked();
      if (pending_ == 0) return {{}, arrived_};
      if (Status failed = ended()) return {failed, arrived_};
      const uint64_t now = now_ns();
      if (now - start_ < group_.timing.spin_ns) {
        for (uint32_t i = 0; i < kPausesPerLook; ++i) pause_cpu();
      } else if (yields < kYields) {
        ++yields;
        sched_yield();
      } else {
        if (const uint64_t late = expired(now)) {
          group_.statistics.timeouts.add(std::popcount(late));
          if (!group_.timing.mask_on_timeout) return fail(attribute_wait(late, now));
          mask(late, now);
          continue;
        }
        if (group_.interrupted != nullptr && now >= ask_at_) {
          ask_at_ = now + kSliceNs;
          if (now - start_ >= kSliceNs && group_.interrupted())
            return fail(missing(pending_, Code::kInterrupted));
        }
        sleep(now);
      }
    }
  }

  uint64_t cell_of(uint32_t peer) const {
    return load_cell(group_.own(), wait_.first_cell + peer * wait_.stride);
  }

  Status look() {
    uint64_t now = 0;
    for (uint64_t left = pending_; left != 0; left &= left - 1) {
      const uint32_t peer = std::countr_zero(left);
      const uint32_t seen = cell_epoch(cell_of(peer));
      const int32_t ahead = int32_t(seen - wait_.expected);
      if (ahead < 0) continue;
      if (ahead > 0 && !wait_.at_least)
        return {Code::kViolation, wait_.op, wait_.phase, group_.rank, peer, wait_.expected, seen};
      pending_ &= ~(1ull << peer);
      arrived_ |= 1ull << peer;
      if (now == 0) now = now_ns();
      // If this rank slept on another peer, charge this one only up to the start of that sleep.
      const uint64_t until = slept_on_ >= 0 && slept_on_ != int32_t(peer) ? looked_ : now;
      charge(peer, until - start_);
    }
    slept_on_ = -1;
    return {};
  }

  void charge(uint32_t peer, uint64_t ns) {
    if (wait_.wait_ns != nullptr) wait_.wait_ns[peer] += ns;
    if (wait_.op != Op::kReset) group_.statistics.peer_wait_ns[timed(wait_.op, wait_.many)][peer].add(ns);
  }

  // Bits of the missing peers that are too late.
  uint64_t expired(uint64_t now) const {
    if (!wait_.by_liveness) return now - start_ >= deadline_ns_ ? pending_ : 0;
    uint64_t late = 0;
    for (uint64_t left = pending_; left != 0; left &= left - 1) {
      const uint32_t peer = std::countr_zero(left);
      const uint64_t alive = std::max(last_beat(group_, peer), start_);
      if (now > alive && now - alive >= group_.timing.liveness_ns) late |= 1ull << peer;
    }
    return late;
  }

  // The rank of this host that receives what this wait needs from `peer`, or `peer` itself.
  uint32_t gateway(uint32_t peer) const { return wait_.by_gateways ? group_.gateways[peer] : peer; }

  // The error names the rank that caused the delay, not a peer that is late because of it. A rank whose
  // heartbeat stopped comes first, then one that does not wait itself.
  Status attribute_wait(uint64_t late, uint64_t now) const {
    Status status = missing(late, Code::kTimeout);
    status.peer = root(group_, late, now);
    uint64_t oldest = now;
    for (uint64_t left = late; left != 0; left &= left - 1) {
      const uint32_t peer = std::countr_zero(left);
      for (const uint32_t suspect : {peer, gateway(peer), behind(group_, peer, now)}) {
        const uint64_t beat = last_beat(group_, suspect);
        if (!quiet(group_, suspect, now) || beat >= oldest) continue;
        oldest = beat;
        status.peer = suspect;
        status.seen = cell_epoch(cell_of(peer));
      }
    }
    return status;
  }

  // As above, for a group that masks and goes on. A source whose gateway is gone is left out this time but
  // not masked.
  void mask(uint64_t late, uint64_t now) {
    uint64_t held_up_by = 0;
    for (uint64_t left = late; left != 0; left &= left - 1) {
      const uint32_t peer = std::countr_zero(left), by = gateway(peer);
      const bool indirect = by != peer && by != group_.rank;
      if (indirect && (!(group_.unmasked() >> by & 1) || quiet(group_, by, now))) {
        held_up_by |= 1ull << by;
        pending_ &= ~(1ull << peer);
      } else {
        held_up_by |= 1ull << peer;
      }
    }
    group_.masked.fetch_or(held_up_by, std::memory_order_acq_rel);
  }

  Status missing(uint64_t peers, Code code) const {
    const uint32_t peer = std::countr_zero(peers);
    return {code, wait_.op, wait_.phase, group_.rank, peer, wait_.expected, cell_epoch(cell_of(peer))};
  }

  Waited fail(const Status& status) {
    for (uint64_t left = pending_; left != 0; left &= left - 1)
      charge(std::countr_zero(left), now_ns() - start_);
    if (wait_.forming == 0) abort_group(group_, status);
    return {status, arrived_};
  }

  Status ended() const { return wait_.forming == 0 ? aborted(group_) : aborted(group_, wait_.forming); }

  void sleep(uint64_t now) {
    Doorbell& bell = doorbell(group_.own());
    const uint32_t peer = std::countr_zero(pending_);
    std::atomic_ref<uint32_t> sleeps_on(bell.sleeps_on);
    sleeps_on.store(peer + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with publish(): flag first, then look
    const uint32_t word = std::atomic_ref<uint32_t>(bell.word).load(std::memory_order_acquire);
    const bool absent = int32_t(cell_epoch(cell_of(peer)) - wait_.expected) < 0;
    const bool quiet = !ended();
    if (absent && quiet && (group_.unmasked() >> peer & 1)) {
      uint64_t slice = kSliceNs;
      if (!wait_.by_liveness) slice = std::min(slice, start_ + deadline_ns_ - now);
      const timespec timeout{time_t(slice / 1'000'000'000), long(slice % 1'000'000'000)};
      group_.statistics.sleeps.add(1);
      slept_on_ = int32_t(peer);
      looked_ = now;
      slept_ = true;
      publish_wait(group_, pending_, now);
      if (group_.carrier != nullptr) {
        group_.carrier->sleep(slice);
      } else {
        syscall(SYS_futex, &bell.word, FUTEX_WAIT, word, &timeout, nullptr, 0);
      }
    }
    sleeps_on.store(kNobody, std::memory_order_relaxed);
  }

  Group& group_;
  const Wait& wait_;
  const uint64_t start_, deadline_ns_;
  uint64_t looked_, ask_at_ = 0, pending_, arrived_ = 0;
  int32_t slept_on_ = -1;
  bool slept_ = false;
};

}  // namespace

// Whether an abort cell ends a generation (here plus 1): also if it names a later one, which a rank that was
// slow to leave this one would otherwise never notice.
static bool ends(uint64_t cell, uint32_t generation) { return int32_t(cell_epoch(cell) - generation) >= 0; }

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1'000'000'000 + uint64_t(t.tv_nsec);
}

uint64_t cell_offset(const CellName& name, uint32_t writer) {
  switch (name.notice) {
    case Notice::kHeader:
      return Head::header(name.op, name.bank, writer);
    case Notice::kConsumed:
      return Head::consumed(name.op, writer);
    case Notice::kVote:
      return Head::vote(name.bank, writer);
    case Notice::kJoin:
      return Head::join(name.bank, writer);
    case Notice::kRows:
    case Notice::kAbort:
      break;
  }
  return Head::kAbort;
}

void publish(Group& group, uint32_t peer, const CellName& name, uint32_t epoch, uint32_t payload) {
  if (!group.is_remote(peer)) {
    const uint64_t offset = cell_offset(name, group.rank);
    cell_at(group.regions[peer], offset).store(encode_cell(epoch, payload), std::memory_order_release);
    if (sleeps_on(group.regions[peer], group.rank)) wake(group, peer);
    return;
  }
  group.carrier->push({name.notice, uint8_t(uint32_t(name.op) << 4 | name.bank), uint8_t(peer),
                       uint8_t(group.generation), payload, name.near, epoch});
  if (name.notice != Notice::kConsumed) group.carrier->drive();
}

bool sleeps_on(std::byte* region, uint32_t writer) {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with Waiter::sleep(): cell first, then flag
  return std::atomic_ref<uint32_t>(doorbell(region).sleeps_on).load(std::memory_order_relaxed) == writer + 1;
}

void wake(Group& group, uint32_t peer) {
  if (group.carrier != nullptr) return group.carrier->ring(peer);
  ring(doorbell(group.regions[peer]));
}

void wake_self(Group& group) {
  if (group.carrier != nullptr) return group.carrier->wake();
  ring(doorbell(group.own()));
}

Waited wait_for(Group& group, const Wait& wait) {
  if (group.carrier == nullptr) return Waiter(group, wait).run();
  group.carrier->waiting(true);
  const Waited waited = Waiter(group, wait).run();
  group.carrier->waiting(false);
  return waited;
}

void abort_at(std::byte* region, uint32_t writer, uint32_t generation, const Status& status) {
  auto cell = cell_at(region, Head::kAbort);
  uint64_t seen = cell.load(std::memory_order_acquire);
  if (ends(seen, generation)) return;
  // The writer's own line, written before the cell names it, so a half-written status is never read.
  std::memcpy(region + Head::abort_status(writer), &status, sizeof status);
  while (!ends(seen, generation) &&
         !cell.compare_exchange_weak(seen, encode_cell(generation, writer + 1), std::memory_order_acq_rel)) {
  }
  syscall(SYS_futex, region + Head::kAbort, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);  // see AbortWatch
}

void report_lost(std::byte* region, uint32_t lost, uint32_t generation) {
  abort_at(region, lost, generation + 1, {Code::kLost, Op::kVote, Phase::kGather, lost, lost, 0, 0});
  ring(doorbell(region));
}

void abort_group(Group& group, const Status& status) {
  const std::lock_guard lock(group.aborting);
  const uint32_t generation = uint32_t(group.generation) + 1;
  const bool first = !ends(load_cell(group.own(), Head::kAbort), generation);
  for (uint32_t peer = 0; peer < group.geometry.num_ranks; ++peer) {
    if (!group.is_remote(peer)) {
      abort_at(group.regions[peer], group.rank, generation, status);
      wake(group, peer);
    } else if (first) {
      std::memcpy(group.regions[peer] + Head::abort_status(peer), &status, sizeof status);
      group.carrier->push({Notice::kAbort, uint8_t(uint32_t(Op::kReset) << 4), uint8_t(peer),
                           uint8_t(group.generation), 0, 0, generation});
    }
  }
  if (group.carrier != nullptr) group.carrier->wake();
}

Status aborted(const Group& group) { return aborted(group, uint32_t(group.generation)); }

Status aborted(const Group& group, uint32_t generation) {
  const uint64_t cell = load_cell(group.own(), Head::kAbort);
  if (!ends(cell, generation + 1)) return {};
  Status origin;
  std::memcpy(&origin, group.own() + Head::abort_status(cell_payload(cell) - 1), sizeof origin);
  // On several hosts, every survivor names the rank that was lost, not the rank that noticed it.
  const bool lost = origin.code == Code::kLost || (origin.code == Code::kTimeout && group.carrier != nullptr);
  if (lost && origin.peer != group.rank) {
    origin.code = Code::kLost;
    return origin;
  }
  // A requested abort has no wait behind it, so its unused field `seen` carries the code.
  if (origin.code == Code::kRequested) origin.seen = uint32_t(Code::kRequested);
  origin.code = Code::kAborted;
  return origin;
}

}  // namespace ep

// Connects and disconnects the ranks of a group over the network: greetings, losses, masks, shutdown.
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <bit>

#include "exchange/common/cells.hpp"
#include "exchange/fabric/carrier.hpp"

namespace ep::fabric {
namespace {

constexpr uint64_t kOpenSliceNs = 500 * kMs;  // for one connection, before the next one is tried
constexpr uint64_t kGreetAgainNs = 10 * kMs;  // after a greeting that failed
constexpr uint64_t kAbortedLingerNs = 300 * kMs;
constexpr uint32_t kSessionMask = (1u << Immediate::kValueBits) - 1;

}  // namespace

void FabricCarrier::connect(const std::vector<EndpointAddress>& addresses, uint32_t session,
                            uint64_t timeout_ns) {
  const uint64_t deadline = now_ns() + timeout_ns;
  for (size_t rank = 0; rank < addresses.size(); ++rank) {
    if (addresses[rank].device.bytes == memory_->device().inbound.bytes) continue;
    throw FabricError(description() + ": rank " + std::to_string(rank) + " has rows of " +
                      std::to_string(addresses[rank].device.bytes) + " bytes on a device, rank " +
                      std::to_string(group_.rank) + " of " + std::to_string(memory_->device().inbound.bytes) +
                      ": all ranks choose alike (exchange.device_memory)");
  }
  session_ = session & kSessionMask;
  {
    const std::lock_guard lock(driving_);
    for (const EndpointAddress& peer : addresses) endpoint_.add_peer(peer);
  }
  for_each_peer(group_.remote, group_.rank, group_.geometry.num_ranks,
                [&](uint32_t peer) { greet(peer, std::min(deadline, now_ns() + kOpenSliceNs)); });
  while (silent() != 0 && failure_.empty() && now_ns() < deadline) {
    greet_again(now_ns());
    drive();
    waiter_.nap(kRetryNs, endpoint_.wait_fd());
  }
  if (const uint64_t left = silent(); left != 0 && failure_.empty()) {
    failure_ = "rank " + std::to_string(std::countr_zero(left)) + " does not answer";
    const int error = error_ != 0 ? error_ : outgoing_.error();
    if (error != 0) failure_ += std::string("; writes fail: ") + library_.reason(error);
  }
  if (!failure_.empty())
    throw FabricError(description() + ": rank " + std::to_string(group_.rank) + ": " + failure_);
  connected_ = true;
  // The process's own threads handle signals.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Bits of the peers that have not greeted this rank, or have not received its greeting.
uint64_t FabricCarrier::silent() const {
  uint64_t missing = (group_.remote & ~incoming_.greeted()) | ungreeted_;
  for (uint64_t left = group_.remote; left != 0; left &= left - 1)
    if (!outgoing_.idle(uint32_t(std::countr_zero(left)))) missing |= left & -left;
  return missing;
}

// Queues a greeting and drives until it is delivered or the deadline passes. Polls less and less often.
void FabricCarrier::greet(uint32_t peer, uint64_t deadline) {
  {
    const std::lock_guard lock(driving_);
    outgoing_.enqueue_signal(peer, Kind::kHello, session_);
  }
  for (uint64_t wait = kPollNs; failure_.empty() && now_ns() < deadline;
       wait = std::min(2 * wait, 10 * kMs)) {
    drive();
    if (outgoing_.idle(peer)) return;
    waiter_.nap(wait, endpoint_.wait_fd());
  }
}

// Repeats greetings whose writes failed. Otherwise their peers would wait in vain.
void FabricCarrier::greet_again(uint64_t now) {
  if (now < next_greeting_) return;
  next_greeting_ = now + kGreetAgainNs;
  const std::lock_guard lock(driving_);
  for (uint64_t left = ungreeted_; left != 0; left &= left - 1) {
    const auto peer = uint32_t(std::countr_zero(left));
    if (outgoing_.idle(peer)) outgoing_.enqueue_signal(peer, Kind::kHello, session_);
  }
  ungreeted_ = 0;
}

void FabricCarrier::greeted(const Immediate& immediate) {
  if (immediate.value != session_)
    failure_ = "rank " + std::to_string(immediate.source) + " is of another group";
}

// A delay counts from a time by the sender's clock. Of two hosts with different clocks, one gets a greeting
// from the future.
void FabricCarrier::compare_clocks(uint32_t peer, uint32_t sent) {
  if (delayed_.can_date(sent, now_ns())) return;
  failure_ = "rank " + std::to_string(peer) + (sent == 0 ? " sends no times" : " has another clock") +
             ": delay_seconds is for ranks that share a clock and all set it";
}

// Waits until everything queued for living peers has arrived.
void FabricCarrier::deliver(uint64_t deadline) {
  {
    const std::lock_guard lock(driving_);
    outgoing_.send_consumed(now_ns());
  }
  const auto delivered = [&] {
    const std::lock_guard lock(driving_);
    return outgoing_.delivered(group_.remote & group_.unmasked() & ~lost_) && queue_.empty();
  };
  while (!delivered() && now_ns() < deadline) {
    drive();
    sleep(kRetryNs);
  }
}

void FabricCarrier::close(uint64_t linger_ns) {
  if (!connected_ || closing_) return;
  // After an abort, other ranks may already be gone. The messages they need are already being sent.
  const uint64_t deadline = now_ns() + (aborted(group_) ? std::min(linger_ns, kAbortedLingerNs) : linger_ns);
  waiting(true);
  deliver(deadline);  // a good-bye promises that all before it arrived; ranks behind a gateway rely on it
  uint64_t peers = 0;
  {
    const std::lock_guard lock(driving_);
    closing_ = true;
    peers = group_.remote & group_.unmasked() & ~lost_;
    for (uint64_t left = peers; left != 0; left &= left - 1)
      outgoing_.enqueue_signal(uint32_t(std::countr_zero(left)), Kind::kBye);
  }
  const auto open = [&] {
    const std::lock_guard lock(driving_);
    uint64_t missing = peers & ~incoming_.departed();
    for (uint64_t left = peers; left != 0; left &= left - 1)
      if (!outgoing_.idle(uint32_t(std::countr_zero(left)))) missing |= left & -left;
    return missing & ~lost_;
  };
  while (open() != 0 && now_ns() < deadline) {
    drive();
    sleep(kRetryNs);
  }
  waiting(false);
}

void FabricCarrier::lose(uint32_t peer, Op op) {
  if (!connected_ && (incoming_.departed() >> peer & 1) == 0) {
    ungreeted_ |= 1ull << peer;  // tried again until connect() reaches its deadline
    return;
  }
  lost_ |= 1ull << peer;
  if (closing_ || (incoming_.departed() >> peer & 1)) return outgoing_.forget(peer);
  if (group_.timing.mask_on_timeout) {
    group_.masked.fetch_or(1ull << peer, std::memory_order_acq_rel);
    return wake_self(group_);
  }
  if (aborted(group_)) return;
  if (op == Op::kReset)
    op = outgoing_.last_op(peer);  // it was a heartbeat, or unknown: report the last operation
  const uint32_t epoch = uint32_t(op) < kBankedOps ? outgoing_.last_epoch(op, peer) : 0;
  abort_group(group_, {Code::kLost, op, Phase::kSendRows, group_.rank, peer, epoch, 0});
}

void FabricCarrier::follow_masks() {
  const uint64_t masked = group_.masked.load(std::memory_order_acquire);
  for (uint64_t left = masked & ~forgotten_ & group_.remote; left != 0; left &= left - 1)
    outgoing_.forget(uint32_t(std::countr_zero(left)));
  for (uint64_t left = forgotten_ & ~masked; left != 0; left &= left - 1) {
    outgoing_.remember(uint32_t(std::countr_zero(left)));
    lost_ &= ~(left & -left);
  }
  forgotten_ = masked;
}

}  // namespace ep::fabric

#include "transport/fabric_carrier.hpp"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

#include "ep/cells.hpp"

namespace ep::fabric {
namespace {

constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kBeatNs = 100 * kMs;
constexpr uint64_t kRecentNs = 200'000;       // since the rank itself drove: the thread stays aside ...
constexpr uint64_t kAsideNs = 500'000;        // ... and looks again after this time
constexpr uint64_t kRetryNs = 1 * kMs;        // something is queued and the provider takes nothing now
constexpr uint64_t kConsumedNs = 1 * kMs;     // that a consumed epoch waits for a message to travel with
constexpr uint64_t kPollNs = 50'000;          // between two looks at a provider that cannot be slept on
constexpr uint64_t kOpenSliceNs = 500 * kMs;  // for one connection before the next one is tried
constexpr uint32_t kIdleWakes = 3;  // in a row, before the provider's descriptor is no longer trusted
constexpr uint64_t kAbortedLingerNs = 300 * kMs;
constexpr uint32_t kBatches = 8;  // of events per step: both directions get their turn
constexpr uint32_t kSessionMask = (1u << Immediate::kValueBits) - 1;

// What one peer may have on its way to this rank at once: rows one by one in every bank, routing, letters.
uint32_t most_arrivals(const Geometry& g) {
  const Layout l = Layout::of(g);
  const uint64_t operation = uint64_t(g.max_tokens) * l.choices_per_token + 4;
  return uint32_t(std::min<uint64_t>((kBankedOps * g.num_banks * operation + 64) * g.num_ranks, 1 << 18));
}

}  // namespace

FabricCarrier::FabricCarrier(Group& group, const Options& options, const Share& share)
    : group_(group),
      memory_(std::make_shared<FabricMemory>(group, share)),
      bells_(group.rank, share),
      shared_(share.ranks_of(group.rank).size() > 1),
      library_(options),
      endpoint_(library_, options,
                {.inbound = memory_->inbound(),
                 .outbound = {memory_->outbox(), memory_->outbox_bytes()},
                 .peers = group.geometry.num_ranks,
                 .max_arrivals = most_arrivals(group.geometry)}),
      outgoing_(group, endpoint_, memory_->outbox(), memory_->outbox() + group.layout.total),
      incoming_(group, memory_->inbound().begin + group.layout.total),
      waiter_{bells_.own()},
      sender_{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)} {
  for (uint32_t peer = 0; peer < group.geometry.num_ranks; ++peer) {
    if (share.hosts[peer] == share.hosts[group.rank]) {
      group.add_local(peer, memory_->region(peer));
    } else {
      group.add_remote(peer, memory_->outbox(), incoming_.heartbeat(peer));
    }
  }
  group.share_rows(share.hosts);
  group.generation = load_cell(group.own(), Head::kIdentity);
  group.carrier = this;
  if (shared_) heartbeat_ = std::make_unique<shm::Heartbeat>(memory_, group.own());
}

FabricCarrier::~FabricCarrier() {
  stop_ = true;
  ring_bell(sender_.fd);
  if (thread_.joinable()) thread_.join();
  group_.carrier = nullptr;
  ::close(sender_.fd);
}

// -- membership --------------------------------------------------------------------------------------------

void FabricCarrier::connect(const std::vector<Card>& cards, uint32_t session, uint64_t timeout_ns) {
  const uint32_t ranks = group_.geometry.num_ranks;
  const uint64_t deadline = now_ns() + timeout_ns;
  session_ = session & kSessionMask;
  {
    const std::lock_guard lock(driving_);
    for (const Card& card : cards) endpoint_.add_peer(card);
  }
  for_each_peer(group_.remote, group_.rank, ranks,
                [&](uint32_t peer) { say(peer, Kind::kHello, std::min(deadline, now_ns() + kOpenSliceNs)); });
  const auto silent = [&] {
    uint64_t missing = group_.remote & ~incoming_.greeted();
    for (uint32_t peer = 0; peer < ranks; ++peer)
      if (group_.is_remote(peer) && !outgoing_.idle(peer)) missing |= 1ull << peer;
    return missing;
  };
  while (silent() != 0 && failure_.empty() && now_ns() < deadline) {
    drive();
    nap(waiter_, kRetryNs, true);
  }
  for (uint64_t left = silent(); left != 0 && failure_.empty(); left &= left - 1)
    failure_ = "rank " + std::to_string(std::countr_zero(left)) + " does not answer";
  if (!failure_.empty())
    throw FabricError(description() + ": rank " + std::to_string(group_.rank) + ": " + failure_);
  connected_ = true;
  // Signals belong to the process's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Queues a signal and drives until it is delivered or the deadline has passed; looks ever more seldom.
void FabricCarrier::say(uint32_t peer, Kind kind, uint64_t deadline) {
  {
    const std::lock_guard lock(driving_);
    outgoing_.enqueue_signal(peer, kind, session_);
  }
  for (uint64_t wait = kPollNs; failure_.empty() && now_ns() < deadline;
       wait = std::min(2 * wait, 10 * kMs)) {
    drive();
    if (outgoing_.idle(peer)) return;
    nap(waiter_, wait, true);
  }
}

void FabricCarrier::greeted(const Immediate& immediate) {
  if (immediate.value != session_)
    failure_ = "rank " + std::to_string(immediate.source) + " is of another group";
}

// Waits until all that was queued has arrived, where the peers live.
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
  // After an abort the others may be anywhere: what they must know is on its way already.
  const uint64_t deadline = now_ns() + (aborted(group_) ? std::min(linger_ns, kAbortedLingerNs) : linger_ns);
  waiting(true);
  deliver(deadline);  // a good-bye says that all before it has arrived: ranks behind a gateway depend on it
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
  lost_ |= 1ull << peer;
  if (closing_ || (incoming_.departed() >> peer & 1)) return outgoing_.forget(peer);
  if (!connected_) return;  // connecting is tried again until its deadline
  if (group_.timing.mask_on_timeout) {
    group_.masked.fetch_or(1ull << peer, std::memory_order_acq_rel);
    return wake_self(group_);
  }
  if (aborted(group_)) return;
  if (op == Op::kReset)
    op = outgoing_.last_op(peer);  // a heartbeat's, or nobody's: missed where this rank is
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

// -- driving -----------------------------------------------------------------------------------------------

void FabricCarrier::push(const Command& command) {
  outgoing_.lease(command);
  while (!queue_.push(command)) {
    if (driver_.load() == std::this_thread::get_id()) {
      read_queue(now_ns());
    } else {
      drive();
      sched_yield();
    }
  }
}

void FabricCarrier::drive() {
  bool pending = true;
  const uint64_t now = now_ns();
  drove_.store(now, std::memory_order_relaxed);
  if (const std::unique_lock lock(driving_, std::try_to_lock); lock) {
    step(now);
    pending = !outgoing_.idle();
  } else {
    sched_yield();  // the thread may have lost its core to this one in the middle of a step
  }
  seen_ = arrived_.load(std::memory_order_acquire);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with rest(): queued first, then look
  if (pending && resting_.load(std::memory_order_relaxed)) ring_bell(sender_.fd);
}

bool FabricCarrier::step(uint64_t now) {
  driver_.store(std::this_thread::get_id());
  follow_masks();  // first: what a reset queues is for ranks that it unmasked
  read_queue(now);
  outgoing_.send_consumed(now - kConsumedNs);
  const uint64_t writes = outgoing_.writes();
  for (uint64_t refused = outgoing_.post(now); refused != 0; refused &= refused - 1)
    lose(uint32_t(std::countr_zero(refused)), Op::kReset);
  Event events[32];
  size_t count = 0, handled = 0;
  for (uint32_t batch = 0; batch < kBatches && (count = endpoint_.poll(events, std::size(events))) != 0;
       ++batch) {
    for (size_t i = 0; i < count; ++i) handle(events[i], now);
    handled += count;
  }
  if (handled != 0) outgoing_.post(now);
  for (uint64_t late = outgoing_.stuck(now, group_.timing.timeout_ns); late != 0; late &= late - 1)
    lose(uint32_t(std::countr_zero(late)), Op::kReset);
  beat(now);
  driver_.store({});
  return handled != 0 || outgoing_.writes() != writes;
}

void FabricCarrier::read_queue(uint64_t now) {
  Command command;
  while (queue_.pop(command)) outgoing_.enqueue(command, now);
}

void FabricCarrier::handle(const Event& event, uint64_t now) {
  if (event.kind == Event::Kind::kArrived) {
    const Immediate said = Immediate::decode(event.immediate);
    const uint32_t op = said.op % kBankedOps;
    const std::string wrong = incoming_.take(said, outgoing_.last_epoch(Op(op), said.source), now);
    arrived_.fetch_add(1, std::memory_order_release);
    if (wrong.empty()) lost_ &= ~(1ull << said.source);  // it speaks again: after a reset it may go on
    if (said.kind == Kind::kHello && wrong.empty()) greeted(said);
    if (!wrong.empty() && !aborted(group_))
      abort_group(group_, {Code::kViolation, Op(op), Phase::kRecvHeader, group_.rank, said.source, 0, 0});
    return;
  }
  if (event.peer == kNoPeer) return;  // whose it was is not said: the deadlines will find out
  outgoing_.completed(event);
  if (event.kind == Event::Kind::kFailed)
    lose(event.peer, Op((event.tag & 0xffff) / (kMaxBanks * kMaxRanks)));
}

void FabricCarrier::beat(uint64_t now) {
  if (!connected_ || closing_ || now < next_beat_) return;
  next_beat_ = now + kBeatNs;
  for (uint64_t left = group_.remote & ~lost_; left != 0; left &= left - 1) {
    const auto peer = uint32_t(std::countr_zero(left));
    if (outgoing_.idle(peer)) outgoing_.enqueue_signal(peer, Kind::kAlive);
  }
  outgoing_.post(now);
}

// -- sleeping ----------------------------------------------------------------------------------------------

void FabricCarrier::waiting(bool begins) {
  waiting_.store(begins, std::memory_order_seq_cst);  // pairs with stands_aside()
  // The other ranks of this host may need what comes in while this one computes.
  if (!begins && shared_ && aside_.load(std::memory_order_seq_cst)) ring_bell(sender_.fd);
}

void FabricCarrier::sleep(uint64_t ns) {
  bool quiet = false, pending = false;
  {
    const std::lock_guard lock(driving_);
    if (step(now_ns())) waiter_.idle_wakes = 0;
    asleep_.store(true, std::memory_order_seq_cst);
    pending = !outgoing_.idle() || !queue_.empty();
    quiet = arrived_.load() == seen_ && (endpoint_.wait_fd() < 0 || endpoint_.ready_to_sleep());
  }
  if (quiet) nap(waiter_, pending ? std::min(ns, kRetryNs) : std::min(ns, kBeatNs), true);
  asleep_.store(false, std::memory_order_relaxed);
}

void FabricCarrier::ring(uint32_t rank) { bells_.ring(rank); }

void FabricCarrier::wake() {
  ring_bell(waiter_.fd);
  ring_bell(sender_.fd);
}

void FabricCarrier::nap(Sleeper& sleeper, uint64_t ns, bool on_network) {
  int network = on_network ? endpoint_.wait_fd() : -1;
  // Some providers leave their descriptor readable with nothing to read: then look now and then instead.
  if (on_network && (network < 0 || sleeper.idle_wakes > kIdleWakes)) {
    const uint32_t doublings = std::min(sleeper.idle_wakes - std::min(sleeper.idle_wakes, kIdleWakes), 4u);
    ns = std::min(ns, kPollNs << doublings);
    network = -1;
    ++sleeper.idle_wakes;
  }
  pollfd waited[] = {{sleeper.fd, POLLIN, 0}, {network, POLLIN, 0}};
  const timespec timeout{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
  const int ready = ppoll(waited, network < 0 ? 1 : 2, &timeout, nullptr);
  if (ready <= 0) return;
  if ((waited[1].revents & POLLIN) != 0) ++sleeper.idle_wakes;
  uint64_t count;
  if ((waited[0].revents & POLLIN) != 0 && read(sleeper.fd, &count, sizeof count) < 0) return;
}

void FabricCarrier::rest() {
  bool quiet = false, pending = false;
  resting_.store(true, std::memory_order_seq_cst);
  {
    const std::lock_guard lock(driving_);
    pending = !outgoing_.idle();
    quiet = queue_.empty() && (endpoint_.wait_fd() < 0 || endpoint_.ready_to_sleep());
  }
  if (quiet) nap(sender_, pending ? kRetryNs : kBeatNs, true);
  resting_.store(false, std::memory_order_relaxed);
}

// Leaves the network to the rank for a while, if it waits; if it is alone, also if it drove lately.
bool FabricCarrier::stands_aside() {
  aside_.store(true, std::memory_order_seq_cst);
  const bool aside = waiting_.load(std::memory_order_seq_cst) ||
                     (!shared_ && now_ns() - drove_.load(std::memory_order_relaxed) < kRecentNs);
  if (aside) nap(sender_, kAsideNs, false);
  aside_.store(false, std::memory_order_relaxed);
  return aside;
}

void FabricCarrier::run() {
  while (!stop_.load(std::memory_order_acquire)) {
    if (stands_aside()) continue;
    bool moved;
    const uint64_t before = arrived_.load();
    {
      const std::lock_guard lock(driving_);
      moved = step(now_ns());
    }
    if (asleep_.load(std::memory_order_seq_cst) && arrived_.load() != before) ring_bell(waiter_.fd);
    if (moved) {
      sender_.idle_wakes = 0;
    } else {
      rest();
    }
  }
}

}  // namespace ep::fabric

// Drives the endpoint: commands out, completions in, heartbeats, sleeping.
#include "exchange/fabric/carrier.hpp"

#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

#include "exchange/common/cells.hpp"

namespace ep::fabric {
namespace {

constexpr uint64_t kBeatNs = 100 * kMs;
constexpr uint64_t kRecentNs = 200'000;    // if the rank drove this recently, the thread stays aside ...
constexpr uint64_t kAsideNs = 500'000;     // ... for this time
constexpr uint64_t kConsumedNs = 1 * kMs;  // how long a consumed epoch waits for another message
constexpr uint32_t kBatches = 8;           // of events per step, so that both directions make progress

// Upper bound of what one peer has in flight to this rank: single rows in every bank, routing, records.
uint32_t most_arrivals(const Geometry& g) {
  const Layout l = Layout::of(g);
  const uint64_t operation = uint64_t(g.max_tokens) * l.choices_per_token + 4;
  return uint32_t(std::min<uint64_t>((kBankedOps * g.num_banks * operation + 64) * g.num_ranks, 1 << 18));
}

// Messages that an emulated delay does not hold. A good-bye stays behind the rows that it promises.
bool overtakes(Kind kind) { return kind == Kind::kHello || kind == Kind::kAlive || kind == Kind::kAbort; }

}  // namespace

FabricCarrier::FabricCarrier(Group& group, const Options& options, const Share& share,
                             const DeviceMemory& device)
    : group_(group),
      memory_(std::make_shared<FabricMemory>(group, share, device)),
      bells_(group.rank, share),
      shared_(share.ranks_of(group.rank).size() > 1),
      library_(options),
      endpoint_(library_, options,
                {.inbound = memory_->inbound(),
                 .outbound = memory_->outbound(),
                 .device = memory_->device(),
                 .peers = group.geometry.num_ranks,
                 .max_arrivals = most_arrivals(group.geometry)}),
      outgoing_(group, endpoint_, *memory_),
      incoming_(group, memory_->inbox()),
      delayed_(options.delay_ns),
      waiter_(bells_.own()),
      sender_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  for (uint32_t peer = 0; peer < group.geometry.num_ranks; ++peer) {
    if (share.hosts[peer] == share.hosts[group.rank]) {
      group.add_local(peer, memory_->region(peer));
    } else {
      group.add_remote(peer, memory_->outbound().begin, incoming_.pulse(peer));
    }
  }
  group.statistics.domain = endpoint_.domain();
  group.rows_on_device = device.inbound.bytes != 0;
  group.share_rows(share.hosts);
  group.generation = load_cell(group.own(), Head::kIdentity);
  group.carrier = this;
  if (shared_) heartbeat_ = std::make_unique<shm::Heartbeat>(memory_, group.own());
}

FabricCarrier::~FabricCarrier() {
  stop_ = true;
  ring_bell(sender_.bell());
  if (thread_.joinable()) thread_.join();
  group_.carrier = nullptr;
  ::close(sender_.bell());
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
    if (step(now)) waiter_.moved();  // most sleeps end because of something found here
    pending = !outgoing_.idle();
  } else {
    sched_yield();  // the thread may have been preempted by this one in the middle of a step
  }
  seen_ = arrived_.load(std::memory_order_acquire);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with rest(): queue first, then check
  if (pending && resting_.load(std::memory_order_relaxed)) ring_bell(sender_.bell());
}

bool FabricCarrier::step(uint64_t now) {
  driver_.store(std::this_thread::get_id());
  follow_masks();  // first: what a reset queues may be for ranks that it unmasks
  read_queue(now);
  outgoing_.send_consumed(now - kConsumedNs);
  const uint64_t writes = outgoing_.writes();
  for (uint64_t refused = outgoing_.post(now); refused != 0; refused &= refused - 1)
    lose(uint32_t(std::countr_zero(refused)), Op::kReset);
  Event events[32];
  size_t count = 0, handled = take_delayed(now);
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
    if (!delayed_.delays()) return take(said, now);
    if (said.kind == Kind::kHello) compare_clocks(said.source, event.sent);
    if (overtakes(said.kind)) return take(said, now);
    delayed_.hold(said, event.sent, now_ns());
    arrived_.fetch_add(1, std::memory_order_release);  // a rank that sleeps must wake when this is due
    return;
  }
  if (event.peer == kNoPeer) return;  // the provider does not say whose write failed; a deadline will expire
  outgoing_.completed(event);
  if (event.kind != Event::Kind::kFailed) return;
  error_ = event.error;
  lose(event.peer, Op((event.tag & 0xffff) / (kMaxBanks * kMaxRanks)));
}

void FabricCarrier::take(const Immediate& said, uint64_t now) {
  const uint32_t op = said.op % kBankedOps;
  const std::string wrong = incoming_.take(said, outgoing_.last_epoch(Op(op), said.source), now);
  arrived_.fetch_add(1, std::memory_order_release);
  if (wrong.empty()) lost_ &= ~(1ull << said.source);  // alive again: after a reset it may go on
  if (said.kind == Kind::kHello && wrong.empty()) greeted(said);
  if (!wrong.empty() && !aborted(group_))
    abort_group(group_, {Code::kViolation, Op(op), Phase::kRecvHeader, group_.rank, said.source, 0, 0});
}

size_t FabricCarrier::take_delayed(uint64_t now) {
  size_t taken = 0;
  for (Immediate said; delayed_.take(said, now); ++taken) take(said, now);
  return taken;
}

void FabricCarrier::beat(uint64_t now) {
  if (!connected_ || closing_ || now < next_beat_) return;
  next_beat_ = now + kBeatNs;
  for (uint64_t left = group_.remote & ~lost_; left != 0; left &= left - 1) {
    const auto peer = uint32_t(std::countr_zero(left));
    if (outgoing_.idle(peer)) outgoing_.enqueue_signal(peer, Kind::kAlive, encode_pulse(group_, peer));
  }
  outgoing_.post(now);
}

// -- sleeping ----------------------------------------------------------------------------------------------

void FabricCarrier::waiting(bool begins) {
  waiting_.store(begins, std::memory_order_seq_cst);  // pairs with stands_aside()
  if (!begins && shared_ && aside_.load(std::memory_order_seq_cst)) ring_bell(sender_.bell());
}

void FabricCarrier::sleep(uint64_t ns) {
  bool quiet = false, pending = false;
  uint64_t due = 0;
  {
    const std::lock_guard lock(driving_);
    if (step(now_ns())) waiter_.moved();
    due = delayed_.left(now_ns());
    asleep_.store(true, std::memory_order_seq_cst);
    pending = !outgoing_.idle() || !queue_.empty();
    quiet = arrived_.load() == seen_ && (endpoint_.wait_fd() < 0 || endpoint_.ready_to_sleep());
  }
  if (quiet) waiter_.nap(std::min({ns, due, pending ? kRetryNs : kBeatNs}), endpoint_.wait_fd());
  asleep_.store(false, std::memory_order_relaxed);
}

void FabricCarrier::ring(uint32_t rank) { bells_.ring(rank); }

void FabricCarrier::wake() {
  ring_bell(waiter_.bell());
  ring_bell(sender_.bell());
}

void FabricCarrier::rest() {
  bool quiet = false, pending = false;
  uint64_t due = kBeatNs;
  resting_.store(true, std::memory_order_seq_cst);
  {
    const std::lock_guard lock(driving_);
    pending = !outgoing_.idle();
    if (shared_) due = delayed_.left(now_ns());  // a rank that is alone looks when it needs the rows
    quiet = queue_.empty() && (endpoint_.wait_fd() < 0 || endpoint_.ready_to_sleep());
  }
  if (quiet) sender_.nap(std::min(due, pending ? kRetryNs : kBeatNs), endpoint_.wait_fd());
  resting_.store(false, std::memory_order_relaxed);
}

// Leaves the network to the rank for a while if it waits, or if nothing needs attention and it drove
// recently.
bool FabricCarrier::stands_aside() {
  aside_.store(true, std::memory_order_seq_cst);
  const bool aside = waiting_.load(std::memory_order_seq_cst) ||
                     (!shared_ && now_ns() - drove_.load(std::memory_order_relaxed) < kRecentNs);
  if (aside) sender_.nap(kAsideNs);
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
    if (asleep_.load(std::memory_order_seq_cst) && arrived_.load() != before) ring_bell(waiter_.bell());
    if (moved) {
      sender_.moved();
    } else {
      rest();
    }
  }
}

}  // namespace ep::fabric

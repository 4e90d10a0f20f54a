// Connects a rank to the ranks of other hosts: its registered memory, its endpoint, and a thread that drives
// both while the rank computes. A waiting rank drives the endpoint itself, so no thread has to be woken.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "exchange/common/group.hpp"
#include "exchange/fabric/command_queue.hpp"
#include "exchange/fabric/endpoint.hpp"
#include "exchange/fabric/incoming.hpp"
#include "exchange/fabric/outgoing.hpp"
#include "exchange/fabric/registered_memory.hpp"
#include "exchange/fabric/sleeper.hpp"

namespace ep::fabric {

class FabricCarrier : public Carrier {
 public:
  // Adds all ranks to the group, those of other hosts as remote. Throws FabricError, std::system_error, or
  // std::invalid_argument if the share does not fit the group.
  FabricCarrier(Group& group, const Options& options, const Share& share, const DeviceMemory& device = {});
  ~FabricCarrier() override;

  const std::string& description() const { return endpoint_.description(); }
  EndpointAddress address() const { return endpoint_.address(); }

  // Adds the peers and greets them one after the other, from rank + 1 on, so that not all ranks connect to
  // the same peer first. A greeting with another `session` than the group's is refused. addresses: one per
  // rank, including this one. Throws FabricError naming the ranks that did not answer in time.
  void connect(const std::vector<EndpointAddress>& addresses, uint32_t session, uint64_t timeout_ns);

  // Says good-bye and waits for the good-byes of the others, so that no message to them is lost. Call it
  // once.
  void close(uint64_t linger_ns);

  // This rank's memory. Views that outlive the exchange keep it.
  std::shared_ptr<FabricMemory> memory() const { return memory_; }

  void push(const Command& command) override;
  void drive() override;
  void waiting(bool begins) override;
  void sleep(uint64_t ns) override;
  void ring(uint32_t rank) override;
  void wake() override;
  uint64_t leased(Op op, uint32_t bank) const override { return outgoing_.leased(op, bank); }

  uint64_t writes() const { return outgoing_.writes(); }

 private:
  bool step(uint64_t now);  // call with driving_ held; returns whether anything moved
  void read_queue(uint64_t now);
  void handle(const Event& event, uint64_t now);
  void take(const Immediate& said, uint64_t now);
  size_t take_delayed(uint64_t now);  // returns how many were due
  void beat(uint64_t now);
  // Membership: membership.cpp.
  void greet(uint32_t peer, uint64_t deadline);
  void greet_again(uint64_t now);
  void greeted(const Immediate& immediate);
  void compare_clocks(uint32_t peer, uint32_t sent);
  uint64_t silent() const;
  void deliver(uint64_t deadline);
  void lose(uint32_t peer, Op op);
  void follow_masks();
  // Sleeping.
  void rest();
  bool stands_aside();
  void run();

  Group& group_;
  const std::shared_ptr<FabricMemory> memory_;
  const Bells bells_;
  const bool shared_;  // other ranks of this host depend on arrivals, which are read while this rank computes
  const Library library_;
  Endpoint endpoint_;
  CommandQueue queue_;
  Outgoing outgoing_;
  Incoming incoming_;
  DelayLine<Immediate> delayed_;
  uint32_t session_ = 0;
  uint64_t forgotten_ = 0, lost_ = 0, next_beat_ = 0, seen_ = 0;
  bool connected_ = false, closing_ = false;
  // While connecting: why it failed, whose greeting failed, when to greet them again, and the last error.
  std::string failure_;
  uint64_t ungreeted_ = 0, next_greeting_ = 0;
  int error_ = 0;

  std::mutex driving_;
  std::atomic<std::thread::id> driver_;
  std::atomic<uint64_t> arrived_{0};  // number of arrivals
  std::atomic<bool> waiting_{false};  // a rank waits, and drives the network
  std::atomic<uint64_t> drove_{0};    // when the rank last drove
  std::atomic<bool> asleep_{false};   // the rank is in sleep()
  std::atomic<bool> resting_{false};  // the thread sleeps on the network
  std::atomic<bool> aside_{false};    // the thread leaves the network to the rank
  std::atomic<bool> stop_{false};
  Sleeper waiter_, sender_;
  std::unique_ptr<shm::Heartbeat> heartbeat_;  // for the ranks of this host
  std::thread thread_;
};

}  // namespace ep::fabric

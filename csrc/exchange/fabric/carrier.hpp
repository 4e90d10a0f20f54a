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
  // Enters all ranks into the group, those of other hosts as remote. Throws FabricError,
  // std::invalid_argument where the share is not of this group, std::system_error.
  FabricCarrier(Group& group, const Options& options, const Share& share, const DeviceMemory& device = {});
  ~FabricCarrier() override;

  const std::string& description() const { return endpoint_.description(); }
  EndpointAddress address() const { return endpoint_.address(); }

  // Adds the peers and says hello to each, one after the other from rank + 1 on, so that not all ranks open
  // connections to the same one. `session` is the group's: who greets with another one is refused.
  // addresses: one per rank, this one's included. Throws FabricError naming the ranks that did not answer in
  // time.
  void connect(const std::vector<EndpointAddress>& addresses, uint32_t session, uint64_t timeout_ns);

  // Says good-bye and waits for that of the others, so that nothing for them is lost. Once.
  void close(uint64_t linger_ns);

  // This rank's memory, for views that outlive the exchange.
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
  bool step(uint64_t now);  // with driving_ held; whether anything moved
  void read_queue(uint64_t now);
  void handle(const Event& event, uint64_t now);
  void beat(uint64_t now);
  // Membership: fabric_membership.cpp.
  void greet(uint32_t peer, uint64_t deadline);
  void greet_again(uint64_t now);
  void greeted(const Immediate& immediate);
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
  const bool shared_;  // other ranks of this host depend on what this one takes in
  const Library library_;
  Endpoint endpoint_;
  CommandQueue queue_;
  Outgoing outgoing_;
  Incoming incoming_;
  uint32_t session_ = 0;
  uint64_t forgotten_ = 0, lost_ = 0, next_beat_ = 0, seen_ = 0;
  bool connected_ = false, closing_ = false;
  // Of connecting: what ended it, whose greeting failed, when those are greeted again, and the last error.
  std::string failure_;
  uint64_t ungreeted_ = 0, next_greeting_ = 0;
  int error_ = 0;

  std::mutex driving_;
  std::atomic<std::thread::id> driver_;
  std::atomic<uint64_t> arrived_{0};  // counts what came in
  std::atomic<bool> waiting_{false};  // a rank waits, and drives
  std::atomic<uint64_t> drove_{0};    // when it did so last
  std::atomic<bool> asleep_{false};   // ... in sleep()
  std::atomic<bool> resting_{false};  // the thread sleeps on the network
  std::atomic<bool> aside_{false};    // ... or leaves the network to the rank
  std::atomic<bool> stop_{false};
  Sleeper waiter_, sender_;
  std::unique_ptr<shm::Heartbeat> heartbeat_;  // for the ranks of this host
  std::thread thread_;
};

}  // namespace ep::fabric

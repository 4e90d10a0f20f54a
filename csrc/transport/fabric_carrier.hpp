// A rank's way to the ranks of other hosts: its registered memory, its endpoint, and a thread that keeps both
// going while the rank computes. A rank that waits drives the endpoint itself, so no thread has to be woken.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ep/group.hpp"
#include "transport/fabric_endpoint.hpp"
#include "transport/fabric_incoming.hpp"
#include "transport/fabric_memory.hpp"
#include "transport/fabric_outgoing.hpp"
#include "transport/fabric_queue.hpp"

namespace ep::fabric {

class FabricCarrier : public Carrier {
 public:
  // Enters all ranks into the group, those of other hosts as remote. Throws FabricError,
  // std::invalid_argument where the share is not of this group, std::system_error.
  FabricCarrier(Group& group, const Options& options, const Share& share);
  ~FabricCarrier() override;

  const std::string& description() const { return endpoint_.description(); }
  Card card() const { return endpoint_.card(); }

  // Adds the peers and says hello to each, one after the other from rank + 1 on, so that not all ranks open
  // connections to the same one. `session` is the group's: who greets with another one is refused.
  // cards: one per rank, this one's included. Throws FabricError naming the ranks that did not answer in
  // time.
  void connect(const std::vector<Card>& cards, uint32_t session, uint64_t timeout_ns);

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
  void follow_masks();
  void handle(const Event& event, uint64_t now);
  void greeted(const Immediate& immediate);
  void beat(uint64_t now);
  void lose(uint32_t peer, Op op);
  void say(uint32_t peer, Kind kind, uint64_t deadline);
  void deliver(uint64_t deadline);
  // Who sleeps, what wakes him, and how often the network did with nothing to take in.
  struct Sleeper {
    int fd;
    uint32_t idle_wakes = 0;
  };
  void nap(Sleeper& sleeper, uint64_t ns, bool on_network);
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
  std::string failure_;  // of connecting

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

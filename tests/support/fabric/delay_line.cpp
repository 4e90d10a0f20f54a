// Holds messages in a DelayLine and prints when each becomes visible. Numbers on standard input, ns:
//   delay CLOCK_OF_SENDER CLOCK_OF_RECEIVER per message, in the order of their arrival
// One line per message, in the order in which they become visible: number of the message, time.
#include <cstdint>
#include <iostream>

#include "exchange/fabric/network_emulation.hpp"

using namespace ep::fabric;

int main() {
  uint64_t delay = 0, sent = 0, arrived = 0;
  std::cin >> delay;
  DelayLine<uint32_t> line(delay);
  for (uint32_t number = 0; std::cin >> sent >> arrived; ++number) {
    // Through the completion data, whose other half must not matter.
    const CompletionData data{~number, SendTime::encode(sent)};
    line.hold(number, CompletionData::decode(data.encode()).sent, arrived);
  }
  uint64_t now = 0;
  for (uint32_t number = 0; line.left(now) != line.kNothingHeld;) {
    now += line.left(now);
    while (line.take(number, now)) std::cout << number << ' ' << now << '\n';
  }
}

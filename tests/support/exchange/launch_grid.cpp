// Prints the launch grids of dispatch and combine for sizes on standard input, one line per launch.
//   dispatch HALVES SMS SENT EXPECTED RANKS EXPERTS LOCAL HIDDEN -> blocks threads senders split shared_bytes
//   combine HALVES SMS TOKENS RANKS ROW_BYTES NORMS -> blocks threads senders send_split recv_split
#include <iostream>
#include <string>

#include "exchange/nvlink/launch_grid.hpp"

using namespace ep::cuda;

int main() {
  std::string operation;
  uint32_t halves = 0, sms = 0;
  while (std::cin >> operation >> halves >> sms) {
    if (operation == "dispatch") {
      DispatchSizes d{};
      std::cin >> d.sent_tokens >> d.expected_tokens >> d.num_ranks >> d.num_experts >> d.local_experts >>
          d.hidden;
      const DispatchGrid grid = grid_for(Halves(halves), d, sms);
      std::cout << grid.blocks << ' ' << grid.threads << ' ' << grid.senders << ' ' << grid.split << ' '
                << grid.shared_bytes << '\n';
    } else {
      CombineSizes c{};
      std::cin >> c.tokens >> c.num_ranks >> c.row_bytes >> c.norms;
      const CombineGrid grid = grid_for(Halves(halves), c, sms);
      std::cout << grid.blocks << ' ' << grid.threads << ' ' << grid.senders << ' ' << grid.send_split << ' '
                << grid.recv_split << '\n';
    }
  }
}

"""A rank process that reads missing experts slowly, if it is rank 1.

`python -m tests.support.ranks.slow_experts_rank`, as the launcher starts ep_server.ranks.life.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from ep_server.backends import slot_loader
from ep_server.ranks import life

SECONDS = 10  # more than the exchange waits

if __name__ == "__main__":
    load = slot_loader.load_experts

    def slow(model: Any, params: Any, moves: Any, shadow: Any, alive: Callable[[], None]) -> int:
        for _ in range(SECONDS if moves and params.rank == 1 else 0):
            time.sleep(1)
            alive()
        return load(model, params, moves, shadow, alive)

    slot_loader.load_experts = slow
    sys.exit(life.main())

"""A rank process whose masks come late, each after many steps.

`python -m tests.support.ranks.slow_masks_rank`, as the launcher starts ep_server.ranks.life.
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

from ep_server.ranks import life
from ep_server.ranks.worker import RankWorker
from ep_server.text.grammars.masks import GrammarMasks

STEPS = 40  # until a mask is there

if __name__ == "__main__":
    step, advance = RankWorker.step, GrammarMasks._advance
    counter = itertools.count()
    steps = [0]

    def counted(self: RankWorker) -> bool:
        steps[0] = next(counter)
        return step(self)

    def late(self: GrammarMasks, *given: Any) -> list[str]:
        end = steps[0] + STEPS
        while steps[0] < end:
            time.sleep(0.001)
        return advance(self, *given)

    RankWorker.step, GrammarMasks._advance = counted, late
    sys.exit(life.main())

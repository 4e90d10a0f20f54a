"""A rank process that a request kills while it is put into the queue, before any step.

`python -m tests.support.ranks.fatal_add_rank`, as the launcher starts ep_server.ranks.life.
"""

from __future__ import annotations

import os
import signal
import sys

from ep_server.ranks import life
from ep_server.ranks.requests import RankRequests
from ep_server.records import Request

FATAL = (15, 15, 15)  # the prompt

if __name__ == "__main__":
    enqueue = RankRequests._enqueue

    def killed(self: RankRequests, request: Request) -> None:
        if request.prompt_ids == FATAL:
            os.kill(os.getpid(), signal.SIGSEGV)
        enqueue(self, request)

    RankRequests._enqueue = killed  # type: ignore[method-assign]
    sys.exit(life.main())

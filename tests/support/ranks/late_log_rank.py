"""A rank process whose log lines are written late, as on a busy machine.

`python -m tests.support.ranks.late_log_rank`, as the launcher starts ep_server.ranks.life.
"""

from __future__ import annotations

import sys
import time

from ep_server.logs import LineQueue
from ep_server.ranks import life

if __name__ == "__main__":
    write = LineQueue._write

    def late(self: LineQueue, line: str) -> None:
        time.sleep(0.5)
        write(self, line)

    LineQueue._write = late  # type: ignore[method-assign]
    sys.exit(life.main())

"""What threads that read KV rows may know about the steps of their rank. Units: seconds."""

from __future__ import annotations

import time

from ep_server.backends.kv_rows import KvRows
from ep_server.ranks.handoff.wire import HandoffError


class Steps:
    """planned: the number of the last one. plans: how many there were. Written in the rank's loop alone."""

    def __init__(self, rows: KvRows, stall: float) -> None:
        """stall: for which a rank may write nothing while it runs steps."""
        self.planned = self.plans = 0
        self._rows, self._stall = rows, stall
        self._runs, self._at, self._moved = False, (0, 0), 0.0  # at: step and parts, which moved last then

    def plan(self) -> None:
        """One was planned, before a reader can know what it will compute."""
        self.planned = self._rows.plan_step()
        self.plans, self._runs = self.plans + 1, True

    def rest(self) -> None:
        """None runs until the next one is planned."""
        self._runs = False

    def have_read(self, plans: int) -> bool:
        """Whether the rank has read the requests that were sent before it had planned `plans` steps."""
        return not self._runs or self.plans - plans >= 2

    def check(self) -> None:
        """Raises: HandoffError if they have written nothing for too long. Readers call it one at a time.

        Another rank was lost, or hangs: computing the prompt elsewhere takes less time.
        """
        at, now = (self.planned, self._rows.written(self.planned)), time.monotonic()
        if at != self._at or not self._runs:
            self._at, self._moved = at, now
        if now - self._moved > self._stall:
            raise HandoffError(f"the rank ran no step for {now - self._moved:.1f} s")

"""Steps of the part of a run in which all sequences decode, as the ranks' reports have them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ep_server.cli.bench.breakdown import Reports, Steps, steps_between
from ep_server.cli.bench.trace import Trace
from ep_server.engine.engine import Engine

LOOK_SECONDS = 0.02
LEAST_STEPS = 64  # of a window: with fewer, chance decides which steps a device timed


class Window:
    """From the first report that every rank made since all sequences decode to its last before one ended.

    Ranks report twice a second, so up to a second of the part is outside, and a short part has no window.
    """

    def __init__(self, engine: Engine, traces: Sequence[Trace]) -> None:
        self._engine, self._traces = engine, traces
        self._stale: Reports | None = None  # made before all decoded, or not known to be later
        self._begin: Reports | None = None
        self._end: Reports = {}

    async def watch(self) -> None:
        """Returns once a sequence has ended."""
        while self.look():
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> bool:
        """Takes in what the ranks have reported by now; False once a sequence has ended."""
        if any(trace.ended for trace in self._traces):
            return False
        reports = dict(self._engine.rank_statistics)
        if self._stale is None:
            if all(trace.arrivals for trace in self._traces):
                self._stale = reports
        elif all(reports[rank] is not stale for rank, stale in self._stale.items()):
            self._begin = self._begin or reports
            self._end = reports
        return True

    def steps(self, sparse_layers: int) -> Steps | None:
        """None if they were too few."""
        if self._begin is None:
            return None
        steps = steps_between(self._begin, self._end, sparse_layers)
        return steps if steps is not None and steps.count >= LEAST_STEPS else None

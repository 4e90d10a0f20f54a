"""What the launcher of a group knows of its processes, for all who decide about them. One event loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from ep_server.errors import StartupError
from ep_server.ranks.hosts import Rank, ended
from ep_server.ranks.signs import Sign
from ep_server.records import RankReady
from ep_server.v1 import rank_pb2 as pb


@dataclass(frozen=True, slots=True)
class LaunchTiming:
    """Durations in seconds.

    start_stall: longest silence of a loading rank. settle: from the first sign of a loss to its report,
    to collect the signs that name the cause. grace: for the last step at stop(); then SIGTERM, after
    `term` SIGKILL, and after `kill` the process is left to the kernel."""

    start_stall: float = 300.0
    settle: float = 0.1
    grace: float = 5.0
    term: float = 1.0
    kill: float = 10.0


@dataclass(frozen=True, slots=True)
class Timing:
    """start_stall, grace, kill: see LaunchTiming. answer: longest silence of a rank that regroups."""

    start_stall: float
    grace: float
    kill: float
    answer: float


@dataclass(slots=True)
class Board:
    """What the launcher knows of its processes.

    signs: of a loss, not handled yet. dying: processes that have ended, and may still hold memory.
    heard: set by every message and sign. told: when a rank last reported that it loads, or is ready.
    work_number: the last one. watching: see Ranks.watch_cache().
    """

    processes: dict[int, Rank] = field(default_factory=dict)
    ready: dict[int, RankReady] = field(default_factory=dict)
    signs: list[Sign] = field(default_factory=list)
    dying: list[Rank] = field(default_factory=list)
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    told: dict[int, float] = field(default_factory=dict)
    work_number: int = 0
    watching: bool = False

    def send(self, rank: int, message: pb.ToRank) -> None:
        """To the process that has this place, if one does."""
        if rank in self.processes:
            self.processes[rank].send(message.SerializeToString())

    async def end(self, ranks: Collection[int], seconds: float) -> None:
        """Ends processes and reads their channels to the end. Their memory follows. Raises: as until()."""
        old = [self.processes[rank] for rank in sorted(ranks) if rank in self.processes]
        for process in old:
            process.signal(signal.SIGKILL)
        self.dying = [*self.dying, *old]
        over = "the process of a lost one ends"
        await self.until(lambda: all(process.ended.is_set() for process in old), seconds, over)
        for process in old:
            process.close()
            self.processes.pop(process.rank, None)
            self.ready.pop(process.rank, None)

    async def reap(self, seconds: float) -> None:
        """Waits until no process that has ended holds memory. Raises: StartupError after so many seconds."""
        await ended(self.dying, seconds)
        self.dying = [process for process in self.dying if not process.exited.is_set()]
        if self.dying:
            raise StartupError(f"the process of rank {self.dying[0].rank} does not end")

    async def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Raises: StartupError after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    self.heard.clear()
                    await self.heard.wait()
        except TimeoutError:
            raise StartupError(f"ranks have not answered for {seconds:g} s while {what}") from None

    async def silent(
        self, condition: Callable[[], bool], ranks: Callable[[], Collection[int]], seconds: float
    ) -> list[int]:
        """Waits for a condition that depends on ranks. Returns: those silent for so long; else none."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not condition():
            told = {rank: max(began, self.told.get(rank, began)) for rank in ranks()}
            until = min(told.values(), default=began) + seconds
            if loop.time() >= until:
                return sorted(rank for rank in told if told[rank] + seconds <= loop.time())
            self.heard.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self.heard.wait()
        return []

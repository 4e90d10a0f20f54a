"""Ranks that can be lost: a new process takes the place of the lost one, or a new group that of all.

Used in one event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from ep_server.errors import InternalError, StartupError
from ep_server.orders import RankOrder
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.protocol import RankListener, Restarted
from ep_server.ranks.scaling import Wanted
from ep_server.records import RankReady, Request

log = logging.getLogger(__name__)


class RestartingRanks:
    """A group of ranks, and after each loss the next one. make: gives a group that has not started."""

    def __init__(self, make: Callable[[], RankProcesses]) -> None:
        self._make = make
        self.group = make()
        self.num_ranks = self.group.num_ranks
        self._listener: RankListener | None = None
        self._wanted: Wanted | None = None  # as the group that ended was scaled

    def __repr__(self) -> str:
        return f"RestartingRanks({self.group!r})"

    async def start(
        self, listener: RankListener, progress: Callable[[int, str, int, int], None]
    ) -> list[RankReady]:
        """As Ranks.start."""
        self._listener = listener
        return await self.group.start(listener, progress)

    async def restart(self, awaited: Callable[[int], Collection[int]]) -> Restarted:
        """As Ranks.restart. Whatever the old ranks had sent is read before they end."""
        if self._listener is None:
            raise InternalError("restart() of ranks that were never started")
        try:
            return await self.group.restart(awaited)
        except StartupError as error:
            log.warning("all ranks start again: %s", error)
        await self.group.stop()
        self._wanted = self.group.wanted or self._wanted
        weights, self.group = self.group.weights, self._make()
        self.group.use_weights(*weights)
        ready = await self.group.start(self._listener, lambda *_: None)
        if self._wanted is not None:
            self.group.want(self._wanted)
        return Restarted(ready)

    async def scale(self, count: int, hold_out: frozenset[int]) -> float:
        """As Ranks.scale."""
        return await self.group.scale(count, hold_out)

    def submit(self, rank: int, request: Request) -> None:
        """As Ranks.submit."""
        self.group.submit(rank, request)

    def cancel(self, rank: int, number: int) -> None:
        """As Ranks.cancel."""
        self.group.cancel(rank, number)

    def watch_cache(self, *, on: bool) -> None:
        """As Ranks.watch_cache."""
        self.group.watch_cache(on=on)

    def use_weights(self, path: str, version: int, files: str = "") -> None:
        """As Ranks.use_weights."""
        self.group.use_weights(path, version, files)

    def forget_lost(self) -> None:
        """As Ranks.forget_lost."""
        self.group.forget_lost()

    def order(self, order: RankOrder, number: int) -> None:
        """As Ranks.order."""
        self.group.order(order, number)

    async def stop(self) -> None:
        """As Ranks.stop."""
        await self.group.stop()

"""Joins the scheduler's view of what lost ranks have left with its memory. Used in the rank's loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ep_server.backends.cpu.shared_kv import SharedKv
from ep_server.scheduler.lost_blocks import LostBlock, LostBlocks

log = logging.getLogger(__name__)

TURN_SECONDS = 0.05  # of computing time for copies between two steps: the others wait meanwhile
PIECE = 64  # blocks of a copy, after which the time is looked at


@contextmanager
def _without_copies() -> Iterator[None]:
    """What cannot be read is computed again."""
    try:
        yield
    except OSError as error:
        log.warning("KV blocks of a lost rank cannot be read: %s", error)


class LostKv:
    """KV blocks of lost ranks, for one rank that takes over requests of theirs."""

    def __init__(self, lost: LostBlocks, memory: SharedKv | None, block_size: int) -> None:
        """memory: None = nothing outlives a rank."""
        self._lost, self._memory, self._block_size = lost, memory, block_size
        self._begun, self._done = 0, 0  # ticket of the copy that has begun; its blocks that are filled
        self._reported = 0
        lost.names = memory

    def offer(self, places: Sequence[int]) -> None:
        """Ranks were lost, and these places are what they have left. None: all of it was freed."""
        if self._memory is None:
            return
        found = {}
        with _without_copies():
            found = self._memory.names(places)
        self._lost.offer({name: LostBlock(*at, name) for name, at in found.items()})

    def forget(self) -> None:
        """What lost ranks have left is freed."""
        self._lost.offer({})

    def before_plan(self) -> list[int]:
        """Copies for a while. Returns: tickets of the copies that have ended."""
        ended = list[int]()
        until = time.thread_time() + TURN_SECONDS
        while self._memory is not None and (copy := self._lost.next) is not None:
            first = self._done if copy.ticket == self._begun else 0
            blocks, sources = copy.blocks[first : first + PIECE], copy.sources[first : first + PIECE]
            right = 0
            with _without_copies():
                right = self._memory.copy(blocks, sources)
            self._begun, self._done = copy.ticket, first + right
            if right < len(blocks) or self._done == len(copy.blocks):
                self._lost.arrived(copy.ticket, self._done)
                ended.append(copy.ticket)
            if time.thread_time() >= until:
                break
        return ended

    def take_copied(self) -> int:
        """Tokens copied since the last call."""
        before, self._reported = self._reported, self._lost.copied
        return (self._reported - before) * self._block_size

    def counters(self) -> dict[str, int]:
        """Cumulative, under the names of RankStatistics.counters."""
        return {"kv_lost_tokens": self._lost.copied * self._block_size}

"""Processes of ranks that do not take part: they start and load, or end. Used in one event loop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Collection, Sequence
from functools import partial

from ep_server.errors import CheckpointError, ConfigError, StartupError
from ep_server.ranks.board import Board, Timing
from ep_server.ranks.hosts import Replacing
from ep_server.ranks.process import RankCallbacks
from ep_server.ranks.signs import Sign
from ep_server.scheduler.placement import Placement

log = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0  # before the third start in a row, longer before each one after it
MOST_STARTS, MOST_UNREADABLE = 5, 3  # in a row that fail; as files of the checkpoint cannot be read


class Arrivals:
    """loading: ranks whose processes load. ending: ranks whose processes are expected to end."""

    def __init__(self, board: Board, replacing: Replacing, callbacks: RankCallbacks, timing: Timing) -> None:
        self.loading: set[int] = set()
        self.ending: set[int] = set()
        self._board, self._replacing, self._callbacks, self._timing = board, replacing, callbacks, timing
        self._stale: set[int] = set()  # of those that load, killed by us
        self._failed: dict[int, Exception] = {}  # why processes were lost before they took part

    async def start(
        self,
        ranks: Collection[int],
        live: Sequence[int],
        loads: Callable[[int], Placement | None],
        *,
        awaited: bool,
    ) -> None:
        """Starts processes. loads: placement by which a rank loads. Others: as of Replacing.replace().

        Raises: StartupError.
        """
        self._failed = {rank: why for rank, why in self._failed.items() if rank not in ranks}
        make = partial(self._replacing.replace, awaited=awaited)
        for rank in sorted(ranks):
            self.loading.add(rank)
            try:
                made = await make(rank, self._callbacks, live, loads(rank))
            except OSError as error:
                self.loading.discard(rank)
                self._failed[rank] = error
                raise StartupError(f"no process can be started as rank {rank}: {error}") from error
            self._board.processes[rank] = made

    async def until(self, condition: Callable[[], bool], ranks: Collection[int]) -> None:
        """Waits for a condition while these ranks load. A process that reports nothing is killed.

        Raises: StartupError if a rank has none.
        """
        stall = self._timing.start_stall

        def missing() -> set[int]:
            return set(ranks) - set(self._board.ready)

        while not condition():
            for rank in await self._board.silent(condition, missing, stall):
                if rank not in self.loading:
                    raise StartupError(f"rank {rank} has had no process for {stall:g} s")
                log.error("rank %d reported nothing for %g s while it loaded: killing it", rank, stall)
                self._board.told[rank] = asyncio.get_running_loop().time()
                self._board.processes[rank].signal(signal.SIGKILL)

    def lost(self, sign: Sign) -> bool:
        """The process of a rank that loads has ended. Returns: whether nobody wanted that."""
        self.loading.discard(sign.rank)
        if sign.rank in self._stale:
            self._stale.discard(sign.rank)
            return False
        log.warning("rank %d was lost before it joined: %s", sign.rank, sign.error)
        self._failed[sign.rank] = sign.error
        return True

    def why(self, ranks: Collection[int]) -> str:
        """Why ranks were lost before they took part, to end a message with."""
        return "".join(f"; rank {rank}: {self._failed[rank]}" for rank in ranks if rank in self._failed)

    def failures(self, ranks: Collection[int]) -> list[Exception]:
        """Why ranks were lost before they took part."""
        return [self._failed[rank] for rank in ranks if rank in self._failed]

    async def rest(self, failed: int, ranks: Collection[int]) -> None:
        """Before another start of ranks that others wait for, after `failed` in a row.

        Raises: StartupError if only starting all ranks again is left.
        """
        errors = self.failures(ranks)
        unreadable = any(isinstance(error, CheckpointError) for error in errors)
        over = failed >= (MOST_UNREADABLE if unreadable else MOST_STARTS)
        for error in errors:
            if isinstance(error, ConfigError) or (over and isinstance(error, StartupError)):
                raise error
        if over:
            raise StartupError(f"no processes take the places of lost ranks{self.why(ranks)}")
        seconds = AGAIN_SECONDS * (failed if unreadable else failed - 1)
        log.warning("starting them again in %g s%s", seconds, self.why(ranks))
        await asyncio.sleep(seconds)

    def weights_changed(self) -> None:
        """Processes that load read the old weights: others take their place."""
        started = self.loading & set(self._board.processes)  # one that starts only now reads the new ones
        self._stale |= started
        for rank in started:
            self._board.processes[rank].signal(signal.SIGKILL)

    async def end(self, ranks: Collection[int], lost: Collection[int] = ()) -> None:
        """As Board.end(). lost: see KvMemory.leave()."""
        self.ending |= set(ranks)
        await self._board.end(ranks, self._timing.kill)
        for rank in ranks:
            self._replacing.kv.leave(rank, lost=rank in lost)
        self.ending.difference_update(ranks)
        self.loading.difference_update(ranks)

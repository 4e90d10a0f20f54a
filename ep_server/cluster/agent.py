"""A follower's ranks: starts them, forwards their frames and stops them, as node 0 orders.

Frames are forwarded unread. Only messages of a loading rank are read here, for the log.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from ep_server.cluster.link import Link
from ep_server.config import Config
from ep_server.errors import EpServerError, InvalidArgument
from ep_server.ranks.group import GroupPlan, local_ranks
from ep_server.ranks.hosts import WORKER, LocalRanks, ended, spawn_here
from ep_server.ranks.messages import one_line
from ep_server.ranks.process import RankCallbacks, RankProcess
from ep_server.v1 import nodes_pb2 as pb
from ep_server.v1 import rank_pb2

log = logging.getLogger(__name__)

TERM_SECONDS, KILL_SECONDS = 1.0, 10.0
Progress = Callable[[int, str, int, int], None]


class Agent:
    """Runs the ranks of this node. Use it inside one event loop."""

    def __init__(
        self, config: Config, plan: GroupPlan, link: Link, progress: Progress, module: str = WORKER
    ) -> None:
        self._config, self._plan, self._link, self._module = config, plan, link, module
        self._progress = progress
        self._processes: dict[int, RankProcess] = {}
        self._loading: set[int] = set()
        self._spawning: asyncio.Task[None] | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of ranks."""
        return [process.pid for process in self._processes.values()]

    def on_message(self, message: pb.NodeMessage) -> None:
        """Handles an order of node 0 for the ranks. Raises: InvalidArgument for a message of another kind."""
        kind = message.WhichOneof("kind")
        if kind == "rank_frame":
            self._process(message.rank_frame.rank).send(message.rank_frame.payload)
        elif kind == "rank_signal":
            self._signal(message.rank_signal.rank, signal.Signals(message.rank_signal.number))
        elif kind == "spawn" and self._spawning is None:
            self._spawning = asyncio.create_task(self._spawn(message.spawn.kv_blocks))
        else:
            raise InvalidArgument("message", kind, "rank_frame, rank_signal, or spawn once")

    async def end(self) -> None:
        """Stops running ranks: SIGTERM, then SIGKILL; returns when every process is reaped."""
        if self._spawning is not None:
            self._spawning.cancel()
            await asyncio.wait((self._spawning,))
        processes = list(self._processes.values())
        for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
            for process in processes:
                process.signal(number)
            await ended(processes, seconds)
        for process in processes:
            process.close()

    async def _spawn(self, kv_blocks: int) -> None:
        callbacks = RankCallbacks(self._on_frame, self._on_closed, self._on_exit)
        local = LocalRanks(self._config, self._plan, kv_blocks, self._module)
        try:
            await spawn_here(local, callbacks, self._started)
        except (EpServerError, OSError) as error:
            log.error("the ranks of this node cannot start: %s", error)
            self._link.send(failed=pb.Failed(message=f"cannot start its ranks: {one_line(error)}"))
        else:
            self._link.send(spawned=pb.Spawned(pids=self.pids))

    def _started(self, process: RankProcess) -> None:
        self._processes[process.rank] = process
        self._loading.add(process.rank)

    def _signal(self, rank: int, number: signal.Signals) -> None:
        """Ignored for a rank not started yet: node 0 is giving up, and end() follows."""
        if rank in self._processes or rank not in local_ranks(self._config):
            self._process(rank).signal(number)

    def _process(self, rank: int) -> RankProcess:
        if rank not in self._processes:
            raise InvalidArgument("rank", rank, f"one of {sorted(self._processes)}, which run here")
        return self._processes[rank]

    def _on_frame(self, rank: int, payload: bytes) -> None:
        self._link.send(rank_frame=pb.RankFrame(rank=rank, payload=payload))
        if rank in self._loading:
            self._show(rank, rank_pb2.FromRank.FromString(payload))

    def _show(self, rank: int, message: rank_pb2.FromRank) -> None:
        kind = message.WhichOneof("kind")
        if kind == "progress":
            self._progress(rank, message.progress.stage, message.progress.done, message.progress.total)
        elif kind in ("ready", "fatal"):
            self._loading.discard(rank)
        if kind == "fatal":
            log.error("rank %d: %s", rank, message.fatal.message)

    def _on_closed(self, rank: int, reason: str) -> None:
        self._link.send(rank_closed=pb.RankClosed(rank=rank, reason=reason))

    def _on_exit(self, rank: int, code: int) -> None:
        self._link.send(rank_exited=pb.RankExited(rank=rank, code=code))

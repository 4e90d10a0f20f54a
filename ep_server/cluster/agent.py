"""A follower's ranks: plans and starts them, forwards their frames and stops them, as node 0 orders.

Every group of ranks has a number, and messages about a group that has ended are ignored. Frames are forwarded
unread. Only messages of a loading rank are read here, for the log.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import replace

from ep_server.cluster.link import Link
from ep_server.cluster.node_group import GroupOrder
from ep_server.config import Config
from ep_server.errors import CheckpointError, ConfigError, EpServerError, InvalidArgument
from ep_server.ranks.group import GroupPlan, local_ranks, plan_group
from ep_server.ranks.hosts import ended
from ep_server.ranks.local_ranks import WORKER, LocalRanks, spawn_here, standby_pool
from ep_server.ranks.messages import one_line
from ep_server.ranks.process import RankCallbacks, RankProcess
from ep_server.ranks.standby import StandbyPool
from ep_server.v1 import nodes_pb2 as pb
from ep_server.v1 import rank_pb2

log = logging.getLogger(__name__)

TERM_SECONDS, KILL_SECONDS = 1.0, 10.0
Progress = Callable[[int, str, int, int], None]


class Agent:
    """Runs the ranks of this node, in one group after the other. Use it inside one event loop."""

    def __init__(self, config: Config, link: Link, progress: Progress, module: str = WORKER) -> None:
        self._config, self._link, self._module = config, link, module
        self._progress = progress
        self._groups: dict[int, GroupRanks] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._standby = standby_pool(config, module)

    @property
    def pids(self) -> list[int]:
        """Process ids of all groups, in the order of ranks."""
        return [pid for group in self._groups.values() for pid in group.pids]

    def on_message(self, message: pb.NodeMessage) -> None:
        """Handles an order of node 0 for the ranks. Raises: InvalidArgument for a message of another kind."""
        kind = message.WhichOneof("kind")
        if kind == "plan":
            order = message.plan
            weights = order.weights_path, order.weights_version, order.weights_files
            self._plan(GroupOrder(order.group, tuple(order.nodes), *weights))
        elif kind == "end_ranks":
            self._end(message.end_ranks.group)
        elif kind in ("rank_frame", "rank_signal", "spawn"):
            group = self._groups.get(getattr(message, kind).group)
            if group is not None:
                group.on_message(message)
        else:
            raise InvalidArgument("message", kind, "plan, spawn, rank_frame, rank_signal or end_ranks")

    def on_serving(self) -> None:
        """The ranks serve: keeps processes on standby."""
        self._standby.fill()

    async def end(self) -> None:
        """Stops running ranks: SIGTERM, then SIGKILL; returns when every process is reaped."""
        for number in list(self._groups):
            self._end(number)
        if self._ending:
            await asyncio.wait(self._ending)
        await self._standby.close()

    def _plan(self, order: GroupOrder) -> None:
        node = max(self._config.cluster.node_rank, 0)
        if node not in order.nodes or order.number in self._groups:
            raise InvalidArgument("plan", list(order.nodes), f"a new group with node {node}")
        config = order.config(self._config, node)
        group = GroupRanks(config, order, self._link, self._progress, self._standby, self._module)
        self._groups[order.number] = group
        group.plan(set(self._ending))

    def _end(self, number: int) -> None:
        group = self._groups.pop(number, None)
        if group is not None:
            task = asyncio.create_task(group.end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)


class GroupRanks:
    """The ranks of this node in one group."""

    def __init__(
        self,
        config: Config,
        order: GroupOrder,
        link: Link,
        progress: Progress,
        standby: StandbyPool,
        module: str = WORKER,
    ) -> None:
        """config: of the ranks."""
        self._config, self._order, self._link, self._module = config, order, link, module
        self._standby = standby
        self._progress = progress
        self._group_plan: GroupPlan | None = None
        self._processes: dict[int, RankProcess] = {}
        self._loading: set[int] = set()
        self._doomed: dict[int, signal.Signals] = {}  # by rank: signal for one that has not started
        self._task: asyncio.Task[None] | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of ranks."""
        return [process.pid for process in self._processes.values()]

    def plan(self, ending: set[asyncio.Task[None]]) -> None:
        """Plans once the ranks that are ending have given their memory back, and answers node 0."""
        self._task = asyncio.create_task(self._plan(ending))

    def on_message(self, message: pb.NodeMessage) -> None:
        """Handles an order for these ranks. Raises: InvalidArgument for another node's rank, or no plan."""
        kind = message.WhichOneof("kind")
        if kind == "rank_frame":
            self._process(message.rank_frame.rank).send(message.rank_frame.payload)
        elif kind == "rank_signal":
            self._signal(message.rank_signal.rank, signal.Signals(message.rank_signal.number))
        elif self._group_plan is None or self._processes:
            raise InvalidArgument("message", kind, "rank_frame or rank_signal, or spawn once after its plan")
        else:
            self._task = asyncio.create_task(self._spawn(self._group_plan, message.spawn))

    async def end(self) -> None:
        """Stops running ranks: SIGTERM, then SIGKILL; returns when every process is reaped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        processes = list(self._processes.values())
        for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
            for process in processes:
                process.signal(number)
            await ended(processes, seconds)
        for process in processes:
            process.close()

    async def _plan(self, ending: set[asyncio.Task[None]]) -> None:
        if ending:
            await asyncio.wait(ending)
        try:
            self._group_plan = await asyncio.to_thread(plan_group, self._config)
        except (EpServerError, OSError) as error:
            self._fail("cannot hold its ranks", error)
        else:
            blocks = self._group_plan.kv_blocks
            self._link.send(planned=pb.Planned(group=self._order.number, kv_blocks=blocks))

    async def _spawn(self, plan: GroupPlan, spawn: pb.Spawn) -> None:
        callbacks = RankCallbacks(self._on_frame, self._on_closed, self._on_exit)
        agreed = replace(plan, kv_blocks=spawn.kv_blocks)
        local = LocalRanks(
            self._config,
            agreed,
            self._module,
            weights=self._order.weights_version,
            files=self._order.weights_files,
        )
        try:
            await spawn_here(local, callbacks, self._started, self._standby if spawn.urgent else None)
        except (EpServerError, OSError) as error:
            self._fail("cannot start its ranks", error)
        else:
            self._link.send(spawned=pb.Spawned(group=self._order.number, pids=self.pids))

    def _fail(self, what: str, error: Exception) -> None:
        log.error("this node %s: %s", what, error)
        message, unfit = f"{what}: {one_line(error)}", isinstance(error, CheckpointError | ConfigError)
        self._link.send(failed=pb.Failed(group=self._order.number, message=message, unfit=unfit))

    def _started(self, process: RankProcess) -> None:
        self._processes[process.rank] = process
        self._loading.add(process.rank)
        if process.rank in self._doomed:
            process.signal(self._doomed[process.rank])

    def _signal(self, rank: int, number: signal.Signals) -> None:
        """A rank that has not started yet gets the signal once it has."""
        if rank in self._processes or rank not in local_ranks(self._config):
            self._process(rank).signal(number)
        else:
            self._doomed[rank] = number

    def _process(self, rank: int) -> RankProcess:
        if rank not in self._processes:
            raise InvalidArgument("rank", rank, f"one of {sorted(self._processes)}, which run here")
        return self._processes[rank]

    def _on_frame(self, rank: int, payload: bytes) -> None:
        self._link.send(rank_frame=pb.RankFrame(rank=rank, payload=payload, group=self._order.number))
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
        closed = pb.RankClosed(rank=rank, reason=reason, group=self._order.number)
        self._link.send(rank_closed=closed)

    def _on_exit(self, rank: int, code: int) -> None:
        self._link.send(rank_exited=pb.RankExited(rank=rank, code=code, group=self._order.number))

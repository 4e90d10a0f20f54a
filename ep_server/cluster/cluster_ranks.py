"""The ranks of several nodes: one group after the other, each on the nodes that are there.

Satisfies ranks.protocol.Ranks; used in one event loop. The engine numbers ranks over all nodes. A group
numbers them over its own nodes, and LiveGroup translates. After a loss a new group starts on the nodes that
are left. When a node joins or leaves, the next group starts beside the current one where memory allows, and
takes over once it is warm. Otherwise the current one ends first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ep_server.cluster.leader import Leader
from ep_server.cluster.node_group import NodeGroup
from ep_server.config import Config
from ep_server.errors import (
    CheckpointError,
    ConfigError,
    EpServerError,
    InternalError,
    StartupError,
    WrongState,
)
from ep_server.orders import OrderDone, RankOrder
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.protocol import GroupState, RankListener, Restarted
from ep_server.ranks.slots import num_ranks
from ep_server.records import (
    KvEventBatch,
    LossCause,
    PromptLogprobs,
    RankReady,
    RankStatistics,
    Request,
    TokenEvent,
)

log = logging.getLogger(__name__)

Progress = Callable[[int, str, int, int], None]


class GroupEvents:
    """Passes the events of a group on, under the numbers of the whole server, while `active`.

    Satisfies RankListener. numbers: by rank of the group.
    """

    def __init__(self, listener: RankListener, numbers: Sequence[int], each: int, *, active: bool) -> None:
        """each: ranks of a node."""
        self.failed = ""  # why the group cannot be used, if it was lost before it was active
        self._listener, self._numbers, self._each = listener, numbers, each
        self._active = active
        self._newest: dict[int, RankStatistics] = {}

    def begin(self) -> None:
        """The group serves."""
        self._active = True
        for statistics in self._newest.values():
            self._listener.on_statistics(statistics)
        self._newest.clear()

    def end(self) -> None:
        """Another group serves, or will."""
        self._active = False

    def on_tokens(self, rank: int, events: Sequence[TokenEvent]) -> None:
        """As RankListener.on_tokens."""
        if self._active:
            self._listener.on_tokens(self._numbers[rank], events)

    def on_prompt_logprobs(self, rank: int, scored: PromptLogprobs) -> None:
        """As RankListener.on_prompt_logprobs."""
        if self._active:
            self._listener.on_prompt_logprobs(self._numbers[rank], scored)

    def on_freed(self, rank: int, number: int) -> None:
        """As RankListener.on_freed."""
        if self._active:
            self._listener.on_freed(self._numbers[rank], number)

    def on_request_failed(self, rank: int, number: int, error: EpServerError) -> None:
        """As RankListener.on_request_failed."""
        if self._active:
            self._listener.on_request_failed(self._numbers[rank], number, error)

    def on_statistics(self, statistics: RankStatistics) -> None:
        """As RankListener.on_statistics."""
        waits = {(op, self._numbers[peer]): ns for (op, peer), ns in statistics.peer_wait_ns.items()}
        statistics = replace(statistics, rank=self._numbers[statistics.rank], peer_wait_ns=waits)
        if self._active:
            self._listener.on_statistics(statistics)
        else:
            self._newest[statistics.rank] = statistics

    def on_running(self, rank: int, sequences: int) -> None:
        """As RankListener.on_running."""
        if self._active:
            self._listener.on_running(self._numbers[rank], sequences)

    def on_begun(self, rank: int, numbers: Sequence[int], adding: int = 0, copied: int = 0) -> None:
        """As RankListener.on_begun."""
        if self._active:
            self._listener.on_begun(self._numbers[rank], numbers, adding, copied)

    def on_kv_events(self, batch: KvEventBatch) -> None:
        """As RankListener.on_kv_events."""
        if self._active:
            self._listener.on_kv_events(replace(batch, rank=self._numbers[batch.rank]))

    def on_order_done(self, rank: int, done: OrderDone) -> None:
        """As RankListener.on_order_done."""
        if self._active:
            self._listener.on_order_done(self._numbers[rank], done)

    def on_rank_lost(self, rank: int, cause: LossCause) -> None:
        """As RankListener.on_rank_lost. With a node, all its ranks are lost."""
        if not self._active:
            return
        first = rank - rank % self._each
        for lost in range(first, first + self._each) if cause is LossCause.NODE else (rank,):
            self._listener.on_rank_lost(self._numbers[lost], cause)

    def on_group(self, state: GroupState) -> None:
        """As RankListener.on_group."""
        if self._active:
            self._listener.on_group(replace(state, live=tuple(self._numbers[rank] for rank in state.live)))

    def on_lost(self, rank: int, message: str, seconds: float) -> None:
        """As RankListener.on_lost."""
        if self._active:
            self._active = False  # what the other ranks publish now is published again
            self._listener.on_lost(self._numbers[rank], message, seconds)
        else:
            self.failed = message

    def on_left(self, rank: int) -> None:
        """As RankListener.on_left."""
        raise InternalError(f"no rank leaves a group: {rank}")

    def on_regroup(self, why: str) -> None:
        """As RankListener.on_regroup."""
        raise InternalError(f"a group does not regroup by itself: {why}")


class LiveGroup:
    """A group of ranks, under the numbers of the whole server."""

    def __init__(self, leader: Leader, hosts: NodeGroup, listener: RankListener, *, active: bool) -> None:
        self.hosts = hosts
        self.nodes = hosts.order.nodes
        each = hosts.config.parallel.ranks
        self._leader = leader
        self._numbers = hosts.order.ranks(each)
        self.events = GroupEvents(listener, self._numbers, each, active=active)
        self.ranks = RankProcesses(hosts.config, hosts)
        self.ready: list[RankReady] = []

    def __repr__(self) -> str:
        return f"LiveGroup({self.hosts!r}, {self.ranks!r})"

    @property
    def usable(self) -> bool:
        """Whether it has started and none of it is lost."""
        return bool(self.ready) and not self.events.failed and not self.hosts.lost_nodes

    @property
    def unfit_node(self) -> int | None:
        """The node whose files or options are why the group did not start, if they are."""
        sign = self.ranks.failed
        if sign is None:
            return self.hosts.unfit_node
        unfit = isinstance(sign.error, CheckpointError | ConfigError)
        return self._numbers[sign.rank] // self.hosts.config.parallel.ranks if unfit else None

    def local(self, rank: int) -> int:
        """The number in this group. Raises: InternalError if the rank is absent."""
        if rank not in self._numbers:
            raise InternalError(f"rank {rank} is absent: {self!r}")
        return self._numbers.index(rank)

    async def start(self, progress: Progress) -> list[RankReady]:
        """As Ranks.start. After an error nothing is left of it."""

        def named(rank: int, stage: str, done: int, total: int) -> None:
            progress(self._numbers[rank], stage, done, total)

        try:
            ready = await self.ranks.start(self.events, named)
        except BaseException:
            self._leader.drop(self.hosts)
            raise
        self.ready = [replace(each, rank=self._numbers[each.rank]) for each in ready]
        return self.ready

    async def stop(self) -> None:
        """Ends its processes. Idempotent."""
        self.events.end()
        await self.ranks.stop()
        self._leader.drop(self.hosts)


class ClusterRanks:
    """The ranks of all nodes that are there."""

    def __init__(self, config: Config, leader: Leader) -> None:
        self.num_ranks = num_ranks(config)
        self._leader = leader
        self._beside = config.parallel.device == "cpu"  # a GPU's memory has no room for two groups
        self._listener: RankListener | None = None
        self._current: LiveGroup | None = None
        self._prepared: LiveGroup | None = None  # has started beside the current one
        self._preparing: asyncio.Task[object] | None = None
        self._following: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._restarting = False
        self._changed = asyncio.Event()
        self._weights = "", 0, ""

    def __repr__(self) -> str:
        return f"ClusterRanks({self._current!r}, prepared={self._prepared!r})"

    async def start(self, listener: RankListener, progress: Progress) -> list[RankReady]:
        """As Ranks.start, once all nodes have joined."""
        self._listener = listener
        await self._leader.all_joined()
        self._weights = "", 0, self._leader.files
        group = self._make()
        ready = await group.start(progress)
        self._adopt(group)
        self._leader.on_change = self._changed.set
        self._following = asyncio.create_task(self._follow())
        return ready

    async def restart(self, awaited: Callable[[int], Collection[int]]) -> Restarted:
        """As Ranks.restart: another group takes over, on the nodes that are there now. None is kept."""
        old = self._serving
        self._restarting = True
        old.events.end()
        try:
            await self._stop_preparing()
            group, self._prepared = self._prepared, None
            if group is not None and self._fits(group):
                group.events.begin()
                self._end_later(old)
            else:
                if group is not None:
                    self._end_later(group)
                await old.stop()
                group = self._make()
                await group.start(lambda *_: None)
            self._adopt(group)
            return Restarted(group.ready)
        except StartupError as error:
            if node := group.unfit_node if group else None:
                self._leader.turn_away(node, str(error))
                raise StartupError(f"node {node} cannot take part: {error}") from error
            self._go_back(group.nodes if group else (), str(error))
            raise
        finally:
            self._restarting = False
            self._changed.set()

    async def scale(self, count: int, hold_out: frozenset[int]) -> float:
        """Refused: nodes leave and return instead."""
        raise WrongState("ranks of several nodes do not change one by one: stop or start a node")

    def submit(self, rank: int, request: Request) -> None:
        """As Ranks.submit."""
        self._serving.ranks.submit(self._serving.local(rank), request)

    def cancel(self, rank: int, number: int) -> None:
        """As Ranks.cancel."""
        self._serving.ranks.cancel(self._serving.local(rank), number)

    def watch_cache(self, *, on: bool) -> None:
        """As Ranks.watch_cache."""
        self._serving.ranks.watch_cache(on=on)

    def use_weights(self, path: str, version: int, files: str = "") -> None:
        """As Ranks.use_weights. A group that is being prepared has others: it starts again."""
        self._weights = path, version, files
        if self._preparing is not None:
            self._preparing.cancel()
            self._changed.set()

    def forget_lost(self) -> None:
        """All ranks start again after a loss, with nothing of the lost ones."""

    def order(self, order: RankOrder, number: int) -> None:
        """As Ranks.order."""
        self._serving.ranks.order(order, number)

    async def stop(self) -> None:
        """As Ranks.stop."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait((self._following,))
        await self._stop_preparing()
        groups = [group for group in (self._prepared, self._current) if group is not None]
        await asyncio.gather(*(group.stop() for group in groups), *self._ending)

    @property
    def _serving(self) -> LiveGroup:
        if self._current is None:
            raise InternalError("the ranks have not started")
        return self._current

    def _fits(self, group: LiveGroup) -> bool:
        """Whether a group that was prepared can take over."""
        version = group.hosts.order.weights_version
        return group.usable and group.nodes == self._leader.members and version == self._weights[1]

    def _make(self, beside: NodeGroup | None = None) -> LiveGroup:
        assert self._listener is not None
        hosts = self._leader.group(self._weights, beside)
        return LiveGroup(self._leader, hosts, self._listener, active=beside is None)

    def _adopt(self, group: LiveGroup) -> None:
        self._current = group
        self._leader.adopt(group.hosts)

    def _end_later(self, group: LiveGroup) -> None:
        group.events.end()
        task = asyncio.create_task(group.stop())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _stop_preparing(self) -> None:
        if self._preparing is not None and not self._preparing.done():
            self._preparing.cancel()
            await asyncio.wait((self._preparing,))

    async def _follow(self) -> None:
        """Regroups whenever other nodes are there than the current group has."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            nodes = self._leader.members
            if self._restarting or nodes == self._serving.nodes or self._serving.hosts.lost_nodes:
                continue  # a restart takes the nodes that are there, and sets `changed` at its end
            why = _describe(self._serving.nodes, nodes)
            log.info("%s: preparing ranks on nodes %s", why, list(nodes))
            ready = await self._prepare() if self._beside else True
            if ready and not self._restarting and self._listener is not None:
                self._restarting = True  # restart() follows
                self._listener.on_regroup(why)

    async def _prepare(self) -> bool:
        """Starts the next group beside the current one. Returns: whether to regroup now."""
        group = self._make(beside=self._serving.hosts)
        self._preparing = asyncio.create_task(group.start(lambda *_: None))
        await asyncio.wait((self._preparing,))
        task, self._preparing = self._preparing, None
        if task.cancelled():
            return False
        error = task.exception()
        if error is None and group.nodes == self._leader.members:
            self._prepared = group
            return True
        if error is None or group.hosts.lost_nodes:
            self._end_later(group)
            self._changed.set()  # for the nodes that are there now
            return False
        unfit = group.unfit_node
        if isinstance(error, StartupError) and not group.hosts.planned and unfit is None:
            log.info("no room for two groups of ranks (%s): the current one ends first", error)
            return True
        if unfit is not None and unfit in self._serving.nodes:
            self._go_back(group.nodes, _cannot_again(unfit, error))
        else:
            self._go_back(group.nodes, str(error))
        return False

    def _go_back(self, nodes: Sequence[int], why: str) -> None:
        """A group on these nodes cannot start: the nodes that are new in it may be why."""
        for node in set(nodes) - set(self._serving.nodes):
            self._leader.turn_away(node, why)
        if set(self._serving.nodes) - set(nodes):
            self._leader.keep_leaving(why)


def _cannot_again(node: int, error: BaseException) -> str:
    """Why a group with a node that serves cannot start, and what to do."""
    return (
        f"node {node}, which serves, cannot start ranks again: {error}; "
        "restore its files and options, or stop it, then start this node again"
    )


def _describe(before: Sequence[int], after: Sequence[int]) -> str:
    """What changes from one group's nodes to the next one's."""
    back, out = sorted(set(after) - set(before)), sorted(set(before) - set(after))
    parts = [f"node {node} is back" for node in back] + [f"node {node} leaves" for node in out]
    return ", ".join(parts)

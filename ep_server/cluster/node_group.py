"""One group of ranks over several nodes, as node 0 starts it: a plan that all accept, then the processes.

Satisfies ranks.hosts.Hosts; used in one event loop. A remote rank looks like a RankProcess; all ranks of a
node share one link. The ranks of a group are numbered over its own nodes. Units: seconds.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ep_server.cluster.link import Link
from ep_server.config import Config
from ep_server.errors import InternalError, StartupError
from ep_server.ranks.group import GroupPlan, plan_group
from ep_server.ranks.hosts import Rank
from ep_server.ranks.local_ranks import WORKER, LocalRanks, spawn_here
from ep_server.ranks.process import RankCallbacks
from ep_server.ranks.standby import StandbyPool
from ep_server.v1 import nodes_pb2 as pb

log = logging.getLogger(__name__)


class RemoteRank:
    """One rank of another node. Satisfies ranks.hosts.Rank."""

    def __init__(self, rank: int, link: Link, group: int = 0) -> None:
        self.rank = rank
        self.pid = 0
        self.returncode: int | None = None
        self.exited = self.ended = asyncio.Event()
        self._link = link
        self._group = group

    def __repr__(self) -> str:
        return f"RemoteRank(rank={self.rank}, pid={self.pid}, returncode={self.returncode})"

    @property
    def buffered(self) -> int:
        """Bytes queued for the node, for all its ranks together."""
        return self._link.buffered

    def send(self, payload: bytes) -> None:
        """Sends a frame; does not block."""
        self._link.send(rank_frame=pb.RankFrame(rank=self.rank, payload=payload, group=self._group))

    def signal(self, number: signal.Signals) -> None:
        """Asks the node to signal the process unless it has ended."""
        if not self.exited.is_set():
            self._link.send(rank_signal=pb.RankSignal(rank=self.rank, number=number, group=self._group))

    def close(self) -> None:
        """Does nothing: all ranks share the link."""


class RemoteRanks:
    """The ranks of one follower in a group. on_message() handles its messages, lost() its loss."""

    def __init__(self, node: int, ranks: range, link: Link, callbacks: RankCallbacks, group: int = 0) -> None:
        self.ranks = [RemoteRank(rank, link, group) for rank in ranks]
        several = f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        self._name = f"node {node} ({several})"
        self._callbacks = callbacks
        self._by_number = {rank.rank: rank for rank in self.ranks}

    def on_message(self, message: pb.NodeMessage) -> None:
        """Handles a message about the ranks. Raises: InternalError for one of another kind."""
        kind = message.WhichOneof("kind")
        if kind == "rank_frame":
            self._callbacks.on_frame(self._rank(message.rank_frame.rank).rank, message.rank_frame.payload)
        elif kind == "rank_closed":
            self._callbacks.on_closed(self._rank(message.rank_closed.rank).rank, message.rank_closed.reason)
        elif kind == "rank_exited":
            self._exited(self._rank(message.rank_exited.rank), message.rank_exited.code)
        elif kind == "spawned":
            for rank, pid in zip(self.ranks, message.spawned.pids, strict=True):
                rank.pid = pid
        elif kind == "failed":
            self._end(message.failed.message)
        else:
            raise InternalError(f"{self._name} sent an unexpected message of kind {kind!r}")

    def lost(self, reason: str) -> None:
        """Reports the node's ranks as lost, once for all of them."""
        self._end(reason)

    def _end(self, reason: str) -> None:
        left = [rank for rank in self.ranks if not rank.exited.is_set()]
        for rank in left:
            rank.exited.set()
        if left:
            self._callbacks.on_host_lost(self.ranks[0].rank, f"{self._name} {reason}")

    def _exited(self, rank: RemoteRank, code: int) -> None:
        if not rank.exited.is_set():
            rank.returncode = code
            rank.exited.set()
            self._callbacks.on_exit(rank.rank, code)

    def _rank(self, number: int) -> RemoteRank:
        if number not in self._by_number:
            raise InternalError(f"{self._name} reported rank {number}, which it does not run")
        return self._by_number[number]


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """What a group is made of.

    number: counts the groups of a server. nodes: in rank order; node 0 is the first.
    weights_path, weights_version: "" and 0 for those of each node's own configuration.
    weights_files: models.identity.files_identity() of node 0's; "" = not checked.
    """

    number: int
    nodes: tuple[int, ...]
    weights_path: str = ""
    weights_version: int = 0
    weights_files: str = ""

    def config(self, config: Config, node: int) -> Config:
        """The configuration of a node's ranks: only these nodes exist, without spare slots."""
        alone = len(self.nodes) == 1
        cluster = replace(
            config.cluster,
            nodes=len(self.nodes),
            node_rank=self.nodes.index(node),
            rendezvous="" if alone else config.cluster.rendezvous,
        )
        model = replace(config.model, path=self.weights_path or config.model.path)
        resilience = replace(config.resilience, spare_slots="0") if alone else config.resilience
        return replace(config, cluster=cluster, model=model, resilience=resilience)

    def ranks(self, each: int) -> Sequence[int]:
        """By rank of the group: its number in the whole server, where every node has `each` ranks."""
        return [node * each + rank for node in self.nodes for rank in range(each)]


class NodeGroup:
    """The nodes of one group of ranks.

    Args:
        config: of node 0. links: of the other nodes.
        least_blocks: a group with fewer KV blocks does not start.
        standby: processes of this node that it may use; the other nodes then use theirs.
    """

    def __init__(
        self,
        config: Config,
        order: GroupOrder,
        links: Mapping[int, Link],
        module: str = WORKER,
        least_blocks: int = 0,
        standby: StandbyPool | None = None,
    ) -> None:
        self.order = order
        self.config = order.config(config, 0)
        self.planned = False  # all nodes can hold their ranks
        self.kv_blocks = 0
        self.lost_nodes: set[int] = set()
        self.unfit_node: int | None = None  # whose files or options are why it has no plan
        self._links, self._module, self._least_blocks = links, module, least_blocks
        self._standby = standby
        self._answers: dict[int, asyncio.Future[int]] = {}
        self._remote: dict[int, RemoteRanks] = {}

    def __repr__(self) -> str:
        return f"NodeGroup({self.order.number}, nodes={self.order.nodes}, lost={self.lost_nodes})"

    @property
    def replacing(self) -> None:
        """As Hosts.replacing: a group over several hosts starts again as a whole."""
        return

    @property
    def weights(self) -> tuple[str, int, str]:
        """As Hosts.weights."""
        return self.order.weights_path, self.order.weights_version, self.order.weights_files

    def use_weights(self, path: str, version: int, files: str = "") -> None:
        """As Hosts.use_weights: nothing, as each group starts once."""

    async def spawn(self, callbacks: RankCallbacks, started: Callable[[Rank], None]) -> None:
        """As Hosts.spawn: once all nodes have planned, each starts its ranks."""
        plan = await self._plan()
        self.planned, self.kv_blocks = True, plan.kv_blocks
        log.info("nodes %s: %d KV blocks on each rank", list(self.order.nodes), self.kv_blocks)
        each = self.config.parallel.ranks
        for node, link in self._links.items():  # from here on, losing a node means losing its ranks
            first = self.order.nodes.index(node) * each
            number = self.order.number
            self._remote[node] = RemoteRanks(node, range(first, first + each), link, callbacks, number)
            urgent = self._standby is not None
            link.send(spawn=pb.Spawn(kv_blocks=self.kv_blocks, group=number, urgent=urgent))
        _, weights, files = self.weights
        local = LocalRanks(self.config, plan, self._module, weights=weights, files=files)
        await spawn_here(local, callbacks, started, self._standby)
        for remote in self._remote.values():
            for rank in remote.ranks:
                started(rank)

    def on_message(self, node: int, message: pb.NodeMessage) -> None:
        """Handles what a node says about this group. Raises: InternalError."""
        kind, answer = message.WhichOneof("kind"), self._answers.get(node)
        if kind == "planned" and answer is not None:
            _answer(answer, message.planned.kv_blocks)
        elif kind == "failed" and answer is not None and not answer.done():
            self.unfit_node = node if message.failed.unfit else None
            answer.set_exception(StartupError(f"node {node} {message.failed.message}"))
        elif node in self._remote:
            self._remote[node].on_message(message)
        elif kind not in ("planned", "failed"):
            raise InternalError(f"node {node} sent {kind!r} before its ranks were to start")

    def lost(self, node: int, reason: str) -> None:
        """A node is lost."""
        if node not in self._links:
            return
        self.lost_nodes.add(node)
        answer = self._answers.get(node)
        if node in self._remote:
            self._remote[node].lost(reason)
        elif answer is not None and not answer.done():
            answer.set_exception(StartupError(f"node {node} {reason}"))

    def end(self) -> None:
        """Has the other nodes end what is left of their ranks. Later messages about them are ignored."""
        for link in self._links.values():
            link.send(end_ranks=pb.EndRanks(group=self.order.number))

    async def _plan(self) -> GroupPlan:
        """Returns: this node's plan, with as many KV blocks for each rank as the node that allows the least.

        Raises: StartupError if a node cannot hold its ranks, is lost, or does not answer.
        """
        loop, seconds = asyncio.get_running_loop(), self.config.cluster.connect_seconds
        self._answers = {node: loop.create_future() for node in self._links}
        for node, link in self._links.items():
            if link.reason:
                self.lost(node, link.reason)
            link.send(
                plan=pb.Plan(
                    group=self.order.number,
                    nodes=self.order.nodes,
                    weights_version=self.order.weights_version,
                    weights_path=self.order.weights_path,
                    weights_files=self.order.weights_files,
                )
            )
        answers = asyncio.gather(*self._answers.values())
        try:
            plan = await asyncio.to_thread(plan_group, self.config)
            async with asyncio.timeout(seconds):
                blocks = min([plan.kv_blocks, *await answers])
        except TimeoutError:
            silent = [node for node, answer in self._answers.items() if not answer.done()]
            raise StartupError(f"nodes {silent} did not plan their ranks within {seconds:g} s") from None
        finally:
            answers.cancel()
        if blocks < self._least_blocks:
            raise StartupError(f"memory for {blocks} KV blocks on each rank, {self._least_blocks} are wanted")
        return replace(plan, kv_blocks=blocks)


def _answer(answer: asyncio.Future[int], blocks: int) -> None:
    if not answer.done():
        answer.set_result(blocks)

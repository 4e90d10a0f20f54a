"""Node 0: the port that followers join, the list of joined nodes, and all their ranks as one group.

Satisfies ranks.hosts.Hosts; used in one event loop. A remote rank looks like a RankProcess; all ranks of a
node share one link. Units: seconds.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from grpc import aio

from ep_server.cluster.claim import Claim, claim_in, claim_of, refusal
from ep_server.cluster.discovery import NodePlace
from ep_server.cluster.link import Link, liveness
from ep_server.cluster.security import cluster_names, rendezvous_port, warn_if_open
from ep_server.config import Config
from ep_server.errors import InternalError, InvalidArgument, StartupError, Unavailable
from ep_server.frontend.messages import CallLimits
from ep_server.frontend.port import Port
from ep_server.ranks.hosts import WORKER, LocalRanks, Rank, spawn_here, warn_of_unused
from ep_server.ranks.process import RankCallbacks
from ep_server.v1 import nodes_pb2 as pb
from ep_server.v1 import nodes_pb2_grpc

log = logging.getLogger(__name__)

END_SECONDS = 2.0  # time for followers to receive the end of the server


class RemoteRank:
    """One rank of another node. Satisfies ranks.hosts.Rank."""

    def __init__(self, rank: int, link: Link) -> None:
        self.rank = rank
        self.pid = 0
        self.returncode: int | None = None
        self.exited = asyncio.Event()
        self._link = link

    def __repr__(self) -> str:
        return f"RemoteRank(rank={self.rank}, pid={self.pid}, returncode={self.returncode})"

    @property
    def buffered(self) -> int:
        """Bytes queued for the node, for all its ranks together."""
        return self._link.buffered

    def send(self, payload: bytes) -> None:
        """Sends a frame; does not block."""
        self._link.send(rank_frame=pb.RankFrame(rank=self.rank, payload=payload))

    def signal(self, number: signal.Signals) -> None:
        """Asks the node to signal the process unless it has ended."""
        if not self.exited.is_set():
            self._link.send(rank_signal=pb.RankSignal(rank=self.rank, number=number))

    def close(self) -> None:
        """Does nothing: all ranks share the link."""


class RemoteRanks:
    """All ranks of one follower. on_message() handles its messages, lost() its loss."""

    def __init__(self, node: int, ranks: range, link: Link, callbacks: RankCallbacks) -> None:
        self.ranks = [RemoteRank(rank, link) for rank in ranks]
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


class Leader(nodes_pb2_grpc.NodesServicer):  # type: ignore[misc, unused-ignore]
    """Node 0 of several. on_stop_asked: called when a follower got a signal to stop."""

    def __init__(self, config: Config, place: NodePlace, module: str = WORKER) -> None:
        self._config, self._place, self._module = config, place, module
        self.on_stop_asked: Callable[[], None] = lambda: None
        self._claim: asyncio.Future[Claim] = asyncio.get_running_loop().create_future()
        self._links: dict[int, Link] = {}
        self._claims: dict[int, Claim] = {}
        self._refused = ""  # the last refused node, and why
        self._remote: dict[int, RemoteRanks] = {}
        self._changed = asyncio.Event()
        self._closed = False
        self._port: Port | None = None

    def __repr__(self) -> str:
        return f"Leader(joined={sorted(self._links)} of {self._place.nodes - 1})"

    async def open(
        self, add_services: Callable[[aio.Server], None], limits: CallLimits | None = None
    ) -> None:
        """Opens the rendezvous. add_services, limits: for the calls that followers forward.

        Raises: ConfigError (cluster.*).
        """
        warn_if_open(self._config.cluster, self._place.rendezvous_host)
        port = rendezvous_port(self._config, self._place.rendezvous_host, self._place.rendezvous_port)
        with cluster_names():
            self._port = Port(port, frozenset(), limits, liveness(self._config.cluster.silent_seconds))
            nodes_pb2_grpc.add_NodesServicer_to_server(self, self._port.server)
            add_services(self._port.server)
            address = await self._port.open()
        log.info("waiting for %d other nodes on %s", self._place.nodes - 1, address)

    @property
    def replacing(self) -> None:
        """As Hosts.replacing: a group over several hosts starts again as a whole."""
        return

    def use_weights(self, path: str, version: int) -> None:
        """As Hosts.use_weights: nothing, as ranks of several nodes do not start again."""

    async def spawn(self, callbacks: RankCallbacks, started: Callable[[Rank], None]) -> None:
        """As Hosts.spawn: once all nodes have joined, each starts its ranks."""
        claim, plan = await asyncio.to_thread(claim_of, self._config)
        warn_of_unused(plan)
        self._claim.set_result(claim)
        await self._all_joined()
        kv_blocks = min(one.kv_blocks for one in (claim, *self._claims.values()))
        log.info("all %d nodes have joined; %d KV blocks on each rank", self._place.nodes, kv_blocks)
        for node, link in sorted(self._links.items()):  # from here on, losing a node means losing its ranks
            self._remote[node] = RemoteRanks(node, self._ranks_of(node), link, callbacks)
            link.send(spawn=pb.Spawn(kv_blocks=kv_blocks))
        await spawn_here(LocalRanks(self._config, plan, kv_blocks, self._module), callbacks, started)
        for remote in self._remote.values():
            for rank in remote.ranks:
                started(rank)

    def publish(self, *, serving: bool) -> None:
        """Sends all followers whether the server accepts requests."""
        for link in self._links.values():
            link.send(state=pb.State(serving=serving))

    async def close(self, code: int, reason: str) -> None:
        """Stops all followers with this exit code and closes the port. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._claim.cancel()
        links = list(self._links.values())
        for link in links:
            link.send(end=pb.End(code=code, reason=reason))
            link.finish()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await asyncio.gather(*(link.ended() for link in links))
        if self._port is not None:
            await self._port.close()

    async def Join(self, requests: Any, context: Any) -> AsyncIterator[pb.Bundle]:
        """Serves a follower from joining to its end. Raises: Unavailable, StartupError, InvalidArgument."""
        hello = await self._hello(requests)
        link = await self._admit(hello, context)
        reading = asyncio.create_task(link.read(requests))
        try:
            async for bundle in link.outgoing():
                yield bundle
        finally:
            link.end("closed the link")
            reading.cancel()

    async def _hello(self, requests: Any) -> pb.Hello:
        try:
            async with asyncio.timeout(self._config.cluster.silent_seconds):
                async for bundle in requests:
                    first, *more = bundle.messages
                    if first.WhichOneof("kind") == "hello" and not more:
                        hello: pb.Hello = first.hello
                        return hello
                    break
        except (TimeoutError, ValueError):
            pass
        raise InvalidArgument("bundle", "the first", "Hello alone")

    async def _admit(self, hello: pb.Hello, context: Any) -> Link:
        """Admits a node. Raises: Unavailable if the node should try again, StartupError if it should not."""
        other = claim_in(hello)
        try:
            leader = await asyncio.shield(self._claim)
        except asyncio.CancelledError:
            if self._closed:
                raise Unavailable("node 0 has ended") from None
            raise
        await self._sign_of(other.node, context.peer())
        if self._closed or self._remote:
            raise Unavailable("node 0 is serving or stopping and accepts no node")
        joined = [node for node, link in self._links.items() if not link.reason]
        why = refusal(leader, other, self._place.nodes, joined)
        if why:
            self._refused = why
            log.error("refused %s: %s", context.peer(), why)
            raise StartupError(why)
        link = Link(
            lambda message: self._on_message(other.node, message), self._config.cluster.silent_seconds
        )
        # On the link's end, not the stream's: the stream may still be writing to a node that reads nothing.
        link.on_end(lambda: self._left(other.node, link))
        self._links[other.node], self._claims[other.node] = link, other
        log.info("node %d has joined from %s", other.node, context.peer())
        self._changed.set()
        return link

    async def _sign_of(self, node: int, newcomer: str) -> None:
        """Waits until the node that holds this number shows that it is alive, or the number is free."""
        while (held := self._links.get(node)) is not None and not held.reason and not self._remote:
            log.warning(
                "node %d is already connected; %s claims its number; checking whether it is alive",
                node,
                newcomer,
            )
            await held.sign()
            if not held.reason:  # else the number may be taken by another newcomer
                return

    def _left(self, node: int, link: Link) -> None:
        log.log(logging.INFO if self._closed else logging.ERROR, "node %d %s", node, link.reason)
        if self._links.get(node) is not link:  # another node has taken its place
            return
        if node in self._remote:
            self._remote[node].lost(link.reason)
        else:  # before the ranks start another node may take its place
            del self._links[node], self._claims[node]
            self._changed.set()

    def _on_message(self, node: int, message: pb.NodeMessage) -> None:
        if message.WhichOneof("kind") == "stop_asked":
            log.info("node %d got a signal to stop: stopping the whole server", node)
            self.on_stop_asked()
        elif node in self._remote:
            self._remote[node].on_message(message)
        else:
            raise InvalidArgument(
                "message", message.WhichOneof("kind"), "stop_asked only, before the ranks start"
            )

    async def _all_joined(self) -> None:
        """Raises: StartupError that names the nodes that have not joined."""
        seconds = self._config.cluster.connect_seconds
        try:
            async with asyncio.timeout(seconds):
                while len(self._links) < self._place.nodes - 1:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            absent = [str(node) for node in range(1, self._place.nodes) if node not in self._links]
            why = f" (refused: {self._refused})" if self._refused else ""
            what = f"node{'s' if len(absent) > 1 else ''} {', '.join(absent)}"
            raise StartupError(f"{what} did not join within {seconds:g} s{why}") from None

    def _ranks_of(self, node: int) -> range:
        each = self._config.parallel.ranks
        return range(node * each, (node + 1) * each)

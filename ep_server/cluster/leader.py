"""Node 0: the port that followers join, the nodes that have joined, and the groups of ranks that run on them.

Used in one event loop. Units: seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from grpc import aio

from ep_server.cluster.claim import Claim, claim_in, claim_of, refusal
from ep_server.cluster.discovery import NodePlace
from ep_server.cluster.link import Link, liveness
from ep_server.cluster.node_group import GroupOrder, NodeGroup
from ep_server.cluster.security import cluster_names, rendezvous_port, warn_if_open
from ep_server.config import LOSS_SECONDS, Config
from ep_server.errors import InternalError, InvalidArgument, StartupError, Unavailable
from ep_server.frontend.messages import CallLimits
from ep_server.frontend.port import Port
from ep_server.models.identity import files_identity
from ep_server.ranks.local_ranks import WORKER, standby_pool, warn_of_unused
from ep_server.v1 import nodes_pb2 as pb
from ep_server.v1 import nodes_pb2_grpc

log = logging.getLogger(__name__)

END_SECONDS = 2.0  # time for followers to receive the end of the server


class Leader(nodes_pb2_grpc.NodesServicer):  # type: ignore[misc, unused-ignore]
    """Node 0 of several.

    on_stop_asked: called when a follower got a signal to stop, and the whole server has to.
    on_change: called when `members` is no longer what the current group has, except for lost nodes.
    """

    def __init__(self, config: Config, place: NodePlace, module: str = WORKER) -> None:
        self._config, self._place, self._module = config, place, module
        self.on_stop_asked: Callable[[], None] = lambda: None
        self.on_change: Callable[[], None] = lambda: None
        self._recovers = config.resilience.on_rank_loss == "recover"
        self._claim: asyncio.Future[Claim] = asyncio.get_running_loop().create_future()
        self._links: dict[int, Link] = {}
        self.files = ""  # identifies those of this node's checkpoint, once all have joined
        self._refused = ""  # the last refused node, and why
        self._leaving: set[int] = set()  # nodes that got a signal to stop
        self._losses: dict[int, deque[float]] = {}  # by node: when
        self._groups: dict[int, NodeGroup] = {}  # by number: those that have not ended
        self._made = 0  # groups so far
        self._current: NodeGroup | None = None
        self._serving = self._served = False
        self._standby = standby_pool(config, module)
        self._changed = asyncio.Event()
        self._closed = False
        self._port: Port | None = None

    def __repr__(self) -> str:
        return f"Leader(joined={sorted(self._links)} of {self._place.nodes - 1})"

    @property
    def members(self) -> tuple[int, ...]:
        """The nodes that a group would have now, in order."""
        live = (node for node, link in self._links.items() if not link.reason and node not in self._leaving)
        return (0, *sorted(live))

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

    async def all_joined(self) -> None:
        """Admits nodes. Returns: once all are here. Raises: StartupError that names those that are not."""
        claim, plan = await asyncio.to_thread(claim_of, self._config)
        if self._config.model.load_format != "dummy":
            self.files = await asyncio.to_thread(files_identity, self._config.model.path)
        warn_of_unused(plan)
        self._claim.set_result(claim)
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
        log.info("all %d nodes have joined", self._place.nodes)

    def group(
        self, weights: tuple[str, int, str] = ("", 0, ""), beside: NodeGroup | None = None
    ) -> NodeGroup:
        """A group of all members, not started. drop() it in the end.

        weights: path, version and files, as in GroupOrder. beside: the group that serves meanwhile.
        """
        self._made += 1
        nodes = self.members
        links = {node: self._links[node] for node in nodes[1:]}
        group = NodeGroup(
            self._config,
            GroupOrder(self._made, nodes, *weights),
            links,
            self._module,
            least_blocks=beside.kv_blocks if beside else 0,
            standby=None if beside else self._standby,
        )
        self._groups[self._made] = group
        return group

    def drop(self, group: NodeGroup) -> None:
        """A group has ended."""
        if self._groups.pop(group.order.number, None) is not None:
            group.end()

    def adopt(self, group: NodeGroup) -> None:
        """A group serves from now on."""
        before, self._current = self._current, group
        self._fill()
        for node in group.order.nodes[1:]:
            if before is not None and node not in before.order.nodes:
                log.info("node %d is back", node)
            if node in self._links:
                self._links[node].send(state=pb.State(serving=self._serving))
        for node in self._leaving & self._links.keys():
            if node not in group.order.nodes:
                log.info("the server goes on without node %d", node)
                self._links[node].send(released=pb.Released())

    def turn_away(self, node: int, reason: str) -> None:
        """Ends a node that cannot take part; it may come again."""
        link = self._links.get(node)
        if link is not None:
            log.error("node %d cannot take part: %s", node, reason)
            link.send(end=pb.End(code=1, reason=reason, refused=True))
            link.finish()
            self._left(node, link)

    def keep_leaving(self, reason: str) -> None:
        """The server cannot go on without the nodes that want to stop: it stops as a whole, in order."""
        if self._leaving:
            log.warning("no ranks without node %s: %s", sorted(self._leaving), reason)
            self._leaving.clear()
            self.on_stop_asked()

    def publish(self, *, serving: bool) -> None:
        """Sends all followers whether the server accepts requests."""
        self._serving, self._served = serving, self._served or serving
        self._fill()
        for link in self._links.values():
            link.send(state=pb.State(serving=serving))

    def _fill(self) -> None:
        """Keeps processes on standby while the server serves."""
        if self._serving:
            self._standby.fill()

    async def close(self, code: int, reason: str) -> None:
        """Stops all followers with this exit code and closes the port. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._claim.cancel()
        await self._standby.close()
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
        self._check_open(other.node)
        why = refusal(leader, other, self._place.nodes, self._links)
        if why:
            self._refused = why
            log.error("refused %s: %s", context.peer(), why)
            raise StartupError(why)
        link = Link(
            lambda message: self._on_message(other.node, message), self._config.cluster.silent_seconds
        )
        # On the link's end, not the stream's: the stream may still be writing to a node that reads nothing.
        link.on_end(lambda: self._left(other.node, link))
        self._links[other.node] = link
        log.info("node %d has joined from %s", other.node, context.peer())
        self._changed.set()
        self.on_change()
        return link

    def _check_open(self, node: int) -> None:
        """Raises: Unavailable if no node, or not this one, may join now."""
        if self._closed or (self._groups and not (self._recovers and self._serving)):
            raise Unavailable("node 0 is starting, serving or stopping and accepts no node")
        losses, now = self._losses.get(node), asyncio.get_running_loop().time()
        if losses is not None and len(losses) == losses.maxlen and now - losses[0] < LOSS_SECONDS:
            left = LOSS_SECONDS - (now - losses[0])
            why = f"node {node} was lost {len(losses)} times within {LOSS_SECONDS:.0f} s"
            log.warning("%s: it stays out for another %.0f s", why, left)
            raise Unavailable(f"{why} and stays out for another {left:.0f} s")

    async def _sign_of(self, node: int, newcomer: str) -> None:
        """Waits until the node that holds this number shows that it is alive, or the number is free."""
        while (held := self._links.get(node)) is not None and not held.reason:
            log.warning(
                "node %d is already connected; %s claims its number; checking whether it is alive",
                node,
                newcomer,
            )
            await held.sign()
            if not held.reason:  # else the number may be taken by another newcomer
                return
            await asyncio.sleep(0)  # for what follows the end of a link

    def _left(self, node: int, link: Link) -> None:
        if self._links.get(node) is not link:  # another node has taken its place, or it was turned away
            return
        del self._links[node]
        wanted = self._closed or node in self._leaving
        self._leaving.discard(node)
        log.log(
            logging.INFO if wanted else logging.ERROR, "node %d %s", node, link.reason or "was turned away"
        )
        if self._groups and not wanted:
            self._note_loss(node)
        for group in list(self._groups.values()):
            group.lost(node, link.reason)
        self._changed.set()

    def _note_loss(self, node: int) -> None:
        losses = self._losses.setdefault(node, deque(maxlen=self._config.resilience.max_losses))
        losses.append(asyncio.get_running_loop().time())

    def _on_message(self, node: int, message: pb.NodeMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "stop_asked":
            self._stop_asked(node)
        elif kind in ("planned", "spawned", "failed", "rank_frame", "rank_closed", "rank_exited"):
            number = getattr(message, kind).group
            if number > self._made:
                raise InvalidArgument("group", number, f"at most {self._made}")
            if number in self._groups:
                self._groups[number].on_message(node, message)
        else:
            raise InternalError(f"node {node} sent an unexpected message of kind {kind!r}")

    def _stop_asked(self, node: int) -> None:
        draining = self._served and not self._serving
        if self._current is None or draining or not self._recovers:
            log.info("node %d got a signal to stop: stopping the whole server", node)
            self.on_stop_asked()
        else:
            log.info("node %d got a signal to stop: the server goes on without it", node)
            self._leaving.add(node)
            self.on_change()

"""Where the ranks of a group run: on this host here, on several in ep_server.cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from ep_server.config import Config
from ep_server.exchange.factory import replaces_ranks
from ep_server.exchange.segment import report_lost
from ep_server.models.identity import files_identity
from ep_server.models.kv_memory import KvMemory
from ep_server.ranks.group import (
    GroupPlan,
    plan_group,
    topology_of,
)
from ep_server.ranks.local_ranks import WORKER, LocalRanks, SharedMemory, standby_pool, warn_of_unused
from ep_server.ranks.process import RankCallbacks, closing, starting
from ep_server.ranks.slots import with_spares
from ep_server.scheduler.placement import Placement
from ep_server.v1 import rank_pb2 as pb

log = logging.getLogger(__name__)


class Rank(Protocol):
    """A started rank, wherever it runs. As RankProcess; pid is its own host's."""

    ended: asyncio.Event
    exited: asyncio.Event

    @property
    def rank(self) -> int:
        """Its number in the group."""
        ...

    @property
    def pid(self) -> int:
        """Process id on its own host; 0 while unknown."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the signal; None while it runs or if unknown."""
        ...

    @property
    def buffered(self) -> int:
        """Bytes sent that have not left this process."""
        ...

    def send(self, payload: bytes) -> None:
        """Sends a frame; does not block."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Signals the process unless it has ended."""
        ...

    def close(self) -> None:
        """Closes the channel."""
        ...


class Hosts(Protocol):
    """The hosts of a group, as the launcher uses them."""

    async def spawn(self, callbacks: RankCallbacks, started: Callable[[Rank], None]) -> None:
        """Starts all ranks in rank order. Hands each over at once, so that the caller can end it.

        Raises: StartupError.
        """
        ...

    def use_weights(self, path: str, version: int, files: str = "") -> None:
        """Ranks spawned from now on load these weights."""
        ...

    @property
    def weights(self) -> tuple[str, int, str]:
        """What use_weights() would take for those in force."""
        ...

    @property
    def replacing(self) -> Replacing | None:
        """For groups that have been spawned, where a lost rank can be replaced while the others go on."""
        ...


class Replacing(Protocol):
    """Starts processes in the place of those that have ended."""

    @property
    def plan(self) -> GroupPlan:
        """Of the group."""
        ...

    def prepare(self) -> None:
        """Begins to start as many processes on standby as are wanted."""
        ...

    async def replace(
        self,
        rank: int,
        callbacks: RankCallbacks,
        live: Sequence[int],
        placement: Placement | None,
        *,
        awaited: bool,
    ) -> Rank:
        """Starts a rank without a process. It takes part from a Regroup on. Raises: OSError.

        live, placement: that it will probably have then: it loads accordingly.
        awaited: the others wait for it.
        """
        ...

    def report_lost(self, rank: int, generation: int) -> None:
        """Ends what the other ranks wait for in a generation. The process of `rank` has ended."""
        ...

    @property
    def kv(self) -> KvMemory:
        """For the KV caches of ranks, where these outlive them."""
        ...

    async def close(self) -> None:
        """Gives back what replace() needs; idempotent."""
        ...


class OneHost:
    """A group on this host alone.

    Args:
        module: what each process runs; anything that speaks rank.proto.
        outlive: ranks outlive the loss of others, where the exchange can take new processes in. The memory
            that they share is then kept for replace(), until close().
    """

    def __init__(self, config: Config, module: str = WORKER, *, outlive: bool = False) -> None:
        self._config, self._module, self._outlive = config, module, outlive
        self._weights, self._files = 0, ""
        self._local: LocalRanks | None = None
        self._shared: SharedMemory | None = None
        self._standby = standby_pool(config, module)

    @property
    def replacing(self) -> OneHost | None:
        """As Hosts.replacing."""
        return None if self._shared is None else self

    async def spawn(self, callbacks: RankCallbacks, started: Callable[[Rank], None]) -> None:
        """As Hosts.spawn."""
        plan = await asyncio.to_thread(plan_group, self._config)
        self._config = with_spares(self._config, plan.spares.spares)
        warn_of_unused(plan)
        log.info("%s", plan.spares.described(self._config.parallel.ranks))
        if plan.shadow is not None:
            log.info("%s", plan.shadow.described())
        outlive = self._outlive and replaces_ranks(topology_of(self._config, plan.exchange), plan.exchange)
        if not self._files and self._config.model.load_format != "dummy":
            self._files = await asyncio.to_thread(files_identity, self._config.model.path)
        weights = self._weights, self._files
        local = self._local = LocalRanks(self._config, plan, self._module, outlive, *weights)
        with starting():
            shared = await asyncio.to_thread(local.share)
            if outlive:
                self._shared = shared
                await local.spawn_all(shared, callbacks, started)
            else:
                with closing(shared.descriptors):
                    await local.spawn_all(shared, callbacks, started)

    @property
    def plan(self) -> GroupPlan:
        """As Replacing.plan."""
        assert self._local is not None
        return self._local.plan

    def prepare(self) -> None:
        """As Replacing.prepare."""
        if self._shared is not None:
            self._standby.fill()

    async def replace(
        self,
        rank: int,
        callbacks: RankCallbacks,
        live: Sequence[int],
        placement: Placement | None,
        *,
        awaited: bool,
    ) -> Rank:
        """As Replacing.replace."""
        assert self._local is not None and self._shared is not None
        local, shared = self._local, self._shared
        process, inside = await local.spawn(rank, shared, callbacks, self._standby, imported=awaited)
        start = self._local.start(rank, shared, live, placement)  # of the weights in force by now
        start.joins, start.awaited = True, awaited
        if inside is not None:
            start.handover = inside
        process.send(pb.ToRank(start=start).SerializeToString())
        return process

    def report_lost(self, rank: int, generation: int) -> None:
        """As Replacing.report_lost."""
        if self._shared is not None:
            report_lost(self._shared.segment, rank, generation)

    @property
    def kv(self) -> KvMemory:
        """As Replacing.kv."""
        return KvMemory() if self._shared is None else self._shared.kv

    async def close(self) -> None:
        """As Replacing.close."""
        await self._standby.close()
        shared, self._shared = self._shared, None
        if shared is not None:
            await asyncio.to_thread(shared.kv.finish)
        for fd in shared.descriptors if shared else ():
            os.close(fd)

    def use_weights(self, path: str, version: int, files: str = "") -> None:
        """As Hosts.use_weights."""
        self._config = replace(self._config, model=replace(self._config.model, path=path))
        self._weights, self._files = version, files
        if self._local is not None:
            self._local = replace(self._local, config=self._config, weights=version, files=files)

    @property
    def weights(self) -> tuple[str, int, str]:
        """As Hosts.weights."""
        return self._config.model.path, self._weights, self._files


async def ended(ranks: Sequence[Rank], seconds: float) -> None:
    """Waits until all have ended, at most `seconds`."""
    waits = [asyncio.ensure_future(rank.exited.wait()) for rank in ranks if not rank.exited.is_set()]
    if waits:
        _, pending = await asyncio.wait(waits, timeout=seconds)
        for wait in pending:
            wait.cancel()

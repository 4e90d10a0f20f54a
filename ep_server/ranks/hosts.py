"""Where the ranks of a group run: on this host here, on several in ep_server.cluster. Starts and hands over.

Handles the memory that the ranks of one host share, and their first message, but no later ones.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ep_server.config import Config
from ep_server.exchange.factory import replaces_ranks, segment_spec
from ep_server.exchange.segment import create_host_share, create_segment, report_lost
from ep_server.models.identity import files_identity
from ep_server.models.kv_memory import KvMemory
from ep_server.models.shadow import create_shadow
from ep_server.ranks.group import (
    GroupPlan,
    hosts_of,
    local_ranks,
    plan_group,
    standby_processes,
    topology_of,
)
from ep_server.ranks.messages import placement_message
from ep_server.ranks.process import RankCallbacks, RankProcess, closing, starting
from ep_server.ranks.slots import num_ranks, with_spares
from ep_server.ranks.standby import StandbyPool
from ep_server.scheduler.placement import Placement
from ep_server.v1 import rank_pb2 as pb

log = logging.getLogger(__name__)

WORKER = "ep_server.ranks.life"


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


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Descriptors that the ranks of one host inherit. bells: one per rank, if there are other hosts.

    shadow: of experts, see models/shadow.py. kv: of KV caches, where it outlives the ranks.
    """

    segment: int
    bells: tuple[int, ...] = ()
    shadow: int | None = None
    kv: KvMemory = field(default_factory=KvMemory)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All of them."""
        return (self.segment, *self.bells, *(fd for fd in (self.shadow, self.kv.fd) if fd is not None))


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
            shared = await asyncio.to_thread(_share, local)
            if outlive:
                self._shared = shared
                await _spawn_all(local, shared, callbacks, started)
            else:
                with closing(shared.descriptors):
                    await _spawn_all(local, shared, callbacks, started)

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
        shared = self._shared
        process, inside = await _process(
            self._local, rank, shared, callbacks, self._standby, imported=awaited
        )
        start = _start(self._local, rank, shared, live, placement)  # of the weights in force by now
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


@dataclass(frozen=True, slots=True)
class LocalRanks:
    """The ranks of this host.

    outlive: a rank outlives the loss of another one. weights: version of those that config.model.path has.
    files: see LoadParams.
    """

    config: Config
    plan: GroupPlan
    module: str = WORKER
    outlive: bool = False
    weights: int = 0
    files: str = ""


def warn_of_unused(plan: GroupPlan) -> None:
    """Logs the unused parts of the checkpoint, once per server."""
    if plan.unused:
        log.warning("%s", plan.unused)


async def spawn_here(
    local: LocalRanks,
    callbacks: RankCallbacks,
    started: Callable[[RankProcess], None],
    standby: StandbyPool | None = None,
) -> None:
    """Starts the ranks of this host and sends each its Start message. standby: processes to take first.

    Raises: StartupError.
    """
    with starting():
        shared = await asyncio.to_thread(_share, local)
        with closing(shared.descriptors):
            await _spawn_all(local, shared, callbacks, started, standby)


async def _spawn_all(
    local: LocalRanks,
    shared: SharedMemory,
    callbacks: RankCallbacks,
    started: Callable[[RankProcess], None],
    standby: StandbyPool | None = None,
) -> None:
    for rank in local_ranks(local.config):
        start = _start(local, rank, shared, range(num_ranks(local.config)), local.plan.placement)
        process, inside = await _process(local, rank, shared, callbacks, standby, imported=True)
        started(process)
        if inside is not None:
            start.handover = inside
        process.send(pb.ToRank(start=start).SerializeToString())


async def _process(
    local: LocalRanks,
    rank: int,
    shared: SharedMemory,
    callbacks: RankCallbacks,
    standby: StandbyPool | None,
    *,
    imported: bool = False,
) -> tuple[RankProcess, int | None]:
    """One on standby, if there is one, else a new one. Raises: OSError.

    imported: see StandbyPool.take(). A new process imports at the usual priority.
    Returns: it, and Start.handover if it was on standby.
    """
    while standby is not None and (waiting := standby.take(imported=imported)) is not None:
        try:
            return waiting.become(rank, callbacks, shared.descriptors), waiting.inside
        except OSError as error:
            log.warning("a process on standby cannot become rank %d: %s", rank, error)
    hang_seconds = local.config.exchange.timeout_seconds
    made = await RankProcess.spawn(rank, local.module, shared.descriptors, callbacks, hang_seconds)
    return made, None


def standby_pool(config: Config, module: str = WORKER) -> StandbyPool:
    """Processes on standby on this host; it is empty until fill()."""
    return StandbyPool(standby_processes(config), module, config.exchange.timeout_seconds)


async def ended(ranks: Sequence[Rank], seconds: float) -> None:
    """Waits until all have ended, at most `seconds`."""
    waits = [asyncio.ensure_future(rank.exited.wait()) for rank in ranks if not rank.exited.is_set()]
    if waits:
        _, pending = await asyncio.wait(waits, timeout=seconds)
        for wait in pending:
            wait.cancel()


def _share(local: LocalRanks) -> SharedMemory:
    config, spec = local.config, local.plan.exchange
    if config.cluster.nodes == 1:
        segment = create_segment(segment_spec(topology_of(config, spec), spec))
        shadow, kv = local.plan.shadow, local.plan.kv if local.outlive else None
        return SharedMemory(
            segment,
            shadow=None if shadow is None else create_shadow(shadow),
            kv=KvMemory(kv, local.plan.kv_keeps),
        )
    share = create_host_share(spec, hosts_of(config), config.cluster.node_rank)
    return SharedMemory(share.fd, share.bells)


def _start(
    local: LocalRanks, rank: int, shared: SharedMemory, live: Sequence[int], placement: Placement | None
) -> pb.Start:
    return pb.Start(
        placement=None if placement is None else placement_message(placement),
        live=live,
        rank=rank,
        num_ranks=local.plan.exchange.num_ranks,
        config_json=json.dumps(local.config.values()),
        exchange_fd=shared.segment,
        bells=shared.bells,
        threads=local.plan.threads,
        kv_blocks=local.plan.kv_blocks,
        outlives=local.outlive,
        weights_version=local.weights,
        weights_files=local.files,
        shadow_fd=shared.shadow,
        kv_fd=shared.kv.fd,
        kv_place=shared.kv.take(rank),
    )

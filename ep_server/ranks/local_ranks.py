"""Starts the ranks of this host: the memory that they share, their processes and their first message."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ep_server.config import Config
from ep_server.exchange.factory import segment_spec
from ep_server.exchange.segment import create_host_share, create_segment
from ep_server.models.kv_memory import KvMemory
from ep_server.models.shadow import create_shadow
from ep_server.ranks.group import GroupPlan, hosts_of, local_ranks, standby_processes, topology_of
from ep_server.ranks.messages import placement_message
from ep_server.ranks.process import RankCallbacks, RankProcess, closing, starting
from ep_server.ranks.slots import num_ranks
from ep_server.ranks.standby import StandbyPool
from ep_server.scheduler.placement import Placement
from ep_server.v1 import rank_pb2 as pb

log = logging.getLogger(__name__)

WORKER = "ep_server.ranks.life"


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

    def share(self) -> SharedMemory:
        """Makes the memory that they share."""
        config, spec, plan = self.config, self.plan.exchange, self.plan
        if config.cluster.nodes > 1:
            share = create_host_share(spec, hosts_of(config), config.cluster.node_rank)
            return SharedMemory(share.fd, share.bells)
        return SharedMemory(
            create_segment(segment_spec(topology_of(config, spec), spec)),
            shadow=None if plan.shadow is None else create_shadow(plan.shadow),
            kv=KvMemory(plan.kv if self.outlive else None, plan.kv_keeps),
        )

    async def spawn_all(
        self,
        shared: SharedMemory,
        callbacks: RankCallbacks,
        started: Callable[[RankProcess], None],
        standby: StandbyPool | None = None,
    ) -> None:
        """Starts all of them and sends each its Start message. standby: processes to take first."""
        for rank in local_ranks(self.config):
            start = self.start(rank, shared, range(num_ranks(self.config)), self.plan.placement)
            process, inside = await self.spawn(rank, shared, callbacks, standby, imported=True)
            started(process)
            if inside is not None:
                start.handover = inside
            process.send(pb.ToRank(start=start).SerializeToString())

    async def spawn(
        self,
        rank: int,
        shared: SharedMemory,
        callbacks: RankCallbacks,
        standby: StandbyPool | None,
        *,
        imported: bool = False,
    ) -> tuple[RankProcess, int | None]:
        """A process on standby, if there is one, else a new one. Raises: OSError.

        imported: see StandbyPool.take(). A new process imports at the usual priority.
        Returns: it, and Start.handover if it was on standby.
        """
        while standby is not None and (waiting := standby.take(imported=imported)) is not None:
            try:
                return waiting.become(rank, callbacks, shared.descriptors), waiting.inside
            except OSError as error:
                log.warning("a process on standby cannot become rank %d: %s", rank, error)
        hang_seconds = self.config.exchange.timeout_seconds
        made = await RankProcess.spawn(rank, self.module, shared.descriptors, callbacks, hang_seconds)
        return made, None

    def start(
        self, rank: int, shared: SharedMemory, live: Sequence[int], placement: Placement | None
    ) -> pb.Start:
        """Its first message."""
        return pb.Start(
            placement=None if placement is None else placement_message(placement),
            live=live,
            rank=rank,
            num_ranks=self.plan.exchange.num_ranks,
            config_json=json.dumps(self.config.values()),
            exchange_fd=shared.segment,
            bells=shared.bells,
            threads=self.plan.threads,
            kv_blocks=self.plan.kv_blocks,
            outlives=self.outlive,
            weights_version=self.weights,
            weights_files=self.files,
            shadow_fd=shared.shadow,
            kv_fd=shared.kv.fd,
            kv_place=shared.kv.take(rank),
        )


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
    """As LocalRanks.spawn_all(), with memory that only the ranks keep. Raises: StartupError."""
    with starting():
        shared = await asyncio.to_thread(local.share)
        with closing(shared.descriptors):
            await local.spawn_all(shared, callbacks, started, standby)


def standby_pool(config: Config, module: str = WORKER) -> StandbyPool:
    """Processes on standby on this host; it is empty until fill()."""
    return StandbyPool(standby_processes(config), module, config.exchange.timeout_seconds)

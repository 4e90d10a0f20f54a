"""Kills and stalls the ranks of a server on this machine, one event after the other, and changes it.

Signals no process but those the server names, and the processes that started them. Of a server of several
nodes, those of other hosts are left alone.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle
from pathlib import Path

from ep_server.cli.chaos.changes import Bounds, Changes, bounds_of
from ep_server.cli.chaos.streams import Answer
from ep_server.client import AsyncClient
from ep_server.engine.delivery import MAX_LOSSES
from ep_server.errors import ConfigError, DeadlineExceeded, EpServerError, RankLost, Unavailable
from ep_server.ranks.protocol import pid_space
from ep_server.v1 import control_pb2

LOOK_SECONDS = 0.05


class FaultKind(StrEnum):
    """kill: SIGKILL. stall: SIGSTOP; the server must notice the silence and end the process.

    server: SIGKILL of the process that started the ranks; they end with it. Others start the server again.
    node: the same of a node that is not the first one. The other nodes go on, and take it in again.
    scale: other ranks shall serve. update: new weights, the same as before. These lose no rank.
    """

    KILL = "kill"
    STALL = "stall"
    SERVER = "server"
    NODE = "node"
    SCALE = "scale"
    UPDATE = "update"


LOSSES = (FaultKind.KILL, FaultKind.STALL)
OF_PARENTS = (FaultKind.SERVER, FaultKind.NODE)


@dataclass(frozen=True, slots=True)
class ServerShape:
    """nodes: of the server. each: ranks of a node. exact: outputs are the same bits whatever is lost."""

    nodes: int
    each: int
    exact: bool

    def may_lose(self, rank: int, kind: FaultKind) -> bool:
        """Whether a fault of this kind may hit the rank."""
        if self.nodes == 1 or kind not in OF_PARENTS:
            return kind is not FaultKind.NODE
        return (rank < self.each) is (kind is FaultKind.SERVER)

    def ended_with(self, rank: int, kind: FaultKind) -> range:
        """Ranks that a fault at this one ends."""
        first = rank - rank % self.each
        return range(first, first + self.each) if kind in OF_PARENTS else range(rank, rank + 1)


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to a rank, at which time (time.monotonic())."""

    kind: FaultKind
    rank: int
    at: float

    def __str__(self) -> str:
        if self.kind in OF_PARENTS:
            return f"the {self.kind} of rank {self.rank} was killed, and must be started again from outside"
        return f"{self.kind} of rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Loss:
    """Ranks lost together, from the first signal until the server served again (time.monotonic()).

    alone: no other rank served then.
    """

    ranks: frozenset[int]
    began: float
    ended: float
    alone: bool = False


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """count: losses and changes in all, of `kinds` in turn.

    together: ranks of one loss, `apart` seconds after each other.
    every: mean seconds from a recovery to the next loss. recover_seconds: a recovery may take so long.
    scale_ranks: fewest and most that a scale leaves; 0 = as the server is configured.
    """

    count: int
    kinds: Sequence[FaultKind]
    together: int
    apart: float
    every: float
    recover_seconds: float
    scale_ranks: tuple[int, int] = (0, 0)


class Faults:
    """Loses ranks at random, and waits for each recovery; or makes a change.

    Args:
        begun: the answers under way. None of them meets so many losses in a row, without a token, that the
          server would end it as their cause.
    """

    def __init__(
        self,
        client: AsyncClient,
        plan: FaultPlan,
        shape: ServerShape,
        changes: Changes,
        draw: random.Random,
        begun: Sequence[Answer],
    ) -> None:
        self.changes, self._shape = changes, shape
        self.done: list[Fault] = []
        self.losses: list[Loss] = []  # that the server has recovered from
        self._client, self._plan, self._draw, self._begun = client, plan, draw, begun
        self._turns = cycle(plan.kinds)
        self._stalled: dict[int, str] = {}  # by pid: when the process started

    @classmethod
    async def on(
        cls,
        client: AsyncClient,
        plan: FaultPlan,
        shape: ServerShape,
        draw: random.Random,
        begun: Sequence[Answer],
    ) -> Faults:
        """Those of a plan. Raises: ConfigError for a change that nodes do not make; as bounds_of()."""
        scales, updates = (kind in plan.kinds for kind in (FaultKind.SCALE, FaultKind.UPDATE))
        if scales and shape.nodes > 1:
            allowed = "others: ranks of several nodes join and leave with their node"
            raise ConfigError("--kind", FaultKind.SCALE, allowed)
        bounds = Bounds()
        if scales or updates:
            bounds = await bounds_of(client, plan.scale_ranks, scales=scales, updates=updates)
        return cls(client, plan, shape, Changes(client, bounds, plan.recover_seconds, draw), draw, begun)

    @property
    def kinds(self) -> list[FaultKind]:
        """Of all so far."""
        updates = sum(change.what == "update" for change in self.changes.done)
        scales = len(self.changes.done) - updates
        return [*(one.kind for one in self.done), *[FaultKind.SCALE] * scales, *[FaultKind.UPDATE] * updates]

    async def run(self) -> None:
        """All faults of the plan. Raises: DeadlineExceeded without a recovery; EpServerError."""
        for _ in range(self._plan.count):
            await asyncio.sleep(self._draw.expovariate(1 / self._plan.every))
            kind = next(self._turns)
            await self._streams_go_on()
            pids = await self._pids(kind)
            if kind is FaultKind.SCALE:
                await self.changes.scale()
            elif kind is FaultKind.UPDATE:
                await self.changes.update()
            else:
                await self._lose_some(pids, kind)
        await self.changes.restore()

    @property
    def count(self) -> int:
        """Losses and changes so far."""
        return len(self.losses) + len(self.changes.done)

    async def _pids(self, kind: FaultKind) -> dict[int, int]:
        """Processes of this machine that the fault may hit. A node may have to return first.

        Raises: as settled_pids().
        """
        deadline = time.monotonic() + self._plan.recover_seconds
        while True:
            pids = await settled_pids(self._client, self._plan.recover_seconds)
            if found := {rank: pid for rank, pid in pids.items() if self._shape.may_lose(rank, kind)}:
                return found
            if time.monotonic() > deadline:
                seconds = self._plan.recover_seconds
                raise DeadlineExceeded(
                    f"no process on this machine for a fault of kind {kind} in {seconds:g} s"
                )
            await asyncio.sleep(LOOK_SECONDS)

    async def _streams_go_on(self) -> None:
        """Waits for tokens, as long as a recovery may take, where one more loss could end a request."""
        deadline = time.monotonic() + self._plan.recover_seconds
        while time.monotonic() < deadline:
            silent_since = min((answer.silent_since for answer in self._begun), default=math.inf)
            met = sum(fault.at > silent_since for fault in self.done)
            if not met or met + self._plan.together <= MAX_LOSSES:
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _lose_some(self, pids: dict[int, int], kind: FaultKind) -> None:
        kinds = [kind] if kind in OF_PARENTS else [each for each in self._plan.kinds if each in LOSSES]
        began, together = time.monotonic(), min(self._plan.together, len(pids))
        together, before = 1 if kind in OF_PARENTS else together, len(self.done)
        for number, rank in enumerate(self._draw.sample(sorted(pids), together)):
            if number:
                await asyncio.sleep(self._plan.apart)
            self._lose(rank, pids[rank], self._draw.choice(kinds))
        faults = self.done[before:]
        if not faults:
            return
        lost = frozenset(rank for one in faults for rank in self._shape.ended_with(one.rank, one.kind))
        alone = self._shape.nodes == 1 and lost >= set(pids)
        await self._recovered({pids[rank] for rank in lost if rank in pids}, began)
        self.losses.append(Loss(lost, began, time.monotonic(), alone=alone))

    def wake_stalled(self) -> None:
        """Lets processes go on that were stopped and that the server has not ended."""
        for pid, started in self._stalled.items():
            if start_of(pid) == started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _lose(self, rank: int, pid: int, kind: FaultKind) -> None:
        """Signals a rank, or its parent. Does nothing if the rank has ended: its parent cannot be found."""
        if kind in OF_PARENTS:
            parent = parent_of(pid)
            if parent is None:
                return
            pid = parent
            if pid == 1:
                raise ConfigError("--kind", kind, "others: nobody can start the first process again")
        started = start_of(pid)
        with suppress(ProcessLookupError):  # another loss took it along
            if kind is FaultKind.STALL and started is not None:
                self._stalled[pid] = started
            os.kill(pid, signal.SIGSTOP if kind is FaultKind.STALL else signal.SIGKILL)
        self.done.append(Fault(kind, rank, time.monotonic()))

    async def _recovered(self, lost: set[int], began: float) -> None:
        """Waits until the server serves with other processes in the place of the lost ones."""
        deadline = began + self._plan.recover_seconds
        while True:
            info = control_pb2.GetServerInfoResponse()
            with suppress(Unavailable):
                info = await self._client.server_info()
            if info.state == control_pb2.SERVER_STATE_LOST:
                raise RankLost(f"the server gave up after {self.done[-1]}")
            serves = info.state == control_pb2.SERVER_STATE_SERVING
            if serves and not lost & set(pids_here(info).values()):
                return
            if time.monotonic() > deadline:
                seconds = self._plan.recover_seconds
                raise DeadlineExceeded(f"no recovery within {seconds:g} s: {self.done[-1]}")
            await asyncio.sleep(LOOK_SECONDS)


def pids_here(info: control_pb2.GetServerInfoResponse) -> dict[int, int]:
    """Process of each rank that runs on this machine."""
    here = pid_space()
    return {rank.rank: rank.pid for rank in info.rank_info if rank.pid_space == here}


async def elsewhere(client: AsyncClient) -> list[int]:
    """Ranks that run on other machines, or in other pid namespaces: they cannot be signalled from here."""
    info = await client.server_info()
    here = pids_here(info)
    return sorted(rank.rank for rank in info.rank_info if rank.rank not in here)


async def settled_pids(client: AsyncClient, seconds: float) -> dict[int, int]:
    """Process of each rank of this machine, once all of these live and the server serves.

    Raises: ConfigError for a server without ranks here; DeadlineExceeded after `seconds`; EpServerError.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            info = await client.server_info()
        except Unavailable:  # it is being started again
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(LOOK_SECONDS)
            continue
        pids = pids_here(info)
        if info.rank_info and not pids:
            allowed = "a server of this machine and pid namespace, or with a node here"
            raise ConfigError("--address", client.target.address, allowed)
        if info.state == control_pb2.SERVER_STATE_LOST:
            raise RankLost("the server gave up")
        if (
            info.state == control_pb2.SERVER_STATE_SERVING
            and pids
            and None not in map(start_of, pids.values())
        ):
            return pids
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the server does not serve with all ranks within {seconds:g} s")
        await asyncio.sleep(LOOK_SECONDS)


def start_of(pid: int) -> str | None:
    """When a process started, in ticks of the kernel: a pid may be used again. None once it has ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    return None


def parent_of(rank: int) -> int | None:
    """The process that started a rank. None once the rank has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    return None


async def shape_of(client: AsyncClient) -> ServerShape:
    """The shape of a server that recovers.

    Raises: ConfigError for a server that a lost rank ends; EpServerError.
    """
    try:
        config = (await client.diagnostics()).config
    except Unavailable:
        raise
    except EpServerError as error:
        allowed = f"one that serves Control to this caller (grpc.control): {error}"
        raise ConfigError("server", client.target.address, allowed) from error
    if config["resilience.on_rank_loss"] != '"recover"':
        raise ConfigError("resilience.on_rank_loss", config["resilience.on_rank_loss"], "recover")
    on_cpu = config["parallel.device"] == '"cpu"'
    plain = config["model.dtype"] == '"float32"' and config["exchange.reduction"] == '"source"'
    return ServerShape(int(config["cluster.nodes"]), int(config["parallel.ranks"]), on_cpu and plain)

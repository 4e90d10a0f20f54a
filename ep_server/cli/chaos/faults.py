"""Kills and stalls the ranks of a server on this machine, one event after the other, and changes it.

Signals no process but those the server names.
"""

from __future__ import annotations

import asyncio
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
from ep_server.client import AsyncClient
from ep_server.errors import ConfigError, DeadlineExceeded, EpServerError, RankLost, Unavailable
from ep_server.observability.fault_report import pid_space
from ep_server.v1 import control_pb2

LOOK_SECONDS = 0.05


class FaultKind(StrEnum):
    """kill: SIGKILL. stall: SIGSTOP; the server must notice the silence and end the process.

    server: SIGKILL of the process that started the ranks; they end with it. Others start the server again.
    scale: other ranks shall serve. update: new weights, the same as before. These lose no rank.
    """

    KILL = "kill"
    STALL = "stall"
    SERVER = "server"
    SCALE = "scale"
    UPDATE = "update"


LOSSES = (FaultKind.KILL, FaultKind.STALL)


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to a rank, at which time (time.monotonic())."""

    kind: FaultKind
    rank: int
    at: float


@dataclass(frozen=True, slots=True)
class Loss:
    """Ranks lost together, from the first signal until the server served again (time.monotonic())."""

    ranks: frozenset[int]
    began: float
    ended: float


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
    """Loses ranks at random, and waits for each recovery; or makes a change."""

    def __init__(self, client: AsyncClient, plan: FaultPlan, changes: Changes, draw: random.Random) -> None:
        self.changes = changes
        self.done: list[Fault] = []
        self.losses: list[Loss] = []  # that the server has recovered from
        self._client, self._plan, self._draw = client, plan, draw
        self._turns = cycle(plan.kinds)
        self._stalled: dict[int, str] = {}  # by pid: when the process started

    @classmethod
    async def on(cls, client: AsyncClient, plan: FaultPlan, draw: random.Random) -> Faults:
        """Those of a plan. Raises: as bounds_of()."""
        scales, updates = (kind in plan.kinds for kind in (FaultKind.SCALE, FaultKind.UPDATE))
        bounds = Bounds()
        if scales or updates:
            bounds = await bounds_of(client, plan.scale_ranks, scales=scales, updates=updates)
        return cls(client, plan, Changes(client, bounds, plan.recover_seconds, draw), draw)

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
            pids = await settled_pids(self._client, self._plan.recover_seconds)
            kind = next(self._turns)
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

    async def _lose_some(self, pids: dict[int, int], kind: FaultKind) -> None:
        kinds = [kind] if kind is FaultKind.SERVER else [each for each in self._plan.kinds if each in LOSSES]
        began, together = time.monotonic(), min(self._plan.together, len(pids))
        for number, rank in enumerate(self._draw.sample(sorted(pids), together)):
            if number:
                await asyncio.sleep(self._plan.apart)
            self._lose(rank, pids[rank], self._draw.choice(kinds))
        lost = frozenset(fault.rank for fault in self.done[-together:])
        await self._recovered({pids[rank] for rank in lost}, began)
        self.losses.append(Loss(lost, began, time.monotonic()))

    def wake_stalled(self) -> None:
        """Lets processes go on that were stopped and that the server has not ended."""
        for pid, started in self._stalled.items():
            if start_of(pid) == started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _lose(self, rank: int, pid: int, kind: FaultKind) -> None:
        if kind is FaultKind.SERVER:
            pid = parent_of(pid)
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
            if serves and not lost & {rank.pid for rank in info.rank_info}:
                return
            if time.monotonic() > deadline:
                seconds = self._plan.recover_seconds
                raise DeadlineExceeded(f"no recovery within {seconds:g} s of {self.done[-1]}")
            await asyncio.sleep(LOOK_SECONDS)


async def settled_pids(client: AsyncClient, seconds: float) -> dict[int, int]:
    """Process of each rank, once all of them live and the server serves.

    Raises: ConfigError for a server elsewhere; DeadlineExceeded after `seconds`; EpServerError.
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
        if info.pid_space != pid_space():
            raise ConfigError(
                "--address", client.target.address, "a server of this machine and pid namespace"
            )
        if info.state == control_pb2.SERVER_STATE_LOST:
            raise RankLost("the server gave up")
        pids = {rank.rank: rank.pid for rank in info.rank_info}
        if info.state == control_pb2.SERVER_STATE_SERVING and None not in map(start_of, pids.values()):
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


def parent_of(rank: int) -> int:
    """The process that started a rank."""
    return int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])


async def check_recovers(client: AsyncClient) -> bool:
    """Whether outputs must equal those of an undisturbed run, bit for bit.

    Raises: ConfigError for a server that a lost rank ends; EpServerError.
    """
    try:
        config = (await client.diagnostics()).config
    except EpServerError as error:
        allowed = "a server with the Control service (grpc.control)"
        raise ConfigError("--address", str(error), allowed) from error
    if config["resilience.on_rank_loss"] != '"recover"' or config["cluster.nodes"] != "1":
        raise ConfigError(
            "resilience.on_rank_loss", config["resilience.on_rank_loss"], "recover, on a server of one node"
        )
    on_cpu = config["parallel.device"] == '"cpu"'
    return on_cpu and config["model.dtype"] == '"float32"' and config["exchange.reduction"] == '"source"'

"""Ranks whose processes are stand-ins, so that tests choose the moments at which they load, join and end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

from ep_server.errors import RankLost
from ep_server.models.kv_memory import KvMemory
from ep_server.ranks.board import Board, Timing
from ep_server.ranks.generations import Generations
from ep_server.ranks.process import NO_CALLBACKS
from ep_server.ranks.signs import Kind, Sign
from ep_server.scheduler.placement import Placement
from ep_server.v1 import rank_pb2 as pb

PLACEMENT = Placement(4, 4, ((*range(4), *range(4), *[-1] * 4),), ((1,) * 4 + (0,) * 8,))


class Process:
    """That of a rank. It ends at once by any signal. heard: gets what is sent to it."""

    def __init__(self, rank: int, heard: Callable[[int, bytes], None] = lambda rank, payload: None) -> None:
        self.rank, self.ended, self.exited = rank, asyncio.Event(), asyncio.Event()
        self._heard = heard

    def send(self, payload: bytes) -> None:
        self._heard(self.rank, payload)

    def signal(self, number: signal.Signals) -> None:
        self.ended.set()
        self.exited.set()

    def close(self) -> None:
        pass


class Hosts:
    """started: ranks, in order. awaited: whether the others wait for each. heard: of their processes."""

    def __init__(self) -> None:
        spares = SimpleNamespace(lacking_bytes=lambda live: 0)
        self.plan = SimpleNamespace(placement=PLACEMENT, spares=spares)
        self.kv = KvMemory()
        self.started: list[Process] = []
        self.awaited: list[bool] = []
        self.heard: Callable[[int, bytes], None] = lambda rank, payload: None

    async def replace(
        self, rank: int, callbacks: Any, live: Sequence[int], placement: Any, *, awaited: bool
    ) -> Process:
        await asyncio.sleep(0)
        self.awaited.append(awaited)
        self.started.append(Process(rank, self.heard))
        return self.started[-1]

    def report_lost(self, rank: int, generation: int) -> None:
        pass

    def prepare(self) -> None:
        pass


def group(stall: float = 60.0) -> tuple[Board, Hosts, Generations]:
    """Ranks 0 and 1 of three serve."""
    board: Any = Board({rank: Process(rank) for rank in range(2)})
    hosts: Any = Hosts()
    listener: Any = SimpleNamespace(on_group=lambda state: None, on_rank_lost=lambda rank, cause: None)
    timing = Timing(start_stall=stall, grace=1.0, kill=60.0, answer=60.0)
    return board, hosts, Generations(board, hosts, NO_CALLBACKS, listener, timing, 0)


THREE_OF_FOUR = Placement(8, 3, ((0, 1, -1, 2, 3, -1, 4, 5, -1, 6, 7, -1),), ((1, 1, 0) * 4,))
ALL_FOUR = Placement(8, 2, ((*range(8),),), ((1,) * 8,))


def four_ranks(
    placement: Placement = THREE_OF_FOUR,
    rank_losses: int = 0,
    answer: float = 60.0,
    silent: Collection[int] = (),
) -> tuple[Board, Hosts, Generations]:
    """Any three of them hold all experts, two do not. Processes regroup at once, but for silent ones."""

    def heard(rank: int, payload: bytes) -> None:
        message = pb.ToRank.FromString(payload)
        if message.WhichOneof("kind") == "regroup" and board.processes[rank] not in quiet:
            made.regrouping.on_regrouped(rank, pb.Regrouped(generation=message.regroup.generation))

    hosts: Any = Hosts()
    hosts.heard = heard
    hosts.plan.placement = placement
    board: Any = Board({rank: Process(rank, heard) for rank in range(4)})
    quiet = [board.processes[rank] for rank in silent]
    board.ready |= {rank: ready(rank) for rank in range(4)}
    listener: Any = SimpleNamespace(on_group=lambda state: None, on_rank_lost=lambda rank, cause: None)
    timing = Timing(start_stall=60.0, grace=1.0, kill=60.0, answer=answer)
    made = Generations(board, hosts, NO_CALLBACKS, listener, timing, rank_losses)
    return board, hosts, made


def ready(rank: int) -> Any:
    return SimpleNamespace(rank=rank, load_seconds=0.0)


def lose(board: Board, *ranks: int) -> None:
    for rank in ranks:
        board.processes[rank].signal(signal.SIGKILL)
        board.signs.append(Sign(Kind.EXIT, rank, RankLost("killed"), killed=True))
    board.heard.set()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)

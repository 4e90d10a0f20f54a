"""Processes that join a group, where calls meet. Processes are stand-ins, so that moments can be chosen."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ep_server.errors import RankLost, Unavailable
from ep_server.ranks.board import Board, Timing
from ep_server.ranks.generations import Generations
from ep_server.ranks.process import NO_CALLBACKS
from ep_server.ranks.signs import Kind, Sign
from ep_server.scheduler.placement import Placement

PLACEMENT = Placement(4, 4, ((*range(4), *range(4), *[-1] * 4),), ((1,) * 4 + (0,) * 8,))


class Process:
    """That of a rank. It ends at once by any signal."""

    def __init__(self, rank: int) -> None:
        self.rank, self.ended, self.exited = rank, asyncio.Event(), asyncio.Event()

    def send(self, payload: bytes) -> None:
        pass

    def signal(self, number: signal.Signals) -> None:
        self.ended.set()
        self.exited.set()

    def close(self) -> None:
        pass


class Hosts:
    """started: ranks, in order."""

    def __init__(self) -> None:
        spares = SimpleNamespace(lacking_bytes=lambda live: 0)
        self.plan = SimpleNamespace(placement=PLACEMENT, spares=spares)
        self.started: list[Process] = []

    async def replace(self, rank: int, callbacks: Any, live: Sequence[int], placement: Any) -> Process:
        await asyncio.sleep(0)
        self.started.append(Process(rank))
        return self.started[-1]


def group(stall: float = 60.0) -> tuple[Board, Hosts, Generations]:
    """Ranks 0 and 1 of three serve."""
    board: Any = Board({rank: Process(rank) for rank in range(2)})
    hosts: Any = Hosts()
    listener: Any = SimpleNamespace(on_group=lambda state: None, on_rank_lost=lambda rank, cause: None)
    timing = Timing(start_stall=stall, grace=1.0, kill=60.0, answer=60.0)
    return board, hosts, Generations(board, hosts, NO_CALLBACKS, listener, timing, 0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


async def test_two_joins_start_one_process() -> None:
    """Both wait for the memory of a process that has ended."""
    board, hosts, made = group()
    old: Any = Process(2)
    board.dying = [old]
    joins = [asyncio.ensure_future(made.join([2])) for _ in range(2)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert not hosts.started
    old.signal(signal.SIGKILL)
    await until(lambda: 2 in board.processes)
    for _ in range(20):
        await asyncio.sleep(0)
    assert [process.rank for process in hosts.started] == [2]
    for each in joins:
        each.cancel()
    await asyncio.wait(joins)


async def test_why_a_process_did_not_join_is_said() -> None:
    board, _, made = group()
    joining = asyncio.ensure_future(made.join([2]))
    await until(lambda: 2 in board.processes)
    assert made.takes(Sign(Kind.OWN_ERROR, 2, RankLost("this host has 2 GPUs")))
    board.heard.set()
    with pytest.raises(
        Unavailable, match=r"ranks \[2\] were lost while they started; rank 2: this host has 2 GPUs"
    ):
        await asyncio.wait_for(joining, 30)


async def test_a_join_does_not_wait_for_a_recovery_for_ever() -> None:
    board, _, made = group(stall=0.05)
    made.over = False
    with pytest.raises(Unavailable, match=r"not recovered from a loss within 0\.05 s"):
        await asyncio.wait_for(made.join([2]), 30)
    assert 2 not in board.processes


async def test_who_shall_not_join_is_let_go() -> None:
    """Not one that is wanted for another reason."""
    board, hosts, made = group()
    joining = asyncio.ensure_future(made.join([2]))
    await until(lambda: 2 in board.processes)
    made.wanted |= {2}
    await made.let_go([2])
    assert 2 in board.processes
    made.wanted -= {2}
    await made.let_go([2])
    assert 2 not in board.processes and hosts.started[0].ended.is_set()
    board.heard.set()
    with pytest.raises(Unavailable, match="were lost while they started"):
        await asyncio.wait_for(joining, 30)

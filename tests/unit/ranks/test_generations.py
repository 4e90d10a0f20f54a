"""Processes that join a group, where calls meet. Processes are stand-ins, so that moments can be chosen."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ep_server.errors import RankLost, StartupError, Unavailable
from ep_server.models.kv_memory import KvMemory
from ep_server.ranks import generations
from ep_server.ranks.board import Board, Timing
from ep_server.ranks.generations import Generations
from ep_server.ranks.process import NO_CALLBACKS
from ep_server.ranks.scaling import scale
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
    placement: Placement = THREE_OF_FOUR, rank_losses: int = 0
) -> tuple[Board, Hosts, Generations]:
    """Any three of them hold all experts, two do not. Processes regroup at once."""

    def heard(rank: int, payload: bytes) -> None:
        message = pb.ToRank.FromString(payload)
        if message.WhichOneof("kind") == "regroup":
            made.on_regrouped(rank, pb.Regrouped(generation=message.regroup.generation))

    hosts: Any = Hosts()
    hosts.heard = heard
    hosts.plan.placement = placement
    board: Any = Board({rank: Process(rank, heard) for rank in range(4)})
    board.ready |= {rank: ready(rank) for rank in range(4)}
    listener: Any = SimpleNamespace(on_group=lambda state: None, on_rank_lost=lambda rank, cause: None)
    timing = Timing(start_stall=60.0, grace=1.0, kill=60.0, answer=60.0)
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


async def test_a_process_that_does_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile nobody takes it for one that loads: not new weights, and not who scales."""
    _, hosts, made = group()
    replace = hosts.replace

    async def refuse(*_: Any, **__: Any) -> Process:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(hosts, "replace", refuse)
    monkeypatch.setattr(made, "change", lambda joins: asyncio.sleep(3600))
    monkeypatch.setattr(generations, "AGAIN_SECONDS", 0.01)
    with pytest.raises(StartupError, match=r"no process can be started as rank 2: .*Too many open files"):
        await made.join([2])
    made.weights_changed()
    assert made.takes(Sign(Kind.EXIT, 2, RankLost("another one")))  # not one that was to join
    assert not made._failed and not made.out
    made.wanted |= {2}
    made.bring_back()
    await asyncio.sleep(0.05)
    assert not hosts.started
    monkeypatch.setattr(hosts, "replace", replace)
    await until(lambda: hosts.started)
    assert not hosts.started[0].ended.is_set(), "it read the new weights"
    await made.stop()


async def test_one_that_starts_reads_the_new_weights() -> None:
    """So it is not ended for the weights that it would have read before."""
    board, hosts, made = group()
    joining = asyncio.ensure_future(made.join([2]))
    await until(lambda: 2 in made._joining)
    assert 2 not in board.processes
    made.weights_changed()
    await until(lambda: 2 in board.processes)
    assert not hosts.started[0].ended.is_set()
    made.weights_changed()
    assert hosts.started[0].ended.is_set()
    joining.cancel()
    await asyncio.wait((joining,))


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
    assert [process.rank for process in hosts.started] == [2] and hosts.awaited == [False]
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


async def test_one_that_is_held_out_while_it_loads_does_not_join() -> None:
    """The call of Scale ends it; nothing else changes."""
    board, hosts, made = group()
    made.wanted |= {2}
    joining = asyncio.ensure_future(made.join([2]))
    await until(lambda: 2 in board.processes)
    assert await scale(made, 0, frozenset({2}), 3, []) == 0.0
    assert hosts.started[0].ended.is_set() and 2 not in board.processes
    board.heard.set()
    with pytest.raises(Unavailable, match="were lost while they started"):
        await asyncio.wait_for(joining, 30)
    assert made.live == made.wanted == {0, 1}


async def test_one_that_is_held_out_before_its_turn_does_not_join() -> None:
    board, _, made = group()
    made.wanted |= {2}
    await made._changing.acquire()  # another change runs
    joining = asyncio.ensure_future(made.join([2]))
    await until(lambda: 2 in board.processes)
    board.ready[2] = ready(2)
    board.heard.set()
    await until(lambda: made._changing._waiters)
    made.wanted -= {2}
    made._changing.release()
    assert await asyncio.wait_for(joining, 30) == 0.0 and made.live == {0, 1}
    assert 2 not in board.processes, "its memory is free"


async def test_one_that_ends_while_the_others_prepare_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is let go, and its process takes a moment to end."""
    _, _, made = four_ranks()
    made.live, made._joining = frozenset({0, 1, 3}), {2}
    gate = asyncio.Event()

    async def give(*_: Any) -> None:
        await gate.wait()

    monkeypatch.setattr(made.orders, "give", give)
    monkeypatch.setattr(made, "_switch", lambda *_: pytest.fail("they switched to it"))
    changing = asyncio.ensure_future(made.change(joins=[2]))
    await until(made._changing.locked)
    made._ending.add(2)
    gate.set()
    with pytest.raises(Unavailable, match="a rank was lost meanwhile"):
        await asyncio.wait_for(changing, 30)


async def test_one_that_the_others_wait_for_is_not_let_go() -> None:
    """It was live, is loading again, and an operator wants it out."""
    board, _, made = four_ranks()
    made._joining, made.wanted = {3}, frozenset({0, 1, 2})
    await made.let_go([3])
    assert 3 in board.processes


async def test_the_last_ranks_do_not_leave() -> None:
    _, _, made = four_ranks()
    with pytest.raises(Unavailable, match="no rank that shall serve does"):
        await made.change(leaves=range(4))
    assert made.live == {0, 1, 2, 3}


async def test_a_rank_that_dies_as_it_leaves_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests that it had continue at the others."""
    board, _, made = four_ranks()
    left: list[int] = []
    made._listener.on_left = left.append  # type: ignore[method-assign]

    async def give(*_: Any) -> None:
        pass

    monkeypatch.setattr(made.orders, "give", give)
    changing = asyncio.ensure_future(made.change(leaves=[3]))
    await until(lambda: made.live == {0, 1, 2})
    for rank in (0, 1, 2):
        made._regrouped[rank] = 0.0  # as if they had answered
    board.processes[3].signal(signal.SIGKILL)
    board.heard.set()
    await asyncio.wait_for(changing, 30)
    assert left == [3] and 3 not in board.processes


async def test_changes_that_meet_undo_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins before the first has ended, and keeps the rank that it lets join."""
    board, _, made = four_ranks()
    lose(board, 1, 3)
    restarting = asyncio.ensure_future(made.restart(lambda rank: []))
    await until(lambda: {1, 3} <= made._joining)
    board.ready[3] = ready(3)
    board.heard.set()
    await asyncio.wait_for(restarting, 30)
    await made.stop()
    made.live = frozenset({0, 2})
    made._joining |= {1, 3}
    gate, switched = asyncio.Event(), list[tuple[set[int], set[int]]]()

    async def give(*_: Any) -> None:
        await gate.wait()

    async def switch(change: int, before: frozenset[int], target: frozenset[int], _: Any) -> float:
        switched.append((set(before), set(target)))
        made.live = target
        return 0.0

    monkeypatch.setattr(made.orders, "give", give)
    monkeypatch.setattr(made, "_switch", switch)
    changes = [asyncio.ensure_future(made.change(joins=[rank])) for rank in (3, 1)]
    await until(lambda: made._changing._waiters)
    gate.set()
    await asyncio.wait_for(asyncio.gather(*changes), 30)
    assert switched == [({0, 2}, {0, 2, 3}), ({0, 2, 3}, {0, 1, 2, 3})]


async def test_one_of_two_lost_ranks_joins_later() -> None:
    """The others go on as soon as one is there again."""
    board, hosts, made = four_ranks()
    lose(board, 1, 3)
    restarting = asyncio.ensure_future(made.restart(lambda rank: []))
    await until(lambda: len(hosts.started) == 2)
    board.ready[3] = ready(3)
    board.heard.set()
    restarted = await asyncio.wait_for(restarting, 30)
    assert made.live == {0, 2, 3} == {each.rank for each in restarted.ready}
    assert restarted.kept == {0, 2}
    assert made.placement is not None and made.placement.slots_per_rank == 3
    record: list[list[int]] = []
    made.change = lambda joins: record.append(list(joins)) or asyncio.sleep(3600)  # type: ignore[method-assign]
    board.ready[1] = ready(1)
    board.heard.set()
    await until(lambda: record)
    assert record == [[1]]
    assert [process.rank for process in hosts.started] == [1, 3], "the same processes"
    assert hosts.awaited == [True, True], "neither yields the cores to ranks that wait"
    await made.stop()


async def test_a_loss_meanwhile_starts_no_process_twice() -> None:
    board, hosts, made = four_ranks()
    lose(board, 1, 3)
    restarting = asyncio.ensure_future(made.restart(lambda rank: []))
    await until(lambda: len(hosts.started) == 2)
    lose(board, 2)
    await until(lambda: len(hosts.started) == 3)
    for rank in (1, 2, 3):
        board.ready[rank] = ready(rank)
    board.heard.set()
    await asyncio.wait_for(restarting, 30)
    assert made.live == {0, 1, 2, 3}
    assert [process.rank for process in hosts.started] == [1, 3, 2]
    await made.stop()


async def test_new_processes_take_the_places_of_all_ranks() -> None:
    """They go on as soon as there are enough. One that loads already is kept, none is started twice."""
    board, hosts, made = four_ranks()
    lose(board, 0)
    await made.restart(lambda rank: [])
    await until(lambda: 0 in board.processes)  # it loads
    loading = board.processes[0]
    lose(board, 1, 2, 3)
    restarting = asyncio.ensure_future(made.restart(lambda rank: [rank]))
    await until(lambda: len(hosts.started) == 4)
    board.ready |= {rank: ready(rank) for rank in (1, 2, 3)}
    board.heard.set()
    restarted = await asyncio.wait_for(restarting, 30)
    assert {each.rank for each in restarted.ready} == {1, 2, 3} == made.live and not restarted.kept
    assert [process.rank for process in hosts.started] == [0, 1, 2, 3] and board.processes[0] is loading
    await made.stop()


@pytest.mark.parametrize("placement", [THREE_OF_FOUR, ALL_FOUR])
async def test_a_rank_that_serves_is_not_reported_out(placement: Placement) -> None:
    """It is lost too often, and stays out where the others can go on without it."""
    board, hosts, made = four_ranks(placement, rank_losses=1)
    states: list[Any] = []
    made._listener.on_group = states.append  # type: ignore[method-assign]
    lose(board, 2)
    restarting = asyncio.ensure_future(made.restart(lambda rank: []))
    await until(lambda: hosts.started or restarting.done())
    board.ready[2] = ready(2)
    board.heard.set()
    await asyncio.wait_for(restarting, 30)
    stays_out = placement is THREE_OF_FOUR
    assert set(states[-1].live) == made.live == ({0, 1, 3} if stays_out else {0, 1, 2, 3})
    assert set(states[-1].out) == ({2} if stays_out else set())
    await made.stop()


async def test_a_rank_that_does_not_join_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, made = group()
    joins: list[list[int]] = []

    async def join(ranks: list[int]) -> float:
        joins.append(ranks)
        if ranks == [2]:
            raise Unavailable("rank 2 was lost while it started")
        made.live |= set(ranks)
        return 0.0

    monkeypatch.setattr(made, "join", join)
    monkeypatch.setattr(generations, "AGAIN_SECONDS", 0.01)
    made.wanted |= {2, 3}
    made.bring_back()
    await until(lambda: len(joins) >= 4)
    assert joins[:4] == [[2], [3], [2], [2]] and made.live == {0, 1, 3}
    await made.stop()


async def test_without_a_new_process_all_ranks_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def replace(*_: Any, **__: Any) -> Process:
        raise OSError("no process")

    board, hosts, made = four_ranks()
    monkeypatch.setattr(hosts, "replace", replace)
    lose(board, 1, 2)
    with pytest.raises(StartupError, match="no process can be started as rank 1: no process"):
        await made.restart(lambda rank: [])
    await made.stop()

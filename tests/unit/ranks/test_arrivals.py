"""Processes that load to take part, where calls meet."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from ep_server.errors import RankLost, StartupError, Unavailable
from ep_server.ranks import generations
from ep_server.ranks.scaling import scale
from ep_server.ranks.signs import Kind, Sign
from tests.support.ranks.stand_ins import Process, four_ranks, group, ready, until


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
    made.arrivals.weights_changed()
    assert made.takes(Sign(Kind.EXIT, 2, RankLost("another one")))  # not one that was to join
    assert "another one" not in made.arrivals.why([2]) and not made.out
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
    await until(lambda: 2 in made.arrivals.loading)
    assert 2 not in board.processes
    made.arrivals.weights_changed()
    await until(lambda: 2 in board.processes)
    assert not hosts.started[0].ended.is_set()
    made.arrivals.weights_changed()
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
    made.live, made.arrivals.loading = frozenset({0, 1, 3}), {2}
    gate = asyncio.Event()

    async def give(*_: Any) -> None:
        await gate.wait()

    monkeypatch.setattr(made.orders, "give", give)
    monkeypatch.setattr(made, "_switch", lambda *_: pytest.fail("they switched to it"))
    changing = asyncio.ensure_future(made.change(joins=[2]))
    await until(made._changing.locked)
    made.arrivals.ending.add(2)
    gate.set()
    with pytest.raises(Unavailable, match="a rank was lost meanwhile"):
        await asyncio.wait_for(changing, 30)


async def test_one_that_the_others_wait_for_is_not_let_go() -> None:
    """It was live, is loading again, and an operator wants it out."""
    board, _, made = four_ranks()
    made.arrivals.loading, made.wanted = {3}, frozenset({0, 1, 2})
    await made.let_go([3])
    assert 3 in board.processes


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


async def test_a_process_that_stalls_while_it_loads_is_killed() -> None:
    """What the ranks that serve report meanwhile is no sign of it."""
    board, hosts, made = group(stall=0.2)
    joining = asyncio.ensure_future(made.join([2]))
    await until(lambda: 2 in board.processes)
    for _ in range(40):  # twice as long, it reports progress
        board.told[2] = asyncio.get_running_loop().time()
        await asyncio.sleep(0.01)
        board.heard.set()
    assert not hosts.started[0].ended.is_set()
    while not hosts.started[0].ended.is_set():
        board.told[0] = asyncio.get_running_loop().time()
        board.heard.set()
        await asyncio.sleep(0.01)
    assert made.takes(Sign(Kind.EXIT, 2, RankLost("killed by SIGKILL"), killed=True))
    board.heard.set()
    with pytest.raises(Unavailable, match="were lost while they started; rank 2: killed by SIGKILL"):
        await asyncio.wait_for(joining, 30)


async def test_answers_do_not_prolong_the_wait_for_others() -> None:
    board, _, _ = group()
    waiting = asyncio.ensure_future(board.until(lambda: False, 0.2, "they switch"))
    while not waiting.done():
        board.heard.set()
        await asyncio.sleep(0.01)
    with pytest.raises(StartupError, match=r"ranks have not answered for 0\.2 s while they switch"):
        await waiting

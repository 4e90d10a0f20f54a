"""Ranks that are lost, that return and that leave, where calls meet."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from typing import Any

import pytest

from ep_server.errors import CheckpointError, ConfigError, StartupError, Unavailable
from ep_server.orders import OrderDone
from ep_server.ranks import arrivals
from ep_server.ranks.signs import Kind, Sign
from ep_server.records import LossCause
from ep_server.scheduler.placement import Placement
from ep_server.v1 import rank_pb2 as pb
from tests.support.ranks.stand_ins import ALL_FOUR, THREE_OF_FOUR, Process, four_ranks, lose, ready, until


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
    made.regrouping.there |= {0, 1, 2}  # as if they had answered
    board.processes[3].signal(signal.SIGKILL)
    board.heard.set()
    await asyncio.wait_for(changing, 30)
    assert left == [3] and 3 not in board.processes


@pytest.mark.parametrize("late", [(3,), (1, 3)])
async def test_a_rank_that_hangs_as_it_leaves_is_ended(
    late: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing waits for it any more. The requests that it had continue at the others.

    Where one that stays has not switched either, no pause is reported.
    """
    board, _, made = four_ranks(answer=0.1)
    caplog.set_level("INFO", "ep_server.ranks.generations")
    left: list[int] = []
    made._listener.on_left = left.append  # type: ignore[method-assign]

    async def give(*_: Any) -> None:
        pass

    monkeypatch.setattr(made.orders, "give", give)
    monkeypatch.setattr("ep_server.ranks.generations.SWITCH_SECONDS", 0.1)
    made._timing = replace(made._timing, grace=0.1)
    changing = asyncio.ensure_future(made.change(leaves=[3]))
    await until(lambda: made.orders._answers)
    order = next(iter(made.orders._answers))
    for rank in {0, 1, 2} - set(late):
        made.orders.on_done(rank, OrderDone(order, seconds=0.004))
    if late == (3,):
        assert await asyncio.wait_for(changing, 30) == 0.004
        assert "ranks [0, 1, 2] serve; they paused 4.0 ms" in caplog.text
        assert "ranks [3] did not leave (not within 0.1 s) and were ended" in caplog.text
    else:
        stands = r"ranks \[1\] did not switch \(not within 0\.1 s\); the change stands: ranks \[0, 1, 2\]"
        with pytest.raises(Unavailable, match=stands):
            await asyncio.wait_for(changing, 30)
        assert "paused" not in caplog.text
    assert "switched within" not in caplog.text
    assert left == [3] and made.live == {0, 1, 2} == set(board.processes)


async def test_a_rank_that_refuses_has_not_switched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for the others, whose vote needs it."""
    _, _, made = four_ranks()
    caplog.set_level("INFO", "ep_server.ranks.generations")
    made._listener.on_left = lambda rank: None  # type: ignore[method-assign]

    async def give(*_: Any) -> None:
        pass

    monkeypatch.setattr(made.orders, "give", give)
    changing = asyncio.ensure_future(made.change(leaves=[3]))
    await until(lambda: made.orders._answers)
    order = next(iter(made.orders._answers))
    made.orders.on_done(1, OrderDone(order, error="change 7 is not prepared"))
    made._board.heard.set()
    refused = r"ranks \[0, 1, 2\] did not switch \(rank 1: change 7 is not prepared\); the change stands"
    with pytest.raises(Unavailable, match=refused):
        await asyncio.wait_for(changing, 30)
    assert "switched" not in caplog.text and "paused" not in caplog.text


async def test_changes_that_meet_undo_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins before the first has ended, and keeps the rank that it lets join."""
    board, _, made = four_ranks()
    lose(board, 1, 3)
    restarting = asyncio.ensure_future(made.restart(lambda rank: []))
    await until(lambda: {1, 3} <= made.arrivals.loading)
    board.ready[3] = ready(3)
    board.heard.set()
    await asyncio.wait_for(restarting, 30)
    await made.stop()
    made.live = frozenset({0, 2})
    made.arrivals.loading |= {1, 3}
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


async def test_a_rank_that_stays_out_keeps_no_process() -> None:
    """The others waited for one of two new processes. The second one's memory is of no use to anybody."""
    board, hosts, made = four_ranks(rank_losses=1)
    lose(board, 1, 3)
    restarting = asyncio.ensure_future(made.restart(lambda rank: []))
    await until(lambda: len(hosts.started) == 2)
    board.ready[3] = ready(3)
    board.heard.set()
    await asyncio.wait_for(restarting, 30)
    await until(lambda: made._returning is not None and made._returning.done())
    assert made.live == {0, 2, 3} == set(board.processes) and not made.arrivals.loading
    assert hosts.started[0].ended.is_set() and set(made.out) == {1, 3}
    await made.stop()


async def test_a_rank_that_was_lost_often_long_ago_returns() -> None:
    """The others could not go on without it then, so it served again."""
    board, hosts, made = four_ranks(rank_losses=2)
    for _ in range(2):
        lose(board, 1, 2)
        restarting, before = asyncio.ensure_future(made.restart(lambda rank: [])), len(hosts.started)
        await until(lambda before=before: len(hosts.started) == before + 2)
        board.ready |= {rank: ready(rank) for rank in (1, 2)}
        board.heard.set()
        await asyncio.wait_for(restarting, 30)
        made.live = made.wanted  # as if both had joined
        made.arrivals.loading.clear()
    assert set(made.out) == {1, 2}
    made._losses._lost_at.clear()  # as if ten minutes had passed
    lose(board, 2)
    await asyncio.wait_for(made.restart(lambda rank: []), 30)
    await until(lambda: len(hosts.started) == 5)
    assert 2 in made.arrivals.loading and set(made.out) == {1}
    await made.stop()


async def test_without_a_new_process_all_ranks_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    async def replace(rank: int, *_: Any, **__: Any) -> Process:
        tried.append(rank)
        raise OSError("no process")

    board, hosts, made = four_ranks()
    monkeypatch.setattr(hosts, "replace", replace)
    monkeypatch.setattr(arrivals, "AGAIN_SECONDS", 0.001)
    lose(board, 1, 2)
    with pytest.raises(StartupError, match="no processes take the places of lost ranks; rank 1: no process"):
        await made.restart(lambda rank: [])
    assert tried == [1] * arrivals.MOST_STARTS and set(board.processes) == {0, 3}
    await made.stop()


async def test_a_start_that_fails_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has no process or descriptor for a moment."""
    board, hosts, made = four_ranks()
    monkeypatch.setattr(arrivals, "AGAIN_SECONDS", 0.001)
    replace, failures = hosts.replace, [OSError("no process")] * 3

    async def unlucky(*given: Any, **how: Any) -> Process:
        if failures:
            raise failures.pop()
        return await replace(*given, **how)

    monkeypatch.setattr(hosts, "replace", unlucky)
    lose(board, 1, 2)
    restarting = asyncio.ensure_future(made.restart(lambda rank: [rank]))
    await until(lambda: len(hosts.started) == 2)
    board.ready |= {rank: ready(rank) for rank in (1, 2)}
    board.heard.set()
    restarted = await asyncio.wait_for(restarting, 30)
    assert restarted.kept == {0, 3} and made.live == {0, 1, 2, 3}
    await made.stop()


@pytest.mark.parametrize(
    ("error", "starts"), [(CheckpointError("/model: gone"), 3), (ConfigError("model.path", 1, "2"), 1)]
)
async def test_a_checkpoint_that_cannot_be_read_ends_the_ranks(
    monkeypatch: pytest.MonkeyPatch, error: StartupError, starts: int
) -> None:
    board, hosts, made = four_ranks()
    monkeypatch.setattr(arrivals, "AGAIN_SECONDS", 0.001)
    lose(board, 1, 2)
    restarting = asyncio.ensure_future(made.restart(lambda rank: []))
    for number in range(starts):
        await until(lambda number=number: len(hosts.started) == 2 + number)
        assert made.takes(Sign(Kind.OWN_ERROR, 2, error))
        board.heard.set()
    with pytest.raises(type(error), match=str(error)):
        await asyncio.wait_for(restarting, 30)
    await made.stop()


async def test_a_rank_that_reads_experts_is_no_hung_one() -> None:
    """Others wait for both. Rank 2 reports nothing, rank 3 that it reads."""
    board, hosts, made = four_ranks(answer=0.2, silent={2, 3})
    lost: list[tuple[int, LossCause]] = []
    made._listener.on_rank_lost = lambda rank, cause: lost.append((rank, cause))  # type: ignore[method-assign]
    lose(board, 1)
    restarting = asyncio.ensure_future(made.restart(lambda rank: []))
    while len(hosts.started) < 2:  # in the places of ranks 1 and 2: the other two do not hold all experts
        board.told[3] = asyncio.get_running_loop().time()
        board.heard.set()
        await asyncio.sleep(0.01)
    assert lost == [(1, LossCause.SIGNAL), (2, LossCause.HANG)]
    board.ready |= {rank: ready(rank) for rank in (1, 2)}
    board.heard.set()
    await until(lambda: made.generation == 2)
    for _ in range(40):
        board.told[3] = asyncio.get_running_loop().time()
        board.heard.set()
        await asyncio.sleep(0.01)
    assert not restarting.done()
    made.regrouping.on_regrouped(3, pb.Regrouped(generation=2))
    board.heard.set()
    await asyncio.wait_for(restarting, 30)
    assert made.live >= {0, 3} and len(lost) == 2
    await made.stop()

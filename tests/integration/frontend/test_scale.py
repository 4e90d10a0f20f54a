"""Ranks join and leave while requests run. The oracle is an undisturbed run; no stream ends."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.client import AsyncClient
from ep_server.errors import EpServerError
from ep_server.orders import DropChange, PrepareWeights
from ep_server.ranks.board import Board
from ep_server.ranks.local_ranks import LocalRanks
from ep_server.ranks.process import NO_CALLBACKS
from ep_server.records import RankLoad, RankStatistics
from ep_server.v1.rank_pb2 import ToRank
from tests.support.losing import ASKED, WAIT, Losing, losing, run_all, seen, undisturbed
from tests.support.models.perturbed import perturbed
from tests.support.ranks.cache_mirror import CacheMirror
from tests.support.ranks.serving import begun


async def test_ranks_join_and_leave_while_requests_run() -> None:
    """Two ranks become four, one is held out, two of them leave, and the first returns."""
    fields = {"parallel__ranks": 2, "parallel__max_ranks": 4, "resilience__spare_slots": "2"}
    async with losing(**fields) as lost, AsyncClient(lost.server.address) as client:
        expected = await undisturbed(lost.client, ASKED)
        engine = lost.server.engine
        for steps in (
            [({"ranks": 4}, {0, 1, 2, 3}), ({"hold_out": [2]}, {0, 1, 3})],
            [({"ranks": 2}, {0, 1}), ({"ranks": 3, "hold_out": [0]}, {1, 2, 3})],
            [({"ranks": 4}, {0, 1, 2, 3})],
        ):
            running = await lost.begun(ASKED, 5)
            for asked, live in steps:
                done = await client.scale(**asked)
                assert set(done.live) == lost.group().live == live
                assert {active.rank for active in engine._requests} <= live
                info = await client.server_info()
                assert set(info.live_ranks) == live
                assert set(info.ranks_out) == set(asked.get("hold_out", []))
                for rank in {0, 1, 2, 3} - live:  # what it sent until it left
                    engine._delivery.on_statistics(RankStatistics(rank, RankLoad(running=2)))
                assert {load.rank for load in (await client.loads()).ranks} == live
            assert [seen(output) for output in await running] == expected
        assert len(lost.heard.recovered) == 0
        with pytest.raises(EpServerError, match=r"parallel\.max_ranks"):
            await client.scale(5)
        with pytest.raises(EpServerError, match="too few expert slots"):
            await client.scale(1)
        assert lost.group().live == {0, 1, 2, 3}
        lost.signal(1)  # a loss after all that
        await lost.recovered(1)
        assert [seen(output) for output in await run_all(lost.client, ASKED)] == expected


async def test_calls_of_scale_do_not_meet() -> None:
    """One that runs refuses others, and goes on though its caller leaves. What it is asked is checked."""
    fields = {"parallel__ranks": 2, "parallel__max_ranks": 3, "resilience__spare_slots": "8"}
    async with losing(handoff__role="prefill", **fields) as lost, AsyncClient(lost.server.address) as client:
        with pytest.raises(EpServerError, match=r"hold_out = 3: must be 0 to 2"):
            await client.scale(hold_out=[0, 3, 70])
        first = asyncio.ensure_future(client.scale(3))
        await lost.until(lambda: 2 in lost.group()._board.processes)
        lost.signal(2, signal.SIGSTOP)  # else it may have joined before the second call
        with pytest.raises(EpServerError, match="another call of Scale"):
            await client.scale(2)
        first.cancel()
        lost.signal(2, signal.SIGCONT)
        await lost.until(lambda: lost.group().live == {0, 1, 2})
        await lost.until(lost.group()._scaling.done)  # type: ignore[union-attr]
        assert list((await client.scale(2, hold_out=[0])).live) == [1, 2]
        ready = {each.rank: each for each in lost.server.engine.ready}
        for rank in (1, 2):  # a rank is not found by its position
            output = await lost.client.complete([1, 5, 3], max_new_tokens=1, hold_kv=True, dp_rank=rank)
            assert output.kv_handle.address == ready[rank].kv_address != ""
        loads = await VllmEngineStub(lost.client.channel).GetLoads(pb.GetLoadsRequest())
        assert [load.dp_rank for load in loads.loads] == [1, 2]
        assert len({each.kv_address for each in ready.values()}) == 2


async def test_ranks_that_stop_end_a_call_of_scale() -> None:
    """Though the new rank says nothing."""
    fields = {"parallel__ranks": 2, "parallel__max_ranks": 3, "resilience__spare_slots": "8"}
    async with losing(**fields) as lost:
        group = lost.group()
        running = asyncio.ensure_future(group.scale(3, frozenset()))
        await lost.until(lambda: 2 in group._board.processes)
        lost.signal(2, signal.SIGSTOP)
        await asyncio.wait_for(lost.server.stop(), WAIT)
        with pytest.raises(EpServerError, match="the ranks stopped meanwhile"):
            await running


async def test_a_refused_scale_leaves_no_process() -> None:
    """Ranks that prepare another change refuse; the new rank ends at once, and a later call works."""
    fields = {"parallel__ranks": 2, "parallel__max_ranks": 3, "resilience__spare_slots": "8"}
    async with losing(**fields) as lost, AsyncClient(lost.server.address) as client:
        group, change, orders = lost.group(), 77, lost.server.engine._delivery.orders
        await orders.give(PrepareWeights(change, 1, str(DEMO_MODEL)), WAIT, "preparing")
        with pytest.raises(EpServerError, match=r"rank 1: it has prepared new weights from .* \(change 77\)"):
            await client.scale(3)
        assert sorted(group._board.processes) == [0, 1] and group.live == {0, 1}
        assert not group._generations.arrivals.loading  # type: ignore[union-attr]
        await orders.give(DropChange(change), WAIT, "dropping")  # its threads have ended: it is gone
        assert list((await client.scale(3)).live) == [0, 1, 2]


async def test_a_scale_without_a_new_process_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two processes does not start: the first one ends, and a later call works."""
    fields = {"parallel__ranks": 2, "parallel__max_ranks": 4, "resilience__spare_slots": "8"}
    async with losing(**fields) as lost, AsyncClient(lost.server.address) as client:
        group = lost.group()
        hosts = group._hosts.replacing
        assert hosts is not None
        replace = hosts.replace

        async def first(rank: int, *rest: Any, **how: Any) -> Any:
            if rank == 3:
                raise OSError(24, "Too many open files")
            return await replace(rank, *rest, **how)

        with monkeypatch.context() as patch:
            patch.setattr(hosts, "replace", first)
            with pytest.raises(EpServerError, match=r"no process can be started as rank 3: .*Too many open"):
                await client.scale(4)
        assert group.wanted == ({0, 1}, frozenset()) and sorted(group._board.processes) == [0, 1]
        assert list((await client.scale(4)).live) == [0, 1, 2, 3]
        assert not lost.heard.lost


async def test_an_update_and_a_scale_take_turns(tmp_path: Path) -> None:
    """Whichever comes first. All ranks have the new weights, also one that joins."""
    other = perturbed(DEMO_MODEL, tmp_path / "other", share=1.0)
    fields = {"parallel__ranks": 2, "parallel__max_ranks": 3, "resilience__spare_slots": "8"}
    async with losing(model__updates="/", **fields) as lost, AsyncClient(lost.server.address) as client:
        requests = lost.server.engine._requests
        running = await begun(lambda: run_all(lost.client, ASKED[:4]), lambda: len(requests) >= 4)
        done, updated = await asyncio.gather(client.scale(3), client.update_weights(str(other)))
        assert list(done.live) == [0, 1, 2] and updated.version == 1
        updated, done = await asyncio.gather(client.update_weights(str(DEMO_MODEL)), client.scale(2))
        assert list(done.live) == [0, 1] and updated.version == 2
        assert all(output.finished for output in await running)
        expected = [seen(output) for output in await run_all(lost.client, ASKED[:4])]
        await client.scale(3)
        assert [seen(output) for output in await run_all(lost.client, ASKED[:4])] == expected
        assert not lost.heard.lost


async def counters(lost: Losing, rank: int) -> Mapping[str, int]:
    """Those of a rank, once its newest report says that it has done all that was given to it."""

    def newest() -> Mapping[str, int]:
        return lost.server.engine.rank_statistics[rank].counters

    await lost.until(lambda: newest().get("parked_at_work") == lost.group()._board.work_number)
    return newest()


@pytest.mark.parametrize("in_place", [True, False])
async def test_new_ranks_become_what_the_old_ones_were(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks are lost at once. If no process can take a place, all start: rank 0 leaves again, 2 joins."""

    async def replace(*_: object, **__: object) -> None:
        raise OSError("no process")

    fields = {"parallel__ranks": 2, "parallel__max_ranks": 3, "resilience__spare_slots": "8"}
    async with losing(**fields) as lost, AsyncClient(lost.server.address) as client:
        expected = await undisturbed(lost.client, ASKED)
        assert list((await client.scale(2, hold_out=[0])).live) == [1, 2]
        before = await counters(lost, 1)
        assert [seen(output) for output in await run_all(lost.client, ASKED)] == expected
        after = await counters(lost, 1)
        run, split = (after[name] - before[name] for name in ("run_steps", "overlap_steps"))
        assert 0 < split < run, "rank 1 tries both ways"
        old, running = lost.group(), await lost.begun(ASKED, 5)
        if not in_place:
            monkeypatch.setattr(old._generations._replacing, "replace", replace)
        for rank in (1, 2):
            lost.signal(rank)
        await lost.recovered(1, everyone=False)
        assert (lost.group() is old) == in_place
        await lost.until(lambda: lost.group().live == {1, 2})
        assert [seen(output) for output in await running] == expected
        info = await client.server_info()
        assert list(info.live_ranks) == [1, 2] and dict(info.ranks_out) == {0: "held out by an operator"}
        assert list((await client.scale()).live) == [0, 1, 2]


async def test_subscribers_follow_a_rank_that_leaves_and_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads the orders to regroup and to report its cache at once."""
    fields = {"parallel__ranks": 2, "parallel__max_ranks": 3, "resilience__spare_slots": "8"}
    async with losing(**fields) as lost, AsyncClient(lost.server.address) as client:
        engine, send = lost.server.engine, Board.send

        def together(board: Board, rank: int, message: ToRank) -> None:
            kind = message.WhichOneof("kind")
            if kind == "regroup":
                lost.signal(rank, signal.SIGSTOP)
            send(board, rank, message)
            if kind == "watch_cache":
                lost.signal(rank, signal.SIGCONT)

        monkeypatch.setattr(Board, "send", together)
        mirrors = [CacheMirror() for _ in range(3)]
        async with engine.subscribe_kv_events() as subscription, asyncio.timeout(WAIT):

            async def follow(condition: Callable[[CacheMirror], bool]) -> None:
                while not condition(mirrors[2]):
                    batch = await subscription.read()
                    assert batch is not None
                    mirrors[batch.rank].apply(batch)

            for prompt in ([1, 5, 3, 7] * 8, [2, 9, 4, 6] * 8):
                mirrors[2].complete = False
                await client.scale(3)
                await lost.client.complete(prompt, max_new_tokens=1, dp_rank=2)
                await follow(lambda mirror: mirror.holds(tuple(prompt)))  # noqa: B023
                assert mirrors[2].complete and len(mirrors[2].blocks) == 2
                await client.scale(2)
                await follow(lambda mirror: not mirror.blocks)
            assert all(mirror.complete for mirror in mirrors[:2])


async def test_a_profile_goes_on_though_ranks_leave_and_join(tmp_path: Path) -> None:
    """The files are those of ranks that were there all the time. A rank that leaves writes its own."""
    fields = {"parallel__ranks": 2, "parallel__max_ranks": 3, "resilience__spare_slots": "8"}
    async with (
        losing(profile__directory=str(tmp_path), **fields) as lost,
        AsyncClient(lost.server.address) as client,
    ):
        engine, generations = lost.server.engine, cast(Any, lost.group()._generations)
        generations._timing = replace(generations._timing, grace=WAIT)  # for a busy machine to write files
        name = await engine.start_profile()
        await client.scale(2, hold_out=[1])
        written = sorted(path for path in tmp_path.iterdir() if "rank1" in path.name)
        assert len(written) == 2 and all(path.stat().st_size for path in written)
        files = [Path(file).name for file in await engine.stop_profile()]
        assert files == [f"{name}-rank0.trace.json", f"{name}-rank0.steps.json"]


async def test_a_process_that_starts_in_a_switch_has_new_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The switch comes between the choice of a process and its order to start."""
    fields = {"parallel__ranks": 2, "parallel__max_ranks": 3, "resilience__spare_slots": "8"}
    async with losing(**fields) as lost:
        host, sent = cast(Any, lost.group()._hosts).replacing, list[bytes]()

        async def process(*_: Any, **__: Any) -> tuple[Any, None]:
            host.use_weights("/new", 7)
            return SimpleNamespace(send=sent.append), None

        monkeypatch.setattr(LocalRanks, "spawn", process)
        await host.replace(2, NO_CALLBACKS, range(3), None, awaited=False)
        host.kv.leave(2, lost=False)
        start = ToRank.FromString(sent[0]).start
        assert start.weights_version == 7 and json.loads(start.config_json)["model.path"] == "/new"

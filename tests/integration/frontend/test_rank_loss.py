"""Ranks of a running server are lost in every way there is. The oracle is an undisturbed run."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.ranks import process
from tests.support.losing import (
    ASKED,
    NEW,
    RANKS,
    WAIT,
    Losing,
    losing,
    run_all,
    seen,
    shortened,
    undisturbed,
)
from tests.support.models.perturbed import perturbed
from tests.support.ranks.fatal_add_rank import FATAL
from tests.support.ranks.serving import begun

SHORT = shortened(64)  # for one loss, which comes early
Loss = Callable[[Losing, random.Random], Awaitable[None]]


async def killed(losing: Losing, draw: random.Random) -> None:
    losing.signal(draw.randrange(RANKS))


async def stopped(losing: Losing, draw: random.Random) -> None:
    losing.signal(draw.randrange(RANKS), signal.SIGSTOP)  # longer than the hang timeout


async def broken(losing: Losing, draw: random.Random) -> None:
    losing.break_(draw.randrange(RANKS))


async def two_killed(losing: Losing, draw: random.Random) -> None:
    """At once, or one while the loss of the other is being noticed or repaired."""
    first, second = draw.sample(range(RANKS), 2)
    losing.signal(first)
    await asyncio.sleep(draw.choice([0.0, 0.1, draw.uniform(0.0, 1.0)]))
    losing.signal(second)


async def all_killed(losing: Losing, draw: random.Random) -> None:
    """At once, or the last one once the others are known to be lost."""
    order = draw.sample(range(RANKS), RANKS)
    for rank in order[:-1]:
        losing.signal(rank)
    await asyncio.sleep(draw.choice([0.0, draw.uniform(0.0, 1.0)]))
    losing.signal(order[-1])


async def killed_twice(losing: Losing, draw: random.Random) -> None:
    """The process that takes the place of the lost one is killed while it starts."""
    group, rank = losing.group(), draw.randrange(RANKS)
    pid = group.pids[rank]
    losing.signal(rank)
    await losing.until(lambda: losing.group() is not group or group.pids[rank] != pid)
    if losing.group() is group:
        losing.signal(rank)


async def lose(losing: Losing, loss: Loss, draw: random.Random, expected: list[Any]) -> None:
    """Loses ranks while all requests run, and compares what they give."""
    before = len(losing.heard.recovered)
    tokens = draw.randrange(1, NEW - 60)
    running = await losing.begun(ASKED, tokens)
    await asyncio.sleep(draw.uniform(0.0, 0.01))
    await loss(losing, draw)
    async with asyncio.timeout(WAIT):
        outputs = await running
    assert [seen(output) for output in outputs] == expected, f"{loss} after {tokens} tokens"
    await losing.recovered(before + 1, everyone=not losing.server.engine.group.out)


async def balanced(losing: Losing) -> None:
    """Every rank is alive, has reported since it parked, and holds nothing."""
    engine = losing.server.engine

    def empty() -> bool:
        if len(engine.rank_statistics) < RANKS:  # one has not reported since it joined
            return False
        loads = [engine.rank_statistics[rank].load for rank in range(RANKS)]
        counts = engine.statistics()
        front = (counts.in_flight, counts.open_streams, counts.running, counts.waiting)
        at_ranks = [(load.running, load.waiting, load.kv_blocks_used) for load in loads]
        return front == (0, 0, 0, 0) and at_ranks == [(0, 0, 0)] * RANKS

    await losing.until(empty)
    assert losing.group().exit_codes == [None] * RANKS


async def test_five_losses_change_no_output() -> None:
    draw = random.Random(11)
    async with losing() as lost:
        expected = await undisturbed(lost.client, ASKED)
        for loss in (killed, broken, killed):
            pids = lost.group().pids
            await lose(lost, loss, draw, expected)
            assert len(set(pids) & set(lost.group().pids)) == RANKS - 1, "the others keep their processes"
        lost.signal(2)  # with nothing to do
        await lost.recovered(4)
        await lose(lost, killed, draw, expected)
        await balanced(lost)


async def test_the_others_go_on_and_a_rank_that_fails_twice_stays_out() -> None:
    """The first loss: its requests move, and a new process joins. The new process is lost: it stays out."""
    async with losing(resilience__rank_losses=2) as lost:
        engine, group = lost.server.engine, lost.group()
        expected = await undisturbed(lost.client, ASKED)
        running = await lost.begun(ASKED, 10)
        lost.signal(3)
        await lost.until(lambda: lost.group().live == {0, 1, 2} and len(lost.heard.recovered) == 1)
        assert {active.rank for active in engine._requests} <= {0, 1, 2}
        await lost.until(lambda: 3 in group._board.processes)
        lost.signal(3)  # while it loads
        assert [seen(output) for output in await running] == expected
        await lost.until(lambda: engine.group is not None and 3 in engine.group.out)
        assert lost.group().live == {0, 1, 2}
        assert [seen(output) for output in await run_all(lost.client, ASKED)] == expected
        # Nobody has room for the experts of another rank: now a new process is waited for.
        await lose(lost, partial(kill, rank=1), random.Random(1), expected)
        assert lost.group().live == {0, 1, 2}
        assert group is lost.group()


async def test_new_processes_take_the_places_of_all_ranks() -> None:
    """What the ranks shared and the process on standby are kept. A place is empty when its rank is lost."""
    async with losing() as lost:
        expected, group = await undisturbed(lost.client, ASKED), lost.group()
        pids = set(group.pids)
        await lose(lost, all_killed, random.Random(2), expected)
        assert lost.group() is group and not pids & set(group.pids)
        await balanced(lost)


async def kill(losing: Losing, draw: random.Random, rank: int) -> None:
    losing.signal(rank)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("loss", "times"),
    [(killed, 200), (two_killed, 50), (all_killed, 20), (killed_twice, 20), (broken, 20), (stopped, 10)],
)
async def test_many_losses_change_no_output(loss: Loss, times: int) -> None:
    draw = random.Random(times)
    async with losing(3.0 if loss is stopped else 60.0) as lost:
        expected = await undisturbed(lost.client, ASKED)
        for _ in range(times):
            await lose(lost, loss, draw, expected)
        await balanced(lost)


async def test_a_request_that_is_fatal_to_add_ends_alone() -> None:
    """It ends every process that puts it into its queue. The others lose three ranks, and no token."""
    fields = {"parallel__ranks": 2, "scheduler__max_step_tokens": 512}
    async with losing(module="tests.support.ranks.fatal_add_rank", **fields) as lost:
        asked = SHORT[:1] + SHORT[2:4]
        expected = await undisturbed(lost.client, asked)
        requests = lost.server.engine._requests
        running = await begun(lambda: run_all(lost.client, asked), lambda: len(requests) >= 4)
        with pytest.raises(AioRpcError, match="; 3 ranks were lost while they worked on it") as caught:
            await lost.client.complete(list(FATAL), max_new_tokens=4, timeout=WAIT)
        assert caught.value.code() is StatusCode.UNAVAILABLE
        assert [seen(output) for output in await running] == expected
        await lost.until(lambda: len(lost.heard.recovered) >= 3)
        assert len(lost.heard.recovered) == 3


async def test_a_rank_that_reads_experts_for_long_is_waited_for() -> None:
    """Longer than a hang may take. The others do not start again for it."""
    async with losing(8.0, module="tests.support.ranks.slow_experts_rank") as lost:
        expected = await undisturbed(lost.client, SHORT)
        group, running = lost.group(), await lost.begun(SHORT, 20)
        lost.signal(2)
        assert [seen(output) for output in await running] == expected
        await lost.recovered(1)
        assert lost.group() is group and len(lost.heard.recovered) == 1


async def test_weights_of_two_checkpoints_do_not_mix(tmp_path: Path) -> None:
    """Somebody replaces the checkpoint under a server that has to read experts of a lost rank."""
    path = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    other = perturbed(DEMO_MODEL, tmp_path / "other", share=1.0)
    async with losing(model__path=str(path)) as lost:
        expected = await undisturbed(lost.client, SHORT)
        (path / "model.safetensors").touch()
        running = await lost.begun(SHORT, 5)
        lost.signal(1)
        assert [seen(output) for output in await running] == expected
        await lost.recovered(1)
        running = await lost.amid(SHORT, 5)
        (other / "model.safetensors").replace(path / "model.safetensors")
        lost.signal(2)
        lost.go_on()
        with pytest.raises(AioRpcError, match="its files hold other weights now than the ranks have loaded"):
            await running
        await lost.server.engine.lost.wait()


async def test_a_checkpoint_that_is_gone_ends_the_server(tmp_path: Path) -> None:
    """Experts of a lost rank cannot be read, now or by other processes. The status names the file."""
    path = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    async with losing(model__path=str(path)) as lost:
        running = await lost.amid(SHORT, 5)
        (path / "model.safetensors").unlink()
        lost.signal(1)
        lost.go_on()
        with pytest.raises(AioRpcError, match=rf"UNAVAILABLE[^$]*{path}.*model\.safetensors") as caught:
            await running
        assert caught.value.code() is StatusCode.UNAVAILABLE
        await lost.server.engine.lost.wait()


@pytest.mark.parametrize("spare_slots", ["auto", "0"])
async def test_a_file_that_is_away_for_a_moment_costs_no_rank(tmp_path: Path, spare_slots: str) -> None:
    """The others read it, or processes that they wait for."""
    path = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    async with losing(model__path=str(path), resilience__spare_slots=spare_slots) as lost:
        expected = await undisturbed(lost.client, SHORT)
        group, running = lost.group(), await lost.begun(SHORT, 5)
        pids = set(group.pids)
        (path / "model.safetensors").rename(path / "away")
        lost.signal(1)
        await lost.until(lambda: lost.server.engine._delivery.down)
        await asyncio.sleep(1.0)  # until somebody has read in vain; they try again for longer
        (path / "away").rename(path / "model.safetensors")
        assert [seen(output) for output in await running] == expected
        await lost.recovered(1)
        assert lost.group() is group and len(pids & set(group.pids)) == RANKS - 1


async def test_a_start_that_fails_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need a new process in the place of the lost one. The host has none for a moment."""
    async with losing(resilience__spare_slots="0", resilience__standby=0) as lost:
        expected = await undisturbed(lost.client, SHORT)
        group, running = lost.group(), await lost.begun(SHORT, 5)
        pids, start, failures = set(group.pids), process.subprocess.Popen, [1, 2, 3]

        def unlucky(*given: Any, **how: Any) -> Any:
            if failures:
                failures.pop()
                raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
            return start(*given, **how)

        monkeypatch.setattr(process.subprocess, "Popen", unlucky)
        lost.signal(2)
        assert [seen(output) for output in await running] == expected
        await lost.recovered(1)
        assert not failures
        assert lost.group() is group and len(pids & set(group.pids)) == RANKS - 1

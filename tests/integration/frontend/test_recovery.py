"""What becomes of requests while ranks are replaced, over fake ranks; test_rank_loss has real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import pytest

from ep_server.engine.engine import EngineState
from ep_server.engine.observer import RecoveryPhase
from ep_server.errors import CheckpointError, ConfigError, StartupError
from ep_server.ranks.protocol import Restarted
from ep_server.testing.fake_ranks import FakeRanks
from tests.support.frontend import Code, failure, next_event, rest, serving

WAIT = 120.0


async def test_a_new_request_waits_for_the_new_ranks() -> None:
    ranks = FakeRanks(2)
    async with serving(ranks, resilience__on_rank_loss="recover") as served:
        ranks.hold()
        first = served.client.generate([1], max_new_tokens=4)
        await next_event(first)
        ranks.step(2)
        ranks.start_gate = asyncio.Event()
        ranks.kill(1)
        second = served.client.generate([7], max_new_tokens=2)
        await next_event(second)
        info = await served.client.server_info()
        assert (
            info.state
            == type(info)
            .DESCRIPTOR.fields_by_name["state"]
            .enum_type.values_by_name["SERVER_STATE_RECOVERING"]
            .number
        )
        assert await served.client.serving()
        ranks.start_gate.set()
        tokens = [[t for e in await rest(call) for t in e.tokens.token_ids] for call in (first, second)]
        assert tokens == [[2, 3, 4, 5], [8, 9]]
        assert served.heard.recovered == [2]


async def test_a_request_cancelled_meanwhile_is_not_continued() -> None:
    ranks = FakeRanks(2)
    async with serving(ranks, resilience__on_rank_loss="recover") as served:
        ranks.hold()
        call = served.client.generate([1], max_new_tokens=4)
        await next_event(call)
        ranks.start_gate = asyncio.Event()
        ranks.kill(0)
        call.cancel()
        await served.idle()
        ranks.start_gate.set()
        await served.until(lambda: bool(served.heard.recovered))
        assert served.heard.recovered == [0]


async def test_each_phase_of_a_recovery_is_reported_once() -> None:
    ranks = FakeRanks(2)
    async with serving(ranks, resilience__on_rank_loss="recover") as served:
        ranks.hold()
        calls = [served.client.generate([1], max_new_tokens=4) for _ in range(2)]
        for call in calls:
            await next_event(call)
        ranks.step(2)
        ranks.start_gate = asyncio.Event()
        ranks.kill(0)
        ranks.start_gate.set()
        assert list(served.heard.phases) == [RecoveryPhase.DETECT]
        await rest(calls[0])
        await rest(calls[1])
        await served.until(lambda: RecoveryPhase.PREFILL in served.heard.phases)
        assert {phase: len(seconds) for phase, seconds in served.heard.phases.items()} == dict.fromkeys(
            RecoveryPhase, 1
        )
        of = {phase: seconds[0] for phase, seconds in served.heard.phases.items()}
        assert of[RecoveryPhase.REGROUP] <= of[RecoveryPhase.FIRST_TOKEN]
        assert min(of.values()) >= 0


async def test_tokens_name_the_rank_that_drew_them() -> None:
    """Those drawn before the loss and read later too."""
    ranks = FakeRanks(2)
    async with serving(ranks, resilience__on_rank_loss="recover") as served:
        ranks.hold()
        call = served.client.generate([1], max_new_tokens=4, dp_rank=1, stream_interval=2)
        assert (await next_event(call)).prompt_info.rank == 1
        ranks.step(2)
        ranks.kill(1)
        await served.until(lambda: bool(served.heard.recovered))
        (active,) = served.server.engine._requests
        assert active.rank == 0
        ranks.release()
        drawn = [(list(e.tokens.token_ids), e.tokens.rank) for e in await rest(call) if e.HasField("tokens")]
        assert drawn == [([2, 3], 1), ([4, 5], 0)]


async def test_ranks_that_do_not_start_again_end_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ep_server.engine.recovery.AGAIN_SECONDS", 0.01)
    ranks = FakeRanks(2)
    async with serving(ranks, resilience__on_rank_loss="recover") as served:
        ranks.hold()
        call = served.client.generate([1], max_new_tokens=4)
        await next_event(call)
        ranks.start_error = StartupError("no memory")
        ranks.kill(0, "exit code -9")
        error = await failure(call)
        assert error.code() is Code.UNAVAILABLE
        assert error.details() == ("rank 0 was lost: exit code -9; the ranks did not start again: no memory")
        assert served.server.engine.lost.is_set()


class UnluckyRanks(FakeRanks):
    """Restarts fail with these errors first; None: a new rank dies before it gets the requests."""

    def __init__(self, *failures: Exception | None) -> None:
        super().__init__(2)
        self.failures = list(failures)

    async def restart(self, awaited: Callable[[int], Collection[int]]) -> Restarted:
        if not self.failures:
            return await super().restart(awaited)
        if (failure := self.failures.pop(0)) is not None:
            raise failure
        ready = await super().restart(awaited)
        self.kill(1)
        return ready


async def test_ranks_that_die_while_they_start_are_replaced() -> None:
    ranks = UnluckyRanks(StartupError("rank 1: exit code -9"), None, StartupError("rank 0: exit code -9"))
    async with serving(ranks, resilience__on_rank_loss="recover") as served:
        ranks.hold()
        call = served.client.generate([1], max_new_tokens=4)
        await next_event(call)
        ranks.step(2)
        ranks.kill(0)
        assert [t for e in await rest(call) for t in e.tokens.token_ids] == [2, 3, 4, 5]
        assert ranks.failures == [] and served.heard.recovered == [1] and served.heard.lost == [0, 1]


async def test_starts_that_fail_leave_the_host_more_and_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lacks may be there again a little later."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def record(seconds: float, *rest: Any) -> Any:
        if seconds < 1000:  # of another one
            return await sleep(seconds, *rest)
        slept.append(seconds)
        return await sleep(0, *rest)

    monkeypatch.setattr("ep_server.engine.recovery.AGAIN_SECONDS", 1000.0)
    monkeypatch.setattr("ep_server.engine.recovery.MOST_AGAIN_SECONDS", 3000.0)
    monkeypatch.setattr("ep_server.engine.recovery.asyncio.sleep", record)
    ranks = UnluckyRanks(*(StartupError("too many open files") for _ in range(4)))
    async with serving(ranks, resilience__on_rank_loss="recover") as served:
        ranks.kill(0)
        await served.until(lambda: len(served.heard.recovered) == 1)
    assert slept == [1000.0, 2000.0, 3000.0]


@pytest.mark.parametrize("failure_of_start", [OSError("out of processes"), ConfigError("x", 1, "2")])
async def test_errors_that_return_end_the_streams_at_once(failure_of_start: Exception) -> None:
    ranks = UnluckyRanks(failure_of_start)
    async with serving(ranks, resilience__on_rank_loss="recover") as served:
        ranks.hold()
        call = served.client.generate([1], max_new_tokens=4)
        await next_event(call)
        ranks.kill(0, "exit code -9")
        error = await failure(call)
        assert error.code() is Code.UNAVAILABLE
        why = f"the ranks did not start again: {failure_of_start}"
        assert error.details() == f"rank 0 was lost: exit code -9; {why}"
        assert served.server.engine.lost.is_set()


@pytest.mark.parametrize("failures", [2, 3])
async def test_a_checkpoint_that_stays_unreadable_ends_the_server(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever resilience.max_losses is: it is no loss that other processes make good."""
    monkeypatch.setattr("ep_server.engine.recovery.AGAIN_SECONDS", 0.001)
    why = "/model/x.safetensors: shard cannot be read (Input/output error)"
    ranks = UnluckyRanks(*(CheckpointError(why) for _ in range(failures)))
    options = {"resilience__on_rank_loss": "recover", "resilience__max_losses": 1000}
    async with serving(ranks, **options) as served:
        ranks.hold()
        call = served.client.generate([1], max_new_tokens=4)
        await next_event(call)
        ranks.kill(0, "exit code -9")
        if failures < 3:
            await served.until(lambda: len(served.heard.recovered) == 1)
            call.cancel()
            return
        error = await failure(call)
        assert error.code() is Code.UNAVAILABLE
        expected = f"rank 0 was lost: exit code -9; the ranks did not start again: {why}"
        assert error.details() == expected and served.server.engine.lost.is_set()


async def test_a_request_that_waits_for_new_ranks_lost_none() -> None:
    ranks = FakeRanks(2)
    async with serving(ranks, resilience__on_rank_loss="recover") as served:
        ranks.start_gate = asyncio.Event()
        ranks.kill(0)
        call = served.client.generate([7], max_new_tokens=2)
        await next_event(call)
        ranks.start_gate.set()
        for recovered in (1, 2, 3):
            await served.until(lambda recovered=recovered: len(served.heard.recovered) == recovered)
            if recovered < 3:
                ranks.kill(0)
        assert [t for e in await rest(call) for t in e.tokens.token_ids] == [8, 9]


@pytest.mark.parametrize("seconds", [0.0, WAIT])
async def test_a_server_told_to_stop_meanwhile_drains(seconds: float) -> None:
    ranks = FakeRanks(2)
    async with serving(ranks, resilience__on_rank_loss="recover", grpc__drain_seconds=seconds) as served:
        ranks.hold()
        call = served.client.generate([1], max_new_tokens=4)
        await next_event(call)
        ranks.start_gate = asyncio.Event()
        ranks.kill(0)
        served.server.ask_to_stop()
        await served.server.serve()
        drained = asyncio.ensure_future(served.server.drain())
        await served.until(lambda: served.server.engine.state is EngineState.DRAINING)
        if seconds:
            ranks.start_gate.set()
            assert [t for e in await rest(call) for t in e.tokens.token_ids] == [2, 3, 4, 5]
        else:
            assert (await failure(call)).code() is Code.UNAVAILABLE
        await drained
        await served.server.stop()  # with the ranks still starting


async def test_a_request_that_kills_its_ranks_ends_alone() -> None:
    ranks = FakeRanks(2)
    async with serving(ranks, resilience__on_rank_loss="recover") as served:
        ranks.hold()
        bad = served.client.generate([1], max_new_tokens=4)
        await next_event(bad)
        for _ in range(3):
            recovered = len(served.heard.recovered)
            (active,) = served.server.engine._requests
            ranks.begin(active.rank)
            ranks.kill(active.rank)  # wherever it runs again
            await served.until(lambda before=recovered: len(served.heard.recovered) > before)
            ranks.hold()
        error = await failure(bad)
        assert error.code() is Code.UNAVAILABLE
        assert error.details().endswith("; 3 ranks were lost while they worked on it")
        good = served.client.generate([7], max_new_tokens=2)
        ranks.release()
        assert [t for e in await rest(good) for t in e.tokens.token_ids] == [8, 9]


async def test_a_late_message_of_a_lost_rank_accuses_nobody() -> None:
    """It had begun to add the request. The next process has not when it is lost too."""
    ranks = FakeRanks(1)
    async with serving(ranks, resilience__on_rank_loss="recover") as served:
        ranks.hold()
        call = served.client.generate([1], max_new_tokens=2)
        await next_event(call)
        (active,) = served.server.engine._requests
        for losses in (1, 2):
            ranks.start_gate = asyncio.Event()
            ranks.kill(0)
            if losses == 1:
                ranks._told().on_begun(0, [], adding=active.request.number)
            ranks.start_gate.set()
            await served.until(lambda count=losses: len(served.heard.recovered) == count)
            assert active.suspected == 0
            ranks.hold()
        ranks.release()
        assert [t for e in await rest(call) for t in e.tokens.token_ids] == [2, 3]


async def test_losses_while_a_request_waits_do_not_end_it() -> None:
    """It was in a step of two of five ranks that were lost."""
    ranks = FakeRanks(2)
    async with serving(ranks, resilience__on_rank_loss="recover") as served:
        ranks.hold()
        call = served.client.generate([1], max_new_tokens=4)
        await next_event(call)
        for loss in range(5):
            (active,) = served.server.engine._requests
            if loss % 2:
                ranks.begin(active.rank)
            ranks.kill(active.rank)
            await served.until(lambda loss=loss: len(served.heard.recovered) > loss)
            ranks.hold()
        ranks.release()
        assert [t for e in await rest(call) for t in e.tokens.token_ids] == [2, 3, 4, 5]


async def test_too_many_losses_end_the_server(caplog: pytest.LogCaptureFixture) -> None:
    ranks = FakeRanks(1)
    async with serving(ranks, resilience__on_rank_loss="recover") as served:
        for loss in range(5):
            ranks.kill(0)
            await served.until(lambda loss=loss: len(served.heard.recovered) > loss)
        ranks.kill(0)
        assert served.server.engine.lost.is_set()
    assert "rank 0 was lost twice within 600 s" in caplog.text

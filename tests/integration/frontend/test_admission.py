"""A full queue over gRPC: who is refused, how early, who leaves for whom, and what is never computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ep_server.testing.fake_ranks import LIMITS, FakeRanks
from ep_server.text.tokenizer import Tokenizer
from tests.support.frontend import Code, Served, failure, next_event, rest, serving, trailers


def one_at_a_time() -> FakeRanks:
    return FakeRanks(limits=dataclasses.replace(LIMITS, max_running=1))


async def waiting(served: Served, name: str, **fields: Any) -> Any:
    """A call that was admitted."""
    call = served.client.generate([1], request_id=name, max_new_tokens=2, **fields)
    await next_event(call)
    return call


async def test_a_full_queue_refuses_before_text_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def encoded(*_: Any) -> Any:
        raise AssertionError("the text of a refused request was encoded")

    monkeypatch.setattr(Tokenizer, "encode", encoded)
    async with serving(scheduler__max_running=1, scheduler__max_queue=0) as served:
        served.ranks.hold()
        call = await waiting(served, "a")
        error = await failure(served.client.generate("text"))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert int(trailers(error)["grpc-retry-pushback-ms"]) >= 1000
        assert served.heard.refused == ["RESOURCE_EXHAUSTED"]
        served.ranks.release()
        await rest(call)


async def test_higher_priority_takes_the_last_place_in_a_full_queue() -> None:
    async with serving(scheduler__max_running=1, scheduler__max_queue=3) as served:
        served.ranks.hold()
        runs = await waiting(served, "runs", priority=-5)
        served.ranks.step()
        calls = [await waiting(served, name, priority=p) for name, p in (("b", 1), ("c", 0), ("d", 0))]
        error = await failure(served.client.generate([1], priority=0))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        urgent = await waiting(served, "urgent", priority=2)
        error = await failure(calls[2])
        assert error.code() is Code.RESOURCE_EXHAUSTED and "higher priority" in error.details()
        assert int(trailers(error)["grpc-retry-pushback-ms"]) >= 50
        again = await waiting(served, "again", priority=2)
        assert (await failure(calls[1])).code() is Code.RESOURCE_EXHAUSTED
        served.ranks.release()
        for call in (runs, calls[0], urgent, again):
            assert (await rest(call))[-1].HasField("finished")
        await served.idle()


async def test_what_runs_is_not_displaced() -> None:
    async with serving(scheduler__max_running=2, scheduler__max_queue=0) as served:
        served.ranks.hold()
        calls = [await waiting(served, name) for name in ("a", "b")]
        served.ranks.step()
        error = await failure(served.client.generate([1], priority=9))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        served.ranks.release()
        for call in calls:
            await rest(call)


async def test_a_deadline_that_the_queue_would_miss_is_refused() -> None:
    async with serving(scheduler__max_running=1) as served:
        for tick in range(50):
            served.server.engine._admission.pace.ended(20.0 * tick, left=1)
        served.ranks.hold()
        calls = [await waiting(served, name) for name in ("a", "b")]
        error = await failure(served.client.generate([1], deadline_ms=30_000))
        assert error.code() is Code.RESOURCE_EXHAUSTED and "its deadline is in" in error.details()
        assert 10_000 <= int(trailers(error)["grpc-retry-pushback-ms"]) <= 22_000
        calls.append(await waiting(served, "c", deadline_ms=1_200_000))
        served.ranks.release()
        for call in calls:
            await rest(call)


async def test_a_deadline_that_passes_in_the_queue_costs_no_step() -> None:
    async with serving(one_at_a_time(), scheduler__max_running=1) as served:
        served.ranks.hold()
        runs = await waiting(served, "runs")
        served.ranks.step()
        while served.heard.admitted == 1:  # again if it passed on the way
            late = served.client.generate([1], request_id="late", max_new_tokens=2, deadline_ms=20)
            assert (await failure(late)).code() is Code.DEADLINE_EXCEEDED
        served.ranks.release()
        await rest(runs)
        await served.idle()
        drawn = {request.request_id: served.ranks._drawn[n] for n, request in served.ranks.requests.items()}
        assert drawn == {"runs": 2, "late": 0}


async def test_the_pace_is_learned_from_requests_that_ran() -> None:
    async with serving(one_at_a_time(), scheduler__max_running=1) as served:
        served.ranks.hold()
        calls = [await waiting(served, str(number), deadline_ms=60_000) for number in range(20)]
        for call in calls[15:]:  # they leave the queue, and say nothing about how fast requests run
            call.cancel()
        await served.until(lambda: served.server.engine.statistics().open_streams == 15)
        served.ranks.release()
        for call in calls[:15]:
            await rest(call)
        await served.idle()
        pace = served.server.engine._admission.pace
        assert pace._count == 14 and pace.gap is not None and pace.gap > 0
        assert 0 < pace.service(1) < pace.service(None)

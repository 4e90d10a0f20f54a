"""What the metadata of a call does: rank, priority, and a trace that ends up in the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ep_server.client import generate_request
from ep_server.testing.fake_ranks import FakeRanks
from tests.support.frontend import Code, Served, failure, next_event, rest, serving, trailers

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def call(served: Served, *metadata: tuple[str, str], **fields: Any) -> Any:
    request = generate_request([1], **{"max_new_tokens": 2, **fields})
    return served.client.decode.Generate(request, metadata=metadata)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log lines of requests."""
    return [
        record.getMessage() for record in caplog.records if record.name == "ep_server.engine.active_request"
    ]


async def test_rank_and_priority_reach_the_rank() -> None:
    async with serving(FakeRanks(3)) as served:
        events = await rest(call(served, ("x-data-parallel-rank", "2"), ("x-priority", "-7")))
        assert events[0].prompt_info.rank == 2
        await rest(call(served, ("x-data-parallel-rank", "1"), ("x-priority", "5"), dp_rank=1, priority=5))
        await rest(call(served, priority=4))
        requests = list(served.ranks.requests.values())
        assert [request.priority for request in requests] == [-7, 5, 4]
        assert [request.dp_rank for request in requests][:2] == [2, 1]


@pytest.mark.parametrize(
    "key, value, fields, allowed",
    [
        ("x-data-parallel-rank", "2", {}, "0 to 1"),
        ("x-data-parallel-rank", "-1", {}, "a whole number, 0 to 4294967295"),
        ("x-data-parallel-rank", "one", {}, "a whole number, 0 to 4294967295"),
        ("x-data-parallel-rank", "", {}, "a whole number, 0 to 4294967295"),
        ("x-data-parallel-rank", "9" * 5000, {}, "a whole number, 0 to 4294967295"),
        ("x-data-parallel-rank", "1", {"dp_rank": 0}, "absent or 0, which the message gives"),
        ("x-priority", "2147483648", {}, "a whole number, -2147483648 to 2147483647"),
        ("x-priority", "1", {"priority": 2}, "absent or 2, which the message gives"),
    ],
)
async def test_bad_metadata_is_named(key: str, value: str, fields: dict[str, int], allowed: str) -> None:
    async with serving(FakeRanks(2)) as served:
        error = await failure(call(served, (key, value), **fields))
        assert error.code() is Code.INVALID_ARGUMENT
        assert (error.details() or "").startswith(f"{key} = ")
        assert (error.details() or "").endswith(allowed)
        assert trailers(error)["epserver-field"] == key
        assert served.ranks.requests == {} and served.heard.refused == ["INVALID_ARGUMENT"]


async def test_a_trace_is_in_the_log_line_of_its_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ep_server.engine.active_request"):
        async with serving() as served:
            await rest(call(served, ("traceparent", TRACE), request_id="traced"))
            await rest(call(served, request_id="plain"))
    (line,) = lines(caplog)
    assert line.startswith("request traced: OK length, 1 prompt and 2 output tokens in ")
    assert line.endswith(f" s, rank 0, traceparent {TRACE}")


@pytest.mark.parametrize(
    "trace",
    [
        TRACE.upper(),
        TRACE.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        TRACE.replace("00f067aa0ba902b7", "0" * 16),
        "ff" + TRACE[2:],
        TRACE + "-more",
        TRACE[:-1],
        "x",
    ],
)
async def test_a_malformed_trace_counts_as_absent(trace: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "ep_server.engine.active_request"):
        async with serving() as served:
            await rest(call(served, ("traceparent", trace)))
    (line,) = lines(caplog)
    assert line.endswith("traceparent -")


async def test_a_later_version_of_traceparent_may_have_more(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ep_server.engine.active_request"):
        async with serving() as served:
            await rest(call(served, ("traceparent", f"01{TRACE[2:]}-more")))
    (line,) = lines(caplog)
    assert line.endswith(f"traceparent 01{TRACE[2:]}-more")


async def test_failed_and_refused_requests_leave_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ep_server"):
        async with serving(FakeRanks(2), parallel__ranks=2) as served:
            served.ranks.hold()
            failing = call(served, ("traceparent", TRACE), request_id="failing")
            await next_event(failing)
            number, request = next(iter(served.ranks.requests.items()))
            served.ranks.fail(number, "broken")
            await failure(failing)
            await failure(call(served, ("x-priority", "high"), request_id="refused"))
    found = [record for record in caplog.records if hasattr(record, "fields")]
    failed, refused = (dict(record.fields) for record in found)
    assert all(record.levelno == logging.INFO for record in found)
    assert failed == {
        "request_id": "failing",
        "trace_id": TRACE.split("-")[1],
        "status": "INTERNAL",
        "node": 0,
        "rank": request.dp_rank,
        "tokens": 0,
    }
    assert refused == {"request_id": "refused", "status": "INVALID_ARGUMENT"}
    assert "broken" in found[0].getMessage() and "x-priority" in found[1].getMessage()

"""More calls than the server can take: each one gets a status of the server and is counted."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from ep_server.frontend.service import GENERATE
from ep_server.v1 import decode_pb2 as pb
from tests.support.frontend import WAIT, Code, Served, failure, next_event, serving

BURST = 3500  # gRPC itself holds at most 3000 calls that no one has accepted
REQUEST = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), stopping=pb.Stopping(max_new_tokens=1))


def burst(address: str, count: int, sent: threading.Event) -> Counter[str]:
    """Calls Generate at once, so often, on one connection. Returns: how many ended with which status."""
    codes: Counter[str] = Counter()
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        grpc.channel_ready_future(channel).result(WAIT)
        call = channel.unary_stream(GENERATE)
        calls = [call(REQUEST.SerializeToString(), timeout=4 * WAIT) for _ in range(count)]
        sent.set()
        for one in calls:
            codes[one.code().name] += 1
    return codes


async def blocked_burst(served: Served, count: int) -> Counter[str]:
    """A burst that arrives while the event loop of the server does nothing."""
    sent = threading.Event()
    ended = asyncio.create_task(asyncio.to_thread(burst, served.server.address, count, sent))
    while not sent.is_set():
        await asyncio.sleep(0)
        time.sleep(0.5)
    time.sleep(1.0)  # the last of them are on their way
    return await ended


async def test_every_call_of_a_burst_gets_a_status_of_ours() -> None:
    async with serving(scheduler__max_running=1, scheduler__max_queue=0) as served:
        served.ranks.hold()
        running = served.client.generate([1], max_new_tokens=1)
        await next_event(running)
        codes = await blocked_burst(served, BURST)
        assert codes == {"RESOURCE_EXHAUSTED": BURST}
        assert Counter(served.heard.refused) == codes
        served.ranks.release()
        await served.idle()


async def test_calls_refused_unread_are_counted(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    known = [("authorization", "Bearer secret")]
    async with serving(grpc__token_file=str(tmp_path / "tokens"), grpc__max_message_bytes=2048) as served:
        call = served.client.channel.unary_stream(GENERATE)
        for data, metadata, code in (
            (b"", [], Code.UNAUTHENTICATED),
            (b"\xff", known, Code.INVALID_ARGUMENT),
            (bytes(2049), known, Code.RESOURCE_EXHAUSTED),
            (b"", known, Code.INVALID_ARGUMENT),
        ):
            assert (await failure(call(data, metadata=metadata))).code() is code
        assert served.heard.refused == [
            "UNAUTHENTICATED",
            "INVALID_ARGUMENT",
            "RESOURCE_EXHAUSTED",
            "INVALID_ARGUMENT",
        ]
        assert (await failure(call(bytes(8192), metadata=known))).code() is Code.RESOURCE_EXHAUSTED
        # gRPC itself refuses more than twice the limit; to the server the caller has left.
        await served.until(lambda: served.heard.refused[4:] == ["CANCELLED"])


@dataclass
class Turns:
    """Of the thread that calls and of the loop that serves."""

    connected: threading.Event = field(default_factory=threading.Event)
    blocked: threading.Event = field(default_factory=threading.Event)  # the loop accepts nothing from here
    sent: threading.Event = field(default_factory=threading.Event)


def generated(address: str, turns: Turns, fields: dict[str, int], **options: float) -> str:
    """The status of one call of Generate that is sent while the event loop of the server does nothing."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        grpc.channel_ready_future(channel).result(WAIT)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[1]), stopping=pb.Stopping(max_new_tokens=1), **fields
        )
        turns.connected.set()
        turns.blocked.wait(WAIT)
        call = channel.unary_stream(GENERATE)(request.SerializeToString(), **options)
        turns.sent.set()
        with suppress(grpc.RpcError):
            list(call)
        return str(call.code().name)


@pytest.mark.parametrize(
    ("fields", "options", "status"),
    [
        ({"deadline_ms": 1000}, {}, "DEADLINE_EXCEEDED"),
        ({}, {"timeout": 1.0}, "DEADLINE_EXCEEDED"),
        ({"deadline_ms": 60_000}, {"timeout": WAIT}, "OK"),
    ],
    ids=["in the message", "of the call", "long enough"],
)
async def test_waiting_to_be_accepted_counts_against_deadlines(
    fields: dict[str, int], options: dict[str, float], status: str
) -> None:
    async with serving() as served:
        await served.until(lambda: bool(served.heard.accept_waits))  # probes run
        turns = Turns()
        call = asyncio.create_task(
            asyncio.to_thread(generated, served.server.address, turns, fields, **options)
        )
        await served.until(turns.connected.is_set)
        turns.blocked.set()
        assert turns.sent.wait(WAIT)
        time.sleep(3.0)  # nor does the server, in this loop, accept any
        assert await call == status
        await served.until(lambda: max(served.heard.accept_waits) > 1.5)
        if status != "OK":
            await served.until(lambda: served.heard.refused == [status])
            assert served.heard.admitted == 0


async def test_a_probe_takes_the_secret_of_the_server() -> None:
    """Others that name themselves probes are calls like any other."""
    async with serving() as served:
        call = served.client.channel.unary_stream(GENERATE)
        error = await failure(call(b"", metadata=[("epserver-probe", "0-1")]))
        assert error.code() is Code.INVALID_ARGUMENT


async def test_without_a_place_for_probes_calls_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    async with serving() as served:
        assert (await served.client.complete([1], max_new_tokens=1)).token_ids == [2]
    assert "cannot measure how long" in caplog.text

"""Streams that finished and that nobody reads: counted, seen, found by Abort, and ended in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from ep_server.v1 import decode_pb2 as pb
from ep_server.v1.decode_pb2_grpc import DecodeStub
from tests.support.frontend import NO_TOKENIZER, WAIT, Code, Served, failure, rest, serving, trailers

LONG = 2000  # tokens, with logprobs: more than HTTP/2 lets through before the caller reads
OPTIONS = [("grpc.http2.bdp_probe", 0)]  # else gRPC widens the window of a fast link


@asynccontextmanager
async def calling(**values: Any) -> AsyncIterator[tuple[Served, DecodeStub]]:
    """A server and a client of it whose transport reads no more than it must."""
    async with (
        serving(model=NO_TOKENIZER, **values) as served,
        aio.insecure_channel(served.server.address, options=OPTIONS) as channel,
    ):
        yield served, DecodeStub(channel)


@asynccontextmanager
async def unread(count: int, **values: Any) -> AsyncIterator[tuple[Served, DecodeStub, list[Any]]]:
    """A server, a client of it, and calls that are finished and whose messages nobody read."""
    async with calling(**values) as (served, stub):
        served.ranks.hold()
        calls = [stub.Generate(long_request(str(number))) for number in range(count)]
        await served.until(lambda: served.heard.admitted == count)
        served.ranks.step(LONG)
        served.ranks.release()
        assert [summary.status for summary in served.heard.finished] == ["OK"] * count
        yield served, stub, calls


def long_request(request_id: str = "") -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        token_ids=pb.TokenIds(ids=[1]),
        stopping=pb.Stopping(max_new_tokens=LONG, ignore_eos=True),
        response=pb.ResponseOptions(output_logprobs=True, top_n=20),
    )


async def test_unread_streams_count_against_max_streams() -> None:
    async with unread(3, grpc__max_streams=3) as (served, stub, calls):
        assert (served.heard.load, served.heard.unread) == ((0, 0), 3)
        counts = served.server.engine.statistics()
        assert (counts.in_flight, counts.open_streams) == (0, 3)
        error = await failure(stub.Generate(long_request()))
        assert error.code() is Code.RESOURCE_EXHAUSTED and "grpc.max_streams = 3" in error.details()
        events = await rest(calls[0])  # read late, but whole
        assert sum(len(event.tokens.token_ids) for event in events) == LONG
        assert events[-1].HasField("finished")
        await served.until(lambda: served.heard.unread == 2)
        assert (await rest(stub.Generate(long_request())))[-1].HasField("finished")
        assert served.heard.unread_ended == 0


async def test_an_unread_stream_ends_at_its_deadline() -> None:
    async with unread(2, grpc__unread_seconds=0.2) as (served, _, calls):
        await served.until(lambda: served.server.engine.statistics().open_streams == 0)
        assert (served.heard.unread, served.heard.unread_ended) == (0, 2)
        for call in calls:
            error = await failure(call)
            assert error.code() is Code.RESOURCE_EXHAUSTED and "grpc.unread_seconds = 0.2" in error.details()
            assert trailers(error)["epserver-error"] == "SlowReader"


async def test_a_running_request_ends_when_nobody_reads() -> None:
    async with calling(grpc__unread_seconds=0.2, grpc__stream_buffer=65536) as (served, stub):
        request = long_request()
        request.stopping.max_new_tokens = 60_000
        call = stub.Generate(request)
        await served.until(lambda: bool(served.heard.finished))
        ended = served.heard.finished[0]
        assert (ended.status, ended.reason) == ("RESOURCE_EXHAUSTED", "slow_reader")
        assert (await failure(call)).code() is Code.RESOURCE_EXHAUSTED
        await served.idle()


async def test_abort_finds_unread_requests() -> None:
    async with unread(2) as (served, _, calls):
        answer = await served.client.abort("1", "2")
        assert (list(answer.aborted), list(answer.unknown)) == (["1"], ["2"])
        await served.until(lambda: served.heard.unread == 1)
        assert served.heard.unread_ended == 1
        error = await failure(calls[1])
        assert error.code() is Code.CANCELLED and "'1' was aborted" in error.details()
        assert list((await served.client.abort("1")).unknown) == ["1"]


@pytest.mark.parametrize("sequences", [1, 3])
async def test_a_drain_waits_for_unread_streams_no_longer(sequences: int) -> None:
    async with calling(grpc__unread_seconds=0.2) as (served, stub):
        request = long_request()
        request.sampling.num_sequences = sequences
        served.ranks.hold()
        call = stub.Generate(request)
        await served.until(lambda: served.heard.admitted == sequences)
        served.ranks.step(LONG)
        async with asyncio.timeout(WAIT):
            assert await served.server.engine.drain(2 * WAIT)
        assert (await failure(call)).code() is Code.RESOURCE_EXHAUSTED

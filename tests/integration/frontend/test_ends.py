"""Every way a stream can end but well: statuses, trailers, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc import aio

from ep_server.config import Config
from ep_server.errors import DeadlineExceeded, StartupError
from ep_server.frontend.interceptors import ErrorInterceptor
from ep_server.frontend.server import Server
from ep_server.records import Request
from ep_server.testing.fake_ranks import LIMITS, FakeRanks, scripted
from ep_server.text.detokenizer import OutputText
from ep_server.text.tokenizer import Tokenizer
from ep_server.v1 import decode_pb2 as pb
from tests.support.frontend import (
    MODEL,
    NO_TOKENIZER,
    WAIT,
    Code,
    Recorder,
    failure,
    logged,
    next_event,
    rest,
    serving,
    trailers,
)


class Over:
    """The context of a call that ends as it is aborted, which gRPC reports like this."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def abort(self, *status: Any) -> None:
        with suppress(aio.AbortError):
            await self._context.abort(*status)
        raise aio.InternalError("Failed 'execute_batch'")


class EndsAtAbort(aio.ServerInterceptor):
    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)

        async def unary(request: bytes, context: Any) -> Any:
            return await handler.unary_unary(request, Over(context))

        async def stream(request: bytes, context: Any) -> AsyncIterator[Any]:
            async for response in handler.unary_stream(request, Over(context)):
                yield response

        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)


async def test_an_error_as_the_caller_leaves_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    async def unary(request: bytes, context: object) -> bytes:
        raise DeadlineExceeded("late")

    async def stream(request: bytes, context: object) -> AsyncIterator[bytes]:
        yield b"first"
        raise DeadlineExceeded("late")

    server = aio.server(interceptors=[EndsAtAbort(), ErrorInterceptor()])
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("late", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for call in (channel.unary_unary("/late/Unary"), channel.unary_stream("/late/Stream")):
            assert (await failure(call(b"", timeout=WAIT))).details() == "late"
    await server.stop(None)
    assert logged(caplog, logging.WARNING) == []


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.1}, "sampling.temperature", "at least 0, finite"),
    ({"temperature": math.nan}, "sampling.temperature", "finite"),
    ({"temperature": math.inf}, "sampling.temperature", "finite"),
    ({"top_p": 0.0}, "sampling.top_p", "above 0, at most 1"),
    ({"top_p": 1.01}, "sampling.top_p", "above 0, at most 1"),
    ({"top_p": math.nan}, "sampling.top_p", "above 0, at most 1"),
    ({"min_p": 1.5}, "sampling.min_p", "at least 0, at most 1"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty", "at least 0.01, at most 100"),
    ({"repetition_penalty": 1e38}, "sampling.repetition_penalty", "at least 0.01, at most 100"),
    ({"presence_penalty": 2.5}, "sampling.presence_penalty", "at least -2, at most 2"),
    ({"frequency_penalty": -3.0}, "sampling.frequency_penalty", "at least -2, at most 2"),
    ({"logit_bias": {257: 1.0}}, "sampling.logit_bias", "ids 0 to 256"),
    ({"logit_bias": {1: 101.0}}, "sampling.logit_bias[1]", "-100 to 100"),
    ({"logit_bias": {1: math.nan}}, "sampling.logit_bias[1]", "-100 to 100"),
    ({"allowed_token_ids": [1, 257]}, "sampling.allowed_token_ids", "0 to 256"),
    ({"allowed_token_ids": [1] * 258}, "sampling.allowed_token_ids", "at most 257 ids"),
    (
        {"allowed_token_ids": [3, 9], "stop_token_ids": [3, 9, 4], "min_new_tokens": 1, "max_new_tokens": 2},
        "stopping.min_new_tokens",
        "0 where every token that may be drawn ends the output",
    ),
    ({"top_n": 1}, "response.top_n", "0 unless output_logprobs is set"),
    ({"output_logprobs": True, "top_n": 21}, "response.top_n", "0 to 20"),
    ({"max_new_tokens": 0}, "stopping.max_new_tokens", "at least 1"),
    ({"max_new_tokens": 2, "min_new_tokens": 3}, "stopping.min_new_tokens", "0 to max_new_tokens = 2"),
    ({"stop_token_ids": [257]}, "stopping.stop_token_ids", "0 to 256"),
    ({"stop_token_ids": [1] * 65}, "stopping.stop_token_ids", "at most 64 ids"),
    ({"stop_strings": [""]}, "stopping.stop_strings", "1 to 256 characters"),
    ({"stop_strings": ["x" * 257]}, "stopping.stop_strings", "1 to 256 characters"),
    ({"stop_strings": ["x"] * 17}, "stopping.stop_strings", "at most 16 strings"),
    ({"stream_interval": 0}, "response.stream_interval", "1 to 1024"),
    ({"stream_interval": 1025}, "response.stream_interval", "1 to 1024"),
    ({"deadline_ms": 0}, "deadline_ms", "1 to 86400000"),
    ({"dp_rank": 1}, "dp_rank", "0 to 0"),
    ({"request_id": "a b"}, "request_id", "1 to 128 printable ASCII characters without spaces"),
    ({"request_id": "x" * 129}, "request_id", "1 to 128 printable ASCII characters without spaces"),
    ({"cache_salt": "x" * 257}, "cache_salt", "at most 256 characters"),
]


@pytest.mark.parametrize("payload", [b"\xff" * 5, b"\x0a\x02\xff\xfe"], ids=["no message", "no UTF-8"])
async def test_bytes_that_are_no_message(payload: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served:
        channel = served.client.channel
        for method, kind in (("Decode/Generate", "unary_stream"), ("Control/Abort", "unary_unary")):
            error = await failure(getattr(channel, kind)(f"/ep_server.v1.{method}")(payload))
            assert error.code() is Code.INVALID_ARGUMENT
            size = f"'{len(payload)} bytes'"
            assert error.details() == f"request = {size}: must be a message of the method's type"
        assert logged(caplog, logging.ERROR) == []


class RefusingRanks(FakeRanks):
    def submit(self, rank: int, request: Request) -> None:
        raise ValueError("a request that cannot be sent")


async def test_a_request_that_no_rank_was_given_leaves_nothing() -> None:
    async with serving(RefusingRanks()) as served:
        for _ in range(2):
            error = await failure(served.client.complete([1], max_new_tokens=2, request_id="same"))
            assert error.code() is Code.INTERNAL
        loads = await served.client.loads()
        assert (loads.in_flight, loads.waiting) == (0, 0)
        await served.idle()


@pytest.mark.parametrize("fields, name, allowed", BAD_FIELDS, ids=lambda value: str(value)[:40])
async def test_a_bad_field_is_named_with_value_and_range(
    fields: dict[str, Any], name: str, allowed: str
) -> None:
    async with serving() as served:
        error = await failure(served.client.generate([1], **fields))
        assert error.code() is Code.INVALID_ARGUMENT
        assert error.details().startswith(f"{name} = ") and error.details().endswith(allowed)
        assert trailers(error)["epserver-error"] == "InvalidArgument"
        assert trailers(error)["epserver-field"] == name
        assert served.ranks.requests == {}
        assert served.heard.refused == ["INVALID_ARGUMENT"]


async def test_bad_prompts() -> None:
    async with serving() as served:
        generate = served.client.decode.Generate
        for request, field in [
            (pb.GenerateRequest(), "prompt"),
            (pb.GenerateRequest(text=""), "text"),
            (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids.ids"),
            (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 257])), "token_ids.ids[1]"),
        ]:
            error = await failure(generate(request))
            assert error.code() is Code.INVALID_ARGUMENT
            assert trailers(error)["epserver-field"] == field


async def test_text_needs_a_tokenizer() -> None:
    async with serving(model=NO_TOKENIZER) as served:
        for call, field in [
            (served.client.generate("hi"), "text"),
            (served.client.generate([1], stop_strings=["x"]), "stopping.stop_strings"),
            (served.client.generate([1], output_text=True), "response.output_text"),
        ]:
            error = await failure(call)
            assert error.code() is Code.INVALID_ARGUMENT
            assert trailers(error)["epserver-field"] == field
            assert "no tokenizer" in error.details()


async def test_too_long_for_the_context() -> None:
    async with serving() as served:
        error = await failure(served.client.generate([1] * 10, max_new_tokens=65527))
        assert error.code() is Code.OUT_OF_RANGE
        assert "65536" in error.details() and "65527" in error.details()
        ok = await failure(served.client.generate([1] * 70000))
        assert ok.code() is Code.OUT_OF_RANGE


async def test_a_text_that_cannot_fit_is_not_even_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(MODEL.tokenizer), "encode", None)
    async with serving(model=dataclasses.replace(MODEL, max_context=32)) as served:
        error = await failure(served.client.generate("x" * (32 * 64 + 1)))
        assert error.code() is Code.OUT_OF_RANGE
        assert "2049 bytes: at most 2048" in error.details()


async def test_too_long_for_the_kv_cache_of_a_rank() -> None:
    import dataclasses

    async with serving(FakeRanks(limits=dataclasses.replace(LIMITS, kv_blocks=4))) as served:
        error = await failure(served.client.generate([1], max_new_tokens=64))
        assert error.code() is Code.OUT_OF_RANGE and "64" in error.details()
        assert (await served.client.server_info()).max_context == 64
        output = await served.client.complete([1], max_new_tokens=63)
        assert len(output.token_ids) == 63


async def test_an_unknown_method() -> None:
    async with serving(grpc__token_file="") as served:
        call = served.client.channel.unary_unary("/ep_server.v1.Decode/Other")
        assert (await failure(call(b""))).code() is Code.UNIMPLEMENTED


async def test_an_unknown_model() -> None:
    async with serving() as served:
        error = await failure(served.client.generate([1], model="other"))
        assert error.code() is Code.NOT_FOUND and "'fake'" in error.details()
        assert (await served.client.complete([1], model="fake", max_new_tokens=1)).token_ids == [2]


async def test_a_duplicate_id_until_the_first_one_ends() -> None:
    async with serving() as served:
        served.ranks.hold()
        first = served.client.generate([1], request_id="same", max_new_tokens=2)
        await next_event(first)
        error = await failure(served.client.generate([1], request_id="same"))
        assert error.code() is Code.ALREADY_EXISTS and "'same'" in error.details()
        served.ranks.release()
        await rest(first)
        assert (await served.client.complete([1], request_id="same", max_new_tokens=1)).finished


async def test_a_message_too_large() -> None:
    async with serving(grpc__max_message_bytes=2048) as served:
        error = await failure(served.client.generate("x" * 4096))
        assert error.code() is Code.RESOURCE_EXHAUSTED


async def test_a_full_queue_pushes_back() -> None:
    async with serving(scheduler__max_running=2, scheduler__max_queue=1) as served:
        served.ranks.hold()
        calls = [served.client.generate([n], max_new_tokens=2) for n in range(3)]
        for call in calls:
            await next_event(call)
        error = await failure(served.client.generate([9]))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "scheduler.max_queue = 1" in error.details()
        assert 50 <= int(trailers(error)["grpc-retry-pushback-ms"]) <= 10_000
        served.ranks.release()
        for call in calls:
            assert (await rest(call))[-1].HasField("finished")
        assert (await served.client.complete([9], max_new_tokens=1)).token_ids == [10]
        assert served.heard.refused == ["RESOURCE_EXHAUSTED"]


async def test_requested_rank_full_and_not_full() -> None:
    async with serving(FakeRanks(2), scheduler__max_running=1, scheduler__max_queue=0) as served:
        served.ranks.hold()
        first = served.client.generate([1], dp_rank=1)
        await next_event(first)
        error = await failure(served.client.generate([1], dp_rank=1))
        assert error.code() is Code.RESOURCE_EXHAUSTED and "requested rank" in error.details()
        second = served.client.generate([1])
        assert (await next_event(second)).prompt_info.rank == 0


async def test_the_limit_of_streams() -> None:
    async with serving(grpc__max_streams=1) as served:
        served.ranks.hold()
        await next_event(served.client.generate([1]))
        error = await failure(served.client.generate([1]))
        assert error.code() is Code.RESOURCE_EXHAUSTED and "grpc.max_streams = 1" in error.details()


async def test_dropped_stream_frees_its_blocks_at_step_end() -> None:
    async with serving() as served:
        served.ranks.hold()
        call = served.client.generate([1])
        await next_event(call)
        served.ranks.step()
        await next_event(call)
        call.cancel()
        await served.until(lambda: served.server.engine.statistics().releasing == 1)
        assert served.ranks.cancelled == [1]
        served.ranks.step()
        assert served.server.engine.statistics().in_flight == 0
        served.ranks.check_integrity(idle=True)
        (summary,) = served.heard.finished
        assert summary.status == "CANCELLED" and len(served.heard.freed) == 1


async def test_a_stream_dropped_before_its_first_token() -> None:
    async with serving() as served:
        served.ranks.hold()
        call = served.client.generate([1])
        await next_event(call)
        call.cancel()
        await served.until(lambda: served.ranks.cancelled == [1])
        served.ranks.release()
        await served.idle()
        served.ranks.check_integrity(idle=True)


async def test_a_client_that_goes_away_cancels_its_streams() -> None:
    async with serving() as served:
        served.ranks.hold()
        for n in range(5):
            await next_event(served.client.generate([n]))
        await served.client.close()
        await served.until(lambda: len(served.ranks.cancelled) == 5)
        served.ranks.release()
        await served.idle()
        served.ranks.check_integrity(idle=True)


async def test_abort() -> None:
    async with serving() as served:
        served.ranks.hold()
        call = served.client.generate([1], request_id="a")
        await next_event(call)
        served.ranks.step()
        answer = await served.client.abort("a", "b", "a")
        assert (list(answer.aborted), list(answer.unknown)) == (["a"], ["b"])
        assert list((await next_event(call)).tokens.token_ids) == [2]  # drawn before: delivered
        error = await failure(call)
        assert error.code() is Code.CANCELLED and "'a' was aborted" in error.details()
        again = await served.client.abort("a")
        assert list(again.unknown) == ["a"]
        served.ranks.step()
        assert served.server.engine.statistics().in_flight == 0


async def test_a_token_and_an_end_that_cross_a_cancel_are_dropped() -> None:
    """The rank ends a request by itself in the step in which the front cancels it."""
    async with serving() as served:
        served.ranks.hold()
        call = served.client.generate([1], max_new_tokens=1, request_id="a")
        await next_event(call)
        scheduler = served.ranks._schedulers[0]
        batch = scheduler.plan()
        events = scheduler.commit(batch, served.ranks._sample(batch))  # finished, not yet reported
        await served.client.abort("a")
        served.server.engine._delivery.on_tokens(0, events)
        assert served.server.engine.statistics().in_flight == 0
        assert (await failure(call)).code() is Code.CANCELLED


async def test_the_deadline_of_the_request() -> None:
    async with serving() as served:
        served.ranks.hold()
        while not served.heard.admitted:  # again if it passed on the way
            error = await failure(served.client.generate([1], deadline_ms=200))
            assert error.code() is Code.DEADLINE_EXCEEDED
            assert trailers(error)["epserver-error"] == "DeadlineExceeded"
        served.ranks.release()
        await served.idle()
        assert [summary.status for summary in served.heard.finished] == ["DEADLINE_EXCEEDED"]


async def test_a_deadline_counts_from_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding the text takes longer than the request may last."""
    encode = Tokenizer.encode

    def slow(tokenizer: Tokenizer, text: str) -> list[int]:
        time.sleep(0.02)  # longer than the deadline, whatever else the machine does
        return encode(tokenizer, text)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    async with serving() as served:
        error = await failure(served.client.generate("x", deadline_ms=10))
        assert error.code() is Code.DEADLINE_EXCEEDED
        assert served.ranks.requests == {}


async def test_the_deadline_of_the_call() -> None:
    async with serving() as served:
        served.ranks.hold()
        ends = list[str]()
        while (
            "DEADLINE_EXCEEDED" not in ends
        ):  # again if it was not admitted, or the caller's clock was first
            error = await failure(served.client.generate([1], timeout=0.2, deadline_ms=60_000))
            assert error.code() is Code.DEADLINE_EXCEEDED
            await served.until(lambda: len(served.heard.finished) == served.heard.admitted)
            ends = [summary.status for summary in served.heard.finished]
        served.ranks.release()
        await served.idle()
        assert set(ends) <= {"DEADLINE_EXCEEDED", "CANCELLED"}
        served.ranks.check_integrity(idle=True)


async def test_a_slow_reader_is_cancelled() -> None:
    async with serving(grpc__stream_buffer=16) as served:
        served.ranks.hold()
        call = served.client.generate([1], max_new_tokens=100)
        await next_event(call)
        served.ranks.step(18)  # the reader, in the same event loop, had no chance to read
        assert served.ranks.cancelled == [1]
        events = []
        error = None
        try:
            while True:
                events.append(await next_event(call))
        except grpc.aio.AioRpcError as caught:
            error = caught
        assert error.code() is Code.RESOURCE_EXHAUSTED and "grpc.stream_buffer" in error.details()
        assert trailers(error)["epserver-error"] == "SlowReader"
        assert sum(len(event.tokens.token_ids) for event in events) == 16
        served.ranks.step()
        assert served.server.engine.statistics().in_flight == 0


async def test_a_reader_that_stops_reading_is_cancelled() -> None:
    """Flow control of HTTP/2 fills up; the tokens then wait in the stream until it is full."""
    async with serving(grpc__stream_buffer=64, model=NO_TOKENIZER) as served:
        call = served.client.generate([1], output_logprobs=True, top_n=20)
        await next_event(call)
        await served.until(lambda: served.heard.finished != [])
        assert served.heard.finished[0].status == "RESOURCE_EXHAUSTED"
        assert (await failure(call)).code() is Code.RESOURCE_EXHAUSTED


async def test_a_request_that_a_rank_cannot_run() -> None:
    async with serving() as served:
        served.ranks.hold()
        call = served.client.generate([1])
        await next_event(call)
        served.ranks.fail(1, "no such thing")
        error = await failure(call)
        assert error.code() is Code.INTERNAL and error.details() == "rank 0: no such thing"
        assert served.server.engine.statistics().in_flight == 0


async def test_a_bug_is_internal_and_does_not_tell_its_secrets(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served:

        def broken(*_: Any) -> Any:
            raise ZeroDivisionError("secret")

        served.server.engine.submit = broken  # type: ignore[method-assign]
        error = await failure(served.client.generate([1]))
        assert error.code() is Code.INTERNAL and "secret" not in error.details()
        assert "ZeroDivisionError: secret" in caplog.text


async def test_text_fault_ends_only_its_own_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    push = OutputText.push

    def broken(text: OutputText, token_id: int) -> tuple[str, str | None]:
        if token_id == 7:
            raise RuntimeError("secret")
        return push(text, token_id)

    monkeypatch.setattr(OutputText, "push", broken)
    async with serving() as served:  # FakeRanks count on from the last prompt token
        served.ranks.hold()
        bad, good = (served.client.generate([last], max_new_tokens=4) for last in (4, 20))
        await next_event(bad), await next_event(good)
        served.ranks.release()
        error = await failure(bad)
        assert error.code() is Code.INTERNAL and "token 7" in error.details()
        assert "secret" not in error.details() and "secret" in caplog.text
        assert [t for e in await rest(good) for t in e.tokens.token_ids] == [21, 22, 23, 24]


async def test_a_lost_rank_ends_every_stream() -> None:
    async with serving(FakeRanks(2)) as served:
        served.ranks.hold()
        calls = [served.client.generate([n]) for n in range(4)]
        for call in calls:
            await next_event(call)
        served.ranks.kill(1, "exit code -9")
        for call in calls:
            error = await failure(call)
            assert error.code() is Code.UNAVAILABLE
            assert error.details() == "rank 1 was lost: exit code -9"
        error = await failure(served.client.generate([1]))
        assert error.code() is Code.UNAVAILABLE and "rank 1 was lost" in error.details()
        assert served.heard.lost == [1]
        assert served.server.engine.statistics().in_flight == 0
        assert served.ranks.cancelled == []  # nothing is asked of a dead group


async def test_before_and_after_serving() -> None:
    ranks = FakeRanks()
    ranks.start_gate = asyncio.Event()
    config = Config.from_values({"grpc.port": 0})
    server = Server(config, MODEL, ranks, Recorder())
    starting = asyncio.ensure_future(server.start(lambda *_: None))
    try:
        async with asyncio.timeout(WAIT):
            while not server.address:
                await asyncio.sleep(0)
        async with grpc.aio.insecure_channel(server.address) as channel:
            from ep_server.v1.decode_pb2_grpc import DecodeStub

            stub = DecodeStub(channel)
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))
            error = await failure(stub.Generate(request, wait_for_ready=True))
            assert error.code() is Code.UNAVAILABLE and "starting" in error.details()
            ranks.start_gate.set()
            await starting
            ranks.hold()
            call = stub.Generate(request)
            await next_event(call)
            drained = asyncio.ensure_future(server.engine.drain(WAIT))
            async with asyncio.timeout(WAIT):
                while server.engine.state != "draining":
                    await asyncio.sleep(0)
            error = await failure(stub.Generate(request))
            assert error.code() is Code.UNAVAILABLE and "shutting down" in error.details()
            call.cancel()
            ranks.release()
            assert await drained
    finally:
        await server.stop()
    assert ranks.stopped


async def test_a_start_that_fails() -> None:
    ranks = FakeRanks()
    ranks.start_error = StartupError("rank 0: shard is missing")
    server = Server(Config.from_values({"grpc.port": 0}), MODEL, ranks)
    with pytest.raises(StartupError, match=r"\Arank 0: shard is missing\Z"):
        await server.run(lambda *_: None)
    assert ranks.stopped


async def test_drain_lets_streams_finish_and_ends_those_that_do_not() -> None:
    async with serving(FakeRanks(next_token=scripted(1, 2, 3))) as served:
        served.ranks.hold()
        short = served.client.generate([1], max_new_tokens=2)
        await next_event(short)
        draining = asyncio.ensure_future(served.server.engine.drain(WAIT))
        served.ranks.step(2)
        assert (await rest(short))[-1].HasField("finished")
        assert await draining
    async with serving() as served:
        served.ranks.hold()
        call = served.client.generate([1])
        await next_event(call)
        assert not await served.server.engine.drain(0)
        error = await failure(call)
        assert error.code() is Code.UNAVAILABLE and "stopped before" in error.details()
        assert trailers(error)["epserver-error"] == "Draining"

"""Messages: who may send them, how large and how long they may be, and when they are decoded."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import types
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2

from ep_server.frontend import messages, requests
from ep_server.frontend.generation import Generator
from ep_server.frontend.service import GENERATE
from ep_server.v1 import control_pb2
from ep_server.v1 import decode_pb2 as pb
from tests.support.frontend import MODEL, WAIT, Code, Served, failure, next_event, serving, trailers

NO_MESSAGE = b"\xff\xff\xff\xff"
HEALTH = "/grpc.health.v1.Health/Check"
LOADS = "/ep_server.v1.Control/GetLoads"


async def sent(served: Served, data: bytes, path: str = GENERATE) -> aio.AioRpcError:
    """The error that a call with these bytes ends with."""
    return await failure(served.client.channel.unary_stream(path)(data))


async def silent(served: Served, path: str = GENERATE, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
    """A call whose caller sends no message and does not leave."""

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.sleep(WAIT)
        yield b""

    call = served.client.channel.stream_stream(path)(nothing(), metadata=metadata)
    with suppress(aio.AioRpcError):  # it may have ended by then
        await call.wait_for_connection()
    return call


def with_strings(count: int) -> bytes:
    """A request with this many empty stop strings, which take two bytes each."""
    stopping = pb.Stopping(stop_strings=[""] * count)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), stopping=stopping).SerializeToString()


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    file = tmp_path / "tokens"
    file.write_text("secret\n")
    return str(file)


async def test_callers_without_a_token_have_nothing_decoded(token_file: str) -> None:
    async with serving(grpc__token_file=token_file) as served:
        for path in (GENERATE, LOADS):
            assert (await sent(served, NO_MESSAGE, path)).code() is Code.UNAUTHENTICATED


async def test_calls_are_refused_before_their_message(token_file: str) -> None:
    async with serving(grpc__token_file=token_file) as served:
        assert (await failure(await silent(served))).code() is Code.UNAUTHENTICATED
    async with serving(scheduler__max_running=1, scheduler__max_queue=0) as served:
        served.ranks.hold()
        running = served.client.generate([1])
        await next_event(running)
        served.ranks.step(1)  # while it waits, a call of higher priority has room
        error = await failure(await silent(served))
        assert error.code() is Code.RESOURCE_EXHAUSTED and "queue full" in error.details()
        assert int(trailers(error)["grpc-retry-pushback-ms"]) > 0
        running.cancel()
        served.ranks.release()
        await served.idle()


async def test_a_call_without_a_message_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(grpc__max_streams=1) as served:

        async def no_message() -> AsyncIterator[bytes]:
            return
            yield b""

        error = await failure(served.client.channel.stream_stream(GENERATE)(no_message()))
        assert error.code() is Code.INVALID_ARGUMENT and "no message" in error.details()
        monkeypatch.setattr(messages, "ARRIVAL_SECONDS", 2.0)
        error = await failure(await silent(served))
        assert error.code() is Code.DEADLINE_EXCEEDED and "no message arrived" in error.details()


@pytest.mark.parametrize("path", [GENERATE, HEALTH])
async def test_calls_without_a_message_keep_nobody_out(path: str, token_file: str) -> None:
    async with serving(grpc__token_file=token_file, grpc__max_streams=2) as served:
        token = (("authorization", "Bearer secret"),)
        without = [await silent(served, path, token) for _ in range(3)]
        error = await failure(without[0])
        assert error.code() is Code.RESOURCE_EXHAUSTED and "grpc.max_streams = 2" in error.details()
        probe = served.client.channel.unary_unary(HEALTH)
        assert await probe(b"", timeout=WAIT) and await probe(b"", timeout=WAIT)
        generate = served.client.channel.unary_stream(GENERATE)(NO_MESSAGE, metadata=token)
        assert (await failure(generate)).code() is Code.INVALID_ARGUMENT
        for call in without:
            call.cancel()


@pytest.mark.parametrize(
    ("field", "most", "request_of"),
    [
        ("token_ids.ids", 32, lambda n: {"token_ids": pb.TokenIds(ids=[999] * n)}),
        ("stopping.stop_strings", 16, lambda n: {"stopping": pb.Stopping(stop_strings=[""] * n)}),
        ("stopping.stop_token_ids", 64, lambda n: {"stopping": pb.Stopping(stop_token_ids=[999] * n)}),
        ("sampling.allowed_token_ids", 257, lambda n: {"sampling": pb.Sampling(allowed_token_ids=[999] * n)}),
        (
            "sampling.logit_bias",
            1024,
            lambda n: {"sampling": pb.Sampling(logit_bias=dict.fromkeys(range(999, 999 + n), 900.0))},
        ),
    ],
)
async def test_too_many_elements_are_refused_unread(field: str, most: int, request_of: Any) -> None:
    """Each element is wrong too, which nobody looks at."""
    model = dataclasses.replace(MODEL, max_context=32)
    async with serving(model=model, grpc__max_message_bytes=1 << 20) as served:
        fields = {"token_ids": pb.TokenIds(ids=[1]), **request_of(most + 1)}
        error = await sent(served, pb.GenerateRequest(**fields).SerializeToString())
        assert f"{most + 1} " in error.details() and f"at most {most}" in error.details()
        expected = Code.OUT_OF_RANGE if field == "token_ids.ids" else Code.INVALID_ARGUMENT
        assert error.code() is expected
        if expected is Code.INVALID_ARGUMENT:
            assert trailers(error)["epserver-field"] == field


async def test_a_long_message_is_checked_before_decoding() -> None:
    """Its end is no message, which only decoding would notice first."""
    async with serving() as served:
        data = with_strings(messages.SHORT_BYTES) + NO_MESSAGE
        error = await sent(served, data)
        assert error.code() is Code.INVALID_ARGUMENT
        assert trailers(error)["epserver-field"] == "stopping.stop_strings"
        error = await sent(
            served, pb.GenerateRequest(text="x" * messages.SHORT_BYTES).SerializeToString() + b"\xff"
        )
        assert trailers(error)["epserver-field"] == "request"


async def test_the_default_size_fits_the_longest_request() -> None:
    model = dataclasses.replace(MODEL, max_context=1 << 15)
    async with serving(model=model) as served:
        longest = requests.longest_message(model.max_context, model.vocab_size)
        assert served.server.config.grpc.max_message_bytes == longest
        error = await sent(served, bytes(longest + 1))
        assert error.code() is Code.RESOURCE_EXHAUSTED and f"at most {longest}" in error.details()
        assert trailers(error)["epserver-error"] == "MessageTooLarge"
        text = "x" * (model.max_context * requests.TEXT_PER_TOKEN)  # too long in tokens, not in bytes
        request = pb.GenerateRequest(
            request_id="r" * requests.MAX_REQUEST_ID,
            text=text,
            cache_salt="\U0001f600" * requests.MAX_CACHE_SALT,
            sampling=pb.Sampling(
                logit_bias=dict.fromkeys(range(257), 1.0), allowed_token_ids=range(model.vocab_size)
            ),
            stopping=pb.Stopping(
                max_new_tokens=1,
                stop_token_ids=[256] * requests.MAX_STOP_TOKENS,
                stop_strings=["\U0001f600" * requests.MAX_STOP_LENGTH] * requests.MAX_STOP_STRINGS,
            ),
        )
        assert (await sent(served, request.SerializeToString())).code() is Code.OUT_OF_RANGE


def test_the_longest_request_counts_every_field() -> None:
    vocab, context = 200_000, 1000
    biases = {2**32 - 1 - id: 1.0 for id in range(requests.MAX_LOGIT_BIAS)}
    sampling = pb.Sampling(logit_bias=biases, allowed_token_ids=[2**32 - 1] * vocab)
    stopping = pb.Stopping(
        stop_token_ids=[2**32 - 1] * requests.MAX_STOP_TOKENS,
        stop_strings=["\U0001f600" * requests.MAX_STOP_LENGTH] * requests.MAX_STOP_STRINGS,
    )
    for prompt in (
        {"text": "x" * (context * requests.TEXT_PER_TOKEN)},
        {"token_ids": pb.TokenIds(ids=[2**32 - 1] * context)},
    ):
        request = pb.GenerateRequest(sampling=sampling, stopping=stopping, **prompt)
        assert request.ByteSize() <= requests.longest_message(context, vocab)


async def test_other_methods_take_small_messages_only() -> None:
    async with serving() as served:
        data = control_pb2.AbortRequest(request_ids=[""] * messages.PLAIN_BYTES).SerializeToString()
        error = await sent(served, data, "/ep_server.v1.Control/Abort")
        assert error.code() is Code.RESOURCE_EXHAUSTED and str(messages.PLAIN_BYTES) in error.details()
        name = "x" * 1000
        error = await failure(served.client.health.Check(health_pb2.HealthCheckRequest(service=name)))
        assert error.code() is Code.NOT_FOUND and len(error.details()) < 200


async def test_a_refused_message_is_freed_at_once() -> None:
    """Frames of errors hold messages, and gRPC keeps errors in cycles of references."""
    code = Generator._sequences.__code__
    async with serving() as served:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                assert (await sent(served, with_strings(17))).code() is Code.INVALID_ARGUMENT
            # Not isinstance(), which asks objects that are no frames, and modules of torch warn of that.
            frames = [one for one in gc.get_objects() if type(one) is types.FrameType]
            assert [one for one in frames if one.f_code is code] == []
        finally:
            gc.enable()


async def test_broken_messages_of_a_stream_are_refused() -> None:
    async with serving() as served:

        async def broken() -> AsyncIterator[bytes]:
            yield NO_MESSAGE

        path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        error = await failure(served.client.channel.stream_stream(path)(broken()))
        assert error.code() is Code.INVALID_ARGUMENT

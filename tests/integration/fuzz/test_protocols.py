"""Hostile messages to every public call: each ends with a clear status, and the server is as before."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import grpc
import hypothesis
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_server.testing.fake_ranks import LIMITS, FakeRanks
from ep_server.text.chat_template import ChatTemplate
from tests.support.frontend import MODEL, WAIT, Code, Served, serving, trailers
from tests.support.fuzz.calls import TEMPLATE, TEXTS, Call, calls, inferences
from tests.support.fuzz.messages import changed

CONTEXT = 128  # tokens: no output is long
MEMORY = 32 << 20  # bytes that a long run may leave: allocators keep some
OWN = "Internal error from Core"  # of the caller's gRPC: it wrote to a call that had ended
FORBIDDEN = {Code.UNKNOWN, Code.INTERNAL, Code.DATA_LOSS}


Sent = tuple[Call, list[bytes], float | None]  # messages of a call; seconds after which its caller leaves


class Fuzzed:
    """A server and a channel to it, in an event loop that tests run step by step."""

    def __init__(self, runner: asyncio.Runner, served: Served, channel: grpc.aio.Channel) -> None:
        self.sent = 0
        self.memory = 0  # bytes of this process after the first part of a long run
        self._runner, self._served, self._channel = runner, served, channel

    def send(self, requests: list[Sent]) -> None:
        """Sends all at once and waits for their ends. Fails on a forbidden status or a hang."""
        self._runner.run(self._send(requests))
        self.sent += len(requests)

    async def _send(self, requests: list[Sent]) -> None:
        await asyncio.gather(*(self._call(*sent) for sent in requests))
        async with asyncio.timeout(WAIT):
            await self._served.idle()
        self._served.server.engine.check_integrity()
        self._served.forget()

    async def _call(self, call: Call, data: list[bytes], leaves_after: float | None) -> None:
        kind = f"{'stream' if call.asks_many else 'unary'}_{'stream' if call.answers_many else 'unary'}"
        method = getattr(self._channel, kind)(call.path, None, call.response.FromString)
        begun = method(iter(data) if call.asks_many else data[0], timeout=0.05 if call.endless else WAIT)
        if leaves_after is not None:
            await asyncio.sleep(leaves_after)
            begun.cancel()
            return
        try:
            if call.answers_many:
                async for answer in begun:
                    assert "internal error" not in str(getattr(answer, "error_message", ""))
            else:
                await begun
        except grpc.aio.AioRpcError as error:
            where = f"{call} {data!r}: {error.details()}"
            assert error.code() not in FORBIDDEN or error.details() == OWN, where
            if call.endless and error.code() is Code.DEADLINE_EXCEEDED:
                return
            ended_here = error.code() is Code.DEADLINE_EXCEEDED and "epserver-error" not in trailers(error)
            assert not ended_here, f"hangs: {where}"


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    template = ChatTemplate({"default": TEMPLATE}, {})
    model = dataclasses.replace(MODEL, max_context=CONTEXT, chat_template=template)
    ranks = FakeRanks(2, limits=dataclasses.replace(LIMITS, max_context=CONTEXT))

    async def opened() -> tuple[Any, Served, grpc.aio.Channel]:
        context = serving(ranks, model, grpc__max_message_bytes=1 << 18)
        served = await context.__aenter__()
        return context, served, grpc.aio.insecure_channel(served.server.address)

    with asyncio.Runner() as runner:
        context, served, channel = runner.run(opened())
        yield Fuzzed(runner, served, channel)
        runner.run(channel.close())
        runner.run(context.__aexit__(None, None, None))


def requests_of(call: Call) -> st.SearchStrategy[Sent]:
    kinds = [changed(call.seeds, TEXTS)] * 6 + [st.binary(max_size=60)]
    if call.path.endswith("Infer"):
        kinds += [inferences()] * 8
    many = st.lists(
        st.sampled_from(kinds).flatmap(lambda kind: kind), min_size=1, max_size=4 if call.asks_many else 1
    )
    leaves_after = st.sampled_from((*[None] * 7, 0.0, 0.001, 0.01))
    return st.tuples(st.just(call), many, leaves_after)


LARGE = [
    call for call in calls() if call.path.rpartition("/")[2] in ("Generate", "ModelInfer", "ModelStreamInfer")
]
SMALL = [call for call in calls() if call not in LARGE]
REQUESTS = st.tuples(*map(requests_of, LARGE), st.sampled_from(SMALL).flatmap(requests_of))


@given(requests=REQUESTS)
def test_bad_messages_end_with_a_clear_status(fuzzed: Fuzzed, requests: Any) -> None:
    fuzzed.send(list(requests))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))  # one test of all would take longer than a test may
def test_ten_thousand_bad_messages_leave_nothing(fuzzed: Fuzzed, part: int) -> None:
    @settings(max_examples=500, database=None)
    @given(requests=REQUESTS)
    def check(requests: Any) -> None:
        fuzzed.send(list(requests))

    total = fuzzed.sent + 10_000
    while fuzzed.sent < total:
        hypothesis.seed(part * total + fuzzed.sent)(check)()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps is not a leak
    memory = psutil.Process().memory_info().rss
    fuzzed.memory = fuzzed.memory or memory
    print(f"{fuzzed.sent} requests, {memory >> 20} MiB")
    assert memory - fuzzed.memory < MEMORY

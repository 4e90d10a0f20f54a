"""Calls that come while a server stops: whatever moment they meet, they end well or with UNAVAILABLE.

gRPC by itself says CANCELLED, which no retry policy tries again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2

from ep_server.config import Config
from ep_server.frontend.server import Server
from ep_server.testing.fake_ranks import FakeRanks
from ep_server.v1 import control_pb2, control_pb2_grpc
from tests.support.frontend import MODEL, WAIT, Code, failure, next_event
from tests.support.raw_client import RawClient

AT_ONCE = 20
GOOD = {Code.OK, Code.UNAVAILABLE}


async def started() -> Server:
    server = Server(Config.from_values({"grpc.port": 0, "grpc.drain_seconds": 0.0}), MODEL, FakeRanks())
    await server.start(lambda *_: None)
    return server


async def ended(server: Server) -> None:
    await server.drain()
    await server.stop()


def call(stub: control_pb2_grpc.ControlStub) -> Code:
    """One call to its end. Returns: how it ended."""
    try:
        stub.GetLoads(control_pb2.GetLoadsRequest(), timeout=WAIT)
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        return error.code()
    return Code.OK


@contextmanager
def calling(address: str) -> Iterator[control_pb2_grpc.ControlStub]:
    """A connection of its own, for another thread than the server's."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield control_pb2_grpc.ControlStub(channel)


async def test_calls_that_grpc_has_not_handed_over_are_unavailable() -> None:
    server = await started()
    with calling(server.address) as stub, ThreadPoolExecutor(AT_ONCE) as threads:
        assert await asyncio.to_thread(call, stub) is Code.OK  # connected
        calls = [threads.submit(call, stub) for _ in range(AT_ONCE)]
        time.sleep(0.5)  # nor does the server, in this loop, take any
        await server.stop()
        codes = Counter([await asyncio.wrap_future(one) for one in calls])
    assert set(codes) <= GOOD and codes[Code.UNAVAILABLE] > 0, codes
    await ended(server)


async def test_a_watch_that_is_open_ends_with_unavailable() -> None:
    server = await started()
    async with RawClient(server.address) as client:
        watch = client.health.Watch(health_pb2.HealthCheckRequest())
        assert (await next_event(watch)).status == health_pb2.HealthCheckResponse.SERVING
        await ended(server)
        assert (await failure(watch)).code() is Code.UNAVAILABLE


def call_until(stop: threading.Event, address: str, codes: Counter[Code]) -> None:
    """One call after the other."""
    with calling(address) as stub:
        while not stop.is_set():
            codes[call(stub)] += 1


async def more(codes: Counter[Code], code: Code) -> None:
    """Until another call has ended so."""
    before = codes[code]
    async with asyncio.timeout(WAIT):
        while codes[code] == before:
            await asyncio.sleep(0.01)


async def test_callers_that_never_pause_hear_of_no_cancelled_call() -> None:
    codes: Counter[Code] = Counter()
    for _ in range(5):
        server, stop = await started(), threading.Event()
        callers = [threading.Thread(target=call_until, args=(stop, server.address, codes)) for _ in range(4)]
        for caller in callers:
            caller.start()
        try:
            await more(codes, Code.OK)
            await ended(server)
            await more(codes, Code.UNAVAILABLE)
        finally:
            stop.set()
            for caller in callers:
                await asyncio.to_thread(caller.join, WAIT)
    assert set(codes) == GOOD, codes

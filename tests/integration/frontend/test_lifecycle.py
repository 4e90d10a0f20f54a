"""Start, serve, drain, stop of a whole server, by real signals to this process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import pytest
from grpc_health.v1 import health_pb2

from ep_server.config import Config
from ep_server.errors import ConfigError
from ep_server.frontend.server import Server
from ep_server.records import RankReady
from ep_server.testing.fake_ranks import LIMITS, FakeRanks
from tests.support.frontend import MODEL, WAIT, Code, failure, next_event, rest
from tests.support.raw_client import RawClient


@dataclass
class Running:
    server: Server
    ranks: FakeRanks
    client: RawClient
    exit_code: asyncio.Task[int]

    async def ends_with(self, code: int) -> None:
        async with asyncio.timeout(WAIT):
            assert await self.exit_code == code
        assert self.ranks.stopped


@asynccontextmanager
async def running(ranks: FakeRanks | None = None, *, wait: bool = True) -> AsyncIterator[Running]:
    ranks = ranks or FakeRanks()
    values = {"grpc.port": 0, "grpc.drain_seconds": WAIT, "resilience.on_rank_loss": "stop"}
    server = Server(Config.from_values(values), MODEL, ranks)
    serving = asyncio.Event()
    task = asyncio.ensure_future(server.run(lambda *_: None, serving.set))
    async with asyncio.timeout(WAIT):
        while not server.address:
            await asyncio.sleep(0)
        if wait:
            await serving.wait()
    client = RawClient(server.address)
    try:
        yield Running(server, ranks, client, task)
    finally:
        await client.close()
        ranks.release()
        if not task.done():
            server.ask_to_stop()
            server.ask_to_stop()
            await task


def watch(client: RawClient) -> object:
    return client.health.Watch(health_pb2.HealthCheckRequest(service="ep_server.v1.Decode"))


async def test_sigterm_drains() -> None:
    async with running() as it:
        it.ranks.hold()
        call = it.client.generate([1], max_new_tokens=3)
        await next_event(call)
        health = watch(it.client)
        assert (await next_event(health)).status == health_pb2.HealthCheckResponse.SERVING
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await next_event(health)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = await failure(it.client.generate([1]))
        assert error.code() is Code.UNAVAILABLE and "shutting down" in error.details()
        assert await it.client.serving("") and not await it.client.serving()
        assert not it.exit_code.done()
        it.ranks.release()
        assert (await rest(call))[-1].finished.usage.output_tokens == 3
        await it.ends_with(0)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_stops_at_once(second: signal.Signals) -> None:
    async with running() as it:
        it.ranks.hold()
        call = it.client.generate([1])
        await next_event(call)
        health = watch(it.client)
        await next_event(health)
        os.kill(os.getpid(), signal.SIGTERM)
        await next_event(health)
        os.kill(os.getpid(), second)
        error = await failure(call)
        assert error.code() is Code.UNAVAILABLE
        await it.ends_with(0)


async def test_a_signal_while_the_ranks_load() -> None:
    ranks = FakeRanks()
    ranks.start_gate = asyncio.Event()
    async with running(ranks, wait=False) as it:
        health = watch(it.client)
        assert (await next_event(health)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        os.kill(os.getpid(), signal.SIGTERM)
        await it.ends_with(0)


async def test_a_lost_rank_ends_the_server() -> None:
    async with running(FakeRanks(2)) as it:
        it.ranks.hold()
        call = it.client.generate([1])
        await next_event(call)
        process = it.client.health.Watch(health_pb2.HealthCheckRequest())
        watches = (process, watch(it.client))
        for health in watches:
            assert (await next_event(health)).status == health_pb2.HealthCheckResponse.SERVING
        it.ranks.kill(1)
        for health in watches:
            assert (await next_event(health)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await failure(call)).details() == "rank 1 was lost: exit code -9"
        await it.ends_with(1)
        with pytest.raises(grpc.aio.AioRpcError):
            await it.client.serving()


async def test_health_turns_serving_when_the_ranks_are_warm() -> None:
    ranks = FakeRanks()
    ranks.start_gate = asyncio.Event()
    async with running(ranks, wait=False) as it:
        health = watch(it.client)
        assert (await next_event(health)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await it.client.serving("")  # alive while it loads
        ranks.start_gate.set()
        assert (await next_event(health)).status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("listening", [True, False])
async def test_a_port_in_use_is_one_line(listening: bool) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listening:
            other.listen()
        port = other.getsockname()[1]
        ranks = FakeRanks()
        server = Server(Config.from_values({"grpc.port": port}), MODEL, ranks)
        with pytest.raises(ConfigError, match=r"\Agrpc\.port = \d+: must be .*address already in use\)\Z"):
            await server.run(lambda *_: None)
        assert not ranks.requests and ranks.stopped


async def test_two_servers_cannot_share_a_port() -> None:
    async with running() as it:
        port = int(it.server.address.rpartition(":")[2])
        second = Server(Config.from_values({"grpc.port": port}), MODEL, FakeRanks())
        with pytest.raises(ConfigError, match="address already in use"):
            await second.start(lambda *_: None)
        await second.stop()


async def test_a_host_that_is_not_ours() -> None:
    for host in ("203.0.113.1", "no.such.host.invalid"):
        server = Server(Config.from_values({"grpc.host": host, "grpc.port": 0}), MODEL, FakeRanks())
        with pytest.raises(ConfigError, match=r"grpc\.host = "):
            await server.start(lambda *_: None)
        await server.stop()


async def test_an_open_door_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for host, warnings in (("127.0.0.1", 0), ("0.0.0.0", 2)):
        caplog.clear()
        server = Server(Config.from_values({"grpc.host": host, "grpc.port": 0}), MODEL, FakeRanks())
        await server.start(lambda *_: None)
        await server.drain()
        await server.stop()
        told = [record for record in caplog.records if record.levelname == "WARNING"]
        assert len(told) == warnings


class WithGpus(FakeRanks):
    """Each rank says which kernels it attends with."""

    def _ready(self, rank: int) -> RankReady:
        return replace(super()._ready(rank), attention=f"triton (reason {rank % 2})")


async def test_attention_kernels_are_logged_once_before_serving(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(Config.from_values({"grpc.port": 0}), MODEL, WithGpus(4))
    with caplog.at_level(logging.INFO, "ep_server.frontend.server"):
        await server.start(lambda *_: None)
    await server.drain()
    await server.stop()
    told = [line for line in caplog.messages if line.startswith(("decode attention", "serving"))]
    assert told[:2] == [f"decode attention: triton (reason {which})" for which in (0, 1)]
    assert len(told) == 3 and told[2].endswith("4 ranks on cpu")


async def test_a_cache_smaller_than_the_context_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    ranks = FakeRanks(limits=replace(LIMITS, kv_blocks=4))
    server = Server(Config.from_values({"grpc.port": 0}), MODEL, ranks)
    await server.start(lambda *_: None)
    await server.drain()
    await server.stop()
    assert sum("KV cache holds 64 tokens, the model" in line for line in caplog.messages) == 1


async def test_ipv6() -> None:
    server = Server(Config.from_values({"grpc.host": "::1", "grpc.port": 0}), MODEL, FakeRanks())
    try:
        if not _has_ipv6():
            with pytest.raises(ConfigError, match=r"grpc\.(host|port) = "):
                await server.start(lambda *_: None)
            return
        await server.start(lambda *_: None)
        async with RawClient(server.address) as client:
            assert (await client.complete([1], max_new_tokens=1)).token_ids == [2]
    finally:
        await server.drain()
        await server.stop()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True

"""What callers and probes see while a server drains: GOAWAY, other servers, health on new connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ep_server.client import generate_request
from ep_server.config import Config
from ep_server.frontend.server import Server
from ep_server.testing.fake_ranks import FakeRanks
from ep_server.v1 import decode_pb2_grpc
from tests.support.frontend import MODEL, WAIT, Code, next_event, rest
from tests.support.raw_client import RawClient

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass
class Living:
    """A server in its serving state; ask_to_stop() drains it."""

    server: Server
    ranks: FakeRanks


@asynccontextmanager
async def living() -> AsyncIterator[Living]:
    ranks = FakeRanks()
    server = Server(Config.from_values({"grpc.port": 0, "grpc.drain_seconds": WAIT}), MODEL, ranks)
    serves = asyncio.Event()
    life = asyncio.create_task(server.live(lambda *_: None, serves.set))
    async with asyncio.timeout(WAIT):
        await serves.wait()
    try:
        yield Living(server, ranks)
    finally:
        ranks.release()
        server.ask_to_stop()
        server.ask_to_stop()
        assert await life == 0


async def held_stream(client: RawClient, living: Living) -> Any:
    """A stream of three tokens of which none comes before ranks.release()."""
    living.ranks.hold()
    call = client.generate([1], max_new_tokens=3)
    await next_event(call)
    return call


async def told_to_go(channel: aio.Channel) -> None:
    """Until GOAWAY has come on the connection of a channel."""
    async with asyncio.timeout(WAIT):
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)


@dataclass
class Balancer:
    """Gives new connections to one server; open ones stay, as behind a Service of Kubernetes."""

    target: str
    address: str = ""
    _pipes: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Balancer]:
        server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for pipe in self._pipes:
                pipe.cancel()
            await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._pipes.add(asyncio.create_task(_copy(source, sink)))


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    except ConnectionError:
        pass
    finally:
        sink.close()


async def answered(channel: aio.Channel) -> Code:
    """How a short request ends."""
    stub: Any = decode_pb2_grpc.DecodeStub(channel)
    call = stub.Generate(generate_request([1], max_new_tokens=1), timeout=WAIT)
    with suppress(aio.AioRpcError):
        await rest(call)
    return Code(await call.code())


async def status(address: str, service: str = "") -> Any:
    """What a probe hears, which comes by a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with aio.insecure_channel(address, options=options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT)
    return answer.status


async def test_a_drain_sends_goaway_and_the_stream_finishes() -> None:
    async with living() as it, RawClient(it.server.address) as client:
        call = await held_stream(client, it)
        it.server.ask_to_stop()
        await told_to_go(client.channel)
        assert not call.done()
        it.ranks.release()
        assert (await rest(call))[-1].finished.usage.output_tokens == 3


async def test_a_pooled_channel_leaves_a_draining_server() -> None:
    async with (
        living() as old,
        living() as new,
        Balancer(old.server.address).open() as balancer,
        RawClient(balancer.address) as client,
        asyncio.timeout(2 * WAIT),
    ):
        call = await held_stream(client, old)
        balancer.target = new.server.address
        old.server.ask_to_stop()
        while (code := await answered(client.channel)) is not Code.OK:
            assert code is Code.UNAVAILABLE
        assert len(new.ranks.requests) == 1 and len(old.ranks.requests) == 1
        old.ranks.release()
        assert (await rest(call))[-1].finished.usage.output_tokens == 3


async def test_a_connection_made_during_a_drain_is_sent_away_too() -> None:
    """A balancer may not know of the drain yet."""
    async with living() as it, RawClient(it.server.address) as client:
        await held_stream(client, it)
        it.server.ask_to_stop()
        await told_to_go(client.channel)
        async with RawClient(it.server.address) as late:
            assert await answered(late.channel) is Code.UNAVAILABLE
            await told_to_go(late.channel)


async def test_round_robin_with_health_checks_avoids_a_drain() -> None:
    policy = '{"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": "%s"}}'
    options = [("grpc.service_config", policy % "ep_server.v1.Decode")]
    async with living() as old, living() as new, RawClient(old.server.address) as client:
        addresses = f"ipv4:{old.server.address},{new.server.address}"
        async with aio.insecure_channel(addresses, options=options) as channel, asyncio.timeout(2 * WAIT):
            while not (old.ranks.requests and new.ranks.requests):
                assert await answered(channel) is Code.OK
            call = await held_stream(client, old)
            old.server.ask_to_stop()
            await told_to_go(client.channel)
            while (await answered(channel), await answered(channel)) != (Code.OK, Code.OK):
                pass
            asked = len(old.ranks.requests)
            assert [await answered(channel) for _ in range(10)] == [Code.OK] * 10
            assert len(old.ranks.requests) == asked
            old.ranks.release()
            assert (await rest(call))[-1].finished.usage.output_tokens == 3


async def test_probes_are_answered_during_a_drain() -> None:
    async with living() as it, RawClient(it.server.address) as client:
        await held_stream(client, it)
        it.server.ask_to_stop()
        await told_to_go(client.channel)
        assert await status(it.server.address, "ep_server.v1.Decode") == NOT_SERVING
        assert await status(it.server.address) == SERVING  # the process works

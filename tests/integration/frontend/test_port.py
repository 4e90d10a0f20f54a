"""How a port is closed beside whatever else its process has open: other ports, sockets, files, threads."""

from __future__ import annotations

import asyncio
import fcntl
import multiprocessing
import os
import select
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ep_server.config import GrpcConfig
from ep_server.errors import ConfigError
from ep_server.frontend import accept_queue, endpoint, health, port
from ep_server.frontend.health import Health
from ep_server.frontend.messages import CallLimits
from ep_server.frontend.port import Place, Port, hang_up, place_of
from tests.support.certificates import make_certificates
from tests.support.frontend import WAIT, Code, failure, next_event, trailers
from tests.support.ports import free_port

CLOSED = 200  # ports, one after the other
SERVING = health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def opened(config: GrpcConfig | None = None) -> AsyncIterator[Port]:
    one = Port(config or GrpcConfig(port=0), frozenset())
    health.add_HealthServicer_to_server(Health(()), one.server)
    await one.open()
    try:
        yield one
    finally:
        await one.close()


def number_of(one: Port) -> int:
    return int(one.address.rpartition(":")[2])


def channel_to(address: str, files: Path | None = None) -> aio.Channel:
    """files: certificates, for a port with TLS."""
    if files is None:
        return aio.insecure_channel(address)
    return aio.secure_channel(address, grpc.ssl_channel_credentials((files / "ca.pem").read_bytes()))


@asynccontextmanager
async def watching(address: str, files: Path | None = None) -> AsyncIterator[Any]:
    """A call that never ends by itself, its first answer read. files: as channel_to()."""
    async with channel_to(address, files) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await next_event(call)).status == SERVING
        yield call


async def test_a_call_over_tls_ends_with_unavailable(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    config = GrpcConfig(port=0, tls_cert=str(files / "server.pem"), tls_key=str(files / "server.key"))
    async with opened(config) as one, watching(one.address, files) as call:
        await one.close(0.0)
        assert (await failure(call)).code() is Code.UNAVAILABLE


async def test_closing_port_refuses_new_calls_and_waits_for_old_ones() -> None:
    async with opened() as one, watching(one.address) as open_call, asyncio.timeout(WAIT):
        address, closing = one.address, asyncio.create_task(one.close(10 * WAIT))
        await asyncio.sleep(0)  # it refuses now
        async with aio.insecure_channel(address) as channel:
            late = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            error = await failure(late)
        assert error.code() is Code.UNAVAILABLE and trailers(error)["epserver-error"] == "Draining"
        assert not closing.done() and not open_call.done()
        open_call.cancel()
        await closing


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost", "127.0.0.1"])
async def test_a_drained_port_takes_new_connections(host: str) -> None:
    async with opened(GrpcConfig(host=host, port=0)) as one, opened() as other:
        address = f"127.0.0.1:{number_of(one)}"
        async with watching(address) as call, watching(other.address) as kept:
            another = Health(())
            another.fail()
            add = partial(health.add_HealthServicer_to_server, another)
            one.drain(add)
            one.drain(add)
            async with aio.insecure_channel(address) as channel:
                check = health_pb2_grpc.HealthStub(channel).Check
                while (await check(health_pb2.HealthCheckRequest())).status == SERVING:
                    pass
            assert not call.done() and not kept.done()
            await one.close(0.0)
            assert (await failure(call)).code() is Code.UNAVAILABLE


async def test_a_drained_port_keeps_its_certificates(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    config = GrpcConfig(port=0, tls_cert=str(files / "server.pem"), tls_key=str(files / "server.key"))
    async with opened(config) as one, channel_to(one.address, files) as channel, asyncio.timeout(WAIT):
        check = health_pb2_grpc.HealthStub(channel).Check
        await check(health_pb2.HealthCheckRequest())
        one.drain(partial(health.add_HealthServicer_to_server, Health(())))
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert (await check(health_pb2.HealthCheckRequest())).status == SERVING


async def test_a_drain_goes_on_where_the_port_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def taken(server: aio.Server, config: GrpcConfig, certificates: None) -> str:
        raise ConfigError("grpc.port", config.port, "a port of this host")

    async with opened() as one, watching(one.address) as call, asyncio.timeout(WAIT):
        monkeypatch.setattr(port, "bind", taken)
        one.drain(lambda _: None)
        while "cannot take new connections" not in caplog.text:
            await asyncio.sleep(0.01)
        assert not call.done()
        await one.close(0.0)
        assert (await failure(call)).code() is Code.UNAVAILABLE


async def test_another_port_of_the_process_keeps_its_calls() -> None:
    async with opened() as one, opened() as other, watching(other.address) as kept:
        await one.close()
        assert not kept.done()
        async with watching(other.address):  # and takes new ones
            pass


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
async def test_same_port_number_at_another_address_keeps_its_calls(host: str) -> None:
    """As the rendezvous of nodes may have the number of the public port."""
    async with opened(GrpcConfig(host="127.0.0.3", port=0)) as other, watching(other.address) as kept:
        async with opened(GrpcConfig(host=host, port=number_of(other))) as one, watching(one.address) as call:
            await one.close(0.0)
            assert (await failure(call)).code() is Code.UNAVAILABLE
        assert not kept.done()
        async with watching(other.address):
            pass


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost", "127.0.0.1"])
async def test_calls_end_with_unavailable_however_the_host_is_written(host: str) -> None:
    async with opened(GrpcConfig(host=host, port=0)) as one, watching(f"127.0.0.1:{number_of(one)}") as call:
        await one.close(0.0)
        assert (await failure(call)).code() is Code.UNAVAILABLE


async def test_ports_that_were_not_open_or_are_closed_may_be_closed() -> None:
    never = Port(GrpcConfig(port=0), frozenset())
    await never.close()
    async with opened(GrpcConfig(port=free_port())) as one:
        number = number_of(one)
        await one.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", number), timeout=5)
        await one.close()


async def test_server_stops_without_free_file_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(place: Place) -> None:
        raise OSError(24, "too many open files")

    async with opened() as one, watching(one.address) as call:
        monkeypatch.setattr(port, "hang_up", none_left)
        await one.close(0.0)
        assert (await failure(call)).code() in {Code.CANCELLED, Code.UNAVAILABLE}
    assert "too many open files" in caplog.text


@pytest.mark.parametrize("closes", [True, False])
async def test_probes_leave_no_line_in_the_log_of_grpc(
    closes: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where their channel closes later than the server stops, as on a busy machine."""
    channels = []

    def channel(*arguments: Any, **named: Any) -> Any:
        channels.append(make(*arguments, **named))
        return channels[-1] if closes else nullcontext(channels[-1])

    make = grpc.insecure_channel
    monkeypatch.setattr(accept_queue, "grpc", SimpleNamespace(**vars(grpc) | {"insecure_channel": channel}))
    waited = asyncio.Event()
    limits = CallLimits(measured="/grpc.health.v1.Health/Check", on_accept_wait=lambda _: waited.set())
    for _ in range(5):
        one = Port(GrpcConfig(port=0), frozenset(), limits)
        health.add_HealthServicer_to_server(Health(()), one.server)
        await one.open()
        await asyncio.wait_for(waited.wait(), WAIT)
        waited.clear()
        await one.close(0)
    for made in channels:
        made.close()
    assert "GOAWAY" not in capfd.readouterr().err


@contextmanager
def listener() -> Iterator[tuple[socket.socket, str]]:
    """A socket as gRPC's, and its host:port."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made, f"127.0.0.1:{made.getsockname()[1]}"


def test_a_socket_of_udp_with_the_same_number_stays_open() -> None:
    with listener() as (made, address), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as resolver:
        resolver.bind(made.getsockname())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.connect(made.getsockname())
            resolver.connect(other.getsockname())
            hang_up(place_of(address))
            readable, _, _ = select.select([resolver], [], [], 0)  # what is shut down reads as ended
            assert not readable


def locked_elsewhere(path: Path) -> bool:
    """Whether another process finds the file locked."""
    with path.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def test_locks_of_the_process_on_files_stay(tmp_path: Path) -> None:
    path = tmp_path / "locked"
    with path.open("w+b") as file, listener() as (_, address):
        fcntl.lockf(file, fcntl.LOCK_EX)
        hang_up(place_of(address))
        with multiprocessing.get_context("spawn").Pool(1) as others:
            assert others.apply(locked_elsewhere, (path,))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def guarded(stop: threading.Event, wrong: list[str]) -> None:
    """churn, whose errors are kept."""
    try:
        churn(stop, wrong)
    except OSError as error:
        wrong.append(str(error))


def churn(stop: threading.Event, wrong: list[str]) -> None:
    """Opens and closes descriptors of every kind, and uses them: what is no port's must not change."""
    while not stop.is_set():
        one, other = socket.socketpair()
        reading, writing = os.pipe()
        with one, other, os.fdopen(reading, "rb") as reader, os.fdopen(writing, "wb") as writer:
            one.send(b"x")
            writer.write(b"x")
            writer.flush()
            if other.recv(1) != b"x" or reader.read(1) != b"x":
                wrong.append("lost a byte")


def test_threads_opening_descriptors_are_not_disturbed() -> None:
    stop, wrong = threading.Event(), list[str]()
    threads = [threading.Thread(target=guarded, args=(stop, wrong)) for _ in range(3)]
    before = descriptors()
    for thread in threads:
        thread.start()
    try:
        for _ in range(CLOSED):
            with listener() as (made, address), socket.create_connection(made.getsockname()) as caller:
                where = made.getsockname()
                with made.accept()[0]:
                    hang_up(place_of(address))
                    assert caller.recv(1) == b""
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(where, timeout=5)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not wrong
    assert descriptors() < before + CLOSED / 2


async def test_pings_do_not_end_a_silent_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "LEAST_PING_MS", 100)
    pings = [("grpc.keepalive_time_ms", 1000), ("grpc.http2.max_pings_without_data", 0)]
    async with opened() as one, aio.insecure_channel(one.address, options=pings) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await next_event(call)
        with pytest.raises(TimeoutError):  # gRPC would end it at the third ping that comes too soon
            async with asyncio.timeout(5):
                await call.read()


async def test_an_old_connection_is_left_for_a_new_one() -> None:
    config = GrpcConfig(port=0, max_connection_age_seconds=0.3)
    async with opened(config) as one, channel_to(one.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await next_event(watch)).status == SERVING
        peers = set()
        async with asyncio.timeout(WAIT):
            while len(peers) < 2:  # the port of the caller's end changes
                call = stub.Check(health_pb2.HealthCheckRequest())
                assert (await call).status == SERVING
                peers.add(connections_to(number_of(one)))
                await asyncio.sleep(0.05)
        assert not watch.done()  # it stays on the old connection


async def test_calls_of_an_old_connection_end_after_the_grace() -> None:
    ends = list[Code]()
    for grace in (0.2, 12.0):  # the second one if the call ended before its first answer
        config = GrpcConfig(port=0, max_connection_age_seconds=0.2, max_connection_age_grace_seconds=grace)
        with suppress(aio.AioRpcError):
            async with opened(config) as one, watching(one.address) as call:
                ends.append((await failure(call)).code())
        if ends:
            break
    assert ends == [Code.UNAVAILABLE]


def connections_to(number: int) -> frozenset[int]:
    """Local ports of this process's connections to a port."""
    here = psutil.Process().net_connections("tcp")
    ends = [one for one in here if one.raddr and one.raddr.port == number and one.status == "ESTABLISHED"]
    return frozenset(one.laddr.port for one in ends)

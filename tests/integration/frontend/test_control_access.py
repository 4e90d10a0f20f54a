"""Where Control and reflection are served: with the other services, on loopback alone, or nowhere."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ep_server.cli.main import main
from ep_server.client import Target
from ep_server.config import Config, GrpcConfig
from ep_server.errors import ConfigError
from ep_server.frontend.server import Server
from ep_server.testing.fake_ranks import FakeRanks
from tests.support.cluster.relay import relayed
from tests.support.frontend import MODEL, WAIT, Code, failure, serving
from tests.support.ports import free_port
from tests.support.raw_client import RawClient

CONTROL = "ep_server.v1.Control"


def asked(client: RawClient) -> list[Any]:
    """A call of every method."""
    return [
        client.server_info(),
        client.model_info(),
        client.loads(),
        client.ep_state(),
        client.diagnostics(),
        client.abort("one"),
    ]


async def listed(channel: aio.Channel) -> set[str]:
    """The services that reflection names."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
    return {service.name for service in answer.list_services_response.service}


async def test_control_can_be_switched_off() -> None:
    async with serving(grpc__control="off") as served:
        for call in asked(served.client):
            error = await failure(call)
            assert error.code() is Code.UNIMPLEMENTED and "grpc.control = off" in (error.details() or "")
        assert (await served.client.complete([1], max_new_tokens=1)).token_ids == [2]
        assert CONTROL not in await listed(served.client.channel)
        check = served.client.health.Check(health_pb2.HealthCheckRequest(service=CONTROL))
        assert (await failure(check)).code() is Code.NOT_FOUND


async def test_control_can_be_bound_to_loopback() -> None:
    port = free_port()
    async with serving(grpc__host="0.0.0.0", grpc__control="loopback", grpc__control_port=port) as served:
        for call in asked(served.client):
            error = await failure(call)
            assert error.code() is Code.UNIMPLEMENTED and f"127.0.0.1:{port}" in (error.details() or "")
        async with RawClient(f"127.0.0.1:{port}") as own:
            assert (await own.server_info()).ranks == 1
            assert list((await own.abort("one")).unknown) == ["one"]
            assert CONTROL in await listed(own.channel)
            assert (await failure(own.generate([1]))).code() is Code.UNIMPLEMENTED
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=WAIT)
    with pytest.raises(ConnectionRefusedError):  # it ends with the server
        socket.create_connection(("127.0.0.1", port), timeout=WAIT)


async def test_control_on_loopback_needs_a_token(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    values = {"grpc__token_file": str(tmp_path / "tokens"), "grpc__control": "loopback"}
    port = free_port()
    async with serving(grpc__control_port=port, **values):
        async with RawClient(f"127.0.0.1:{port}") as own:
            assert (await failure(own.loads())).code() is Code.UNAUTHENTICATED
        async with RawClient(Target(f"127.0.0.1:{port}", token="secret")) as own:
            assert await own.loads()


async def test_a_taken_control_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        values = {"grpc.control": "loopback", "grpc.control_port": other.getsockname()[1]}
        server = Server(Config.from_values({"grpc.port": 0, **values}), MODEL, FakeRanks())
        with pytest.raises(ConfigError, match=r"\Agrpc\.control_port = \d+: .*already in use"):
            await server.start(lambda *_: None)
        await server.stop()


async def test_reflection_can_be_switched_off() -> None:
    async with serving(grpc__reflection=False) as served:
        call: Any = reflection_pb2_grpc.ServerReflectionStub(served.client.channel).ServerReflectionInfo()
        assert await call.code() is Code.UNIMPLEMENTED
        assert (await served.client.server_info()).ranks == 1


async def test_a_node_that_relays_keeps_control_to_itself() -> None:
    async with relayed(grpc=GrpcConfig(port=0, control="off", reflection=False)) as both:
        for call in asked(both.node.client):
            assert (await failure(call)).code() is Code.UNIMPLEMENTED
        assert await both.served.client.loads()
        assert (await both.node.client.complete([1], max_new_tokens=1)).token_ids == [2]
        with pytest.raises(aio.AioRpcError):
            await listed(both.node.client.channel)


@pytest.mark.parametrize("where, code", [("off", Code.UNIMPLEMENTED), ("loopback", Code.OK)])
async def test_node_0_without_control_refuses_other_nodes(where: str, code: Code) -> None:
    """Loopback at node 0 is about its own callers; each node has its own loopback."""
    async with relayed(grpc__control=where, grpc__control_port=0) as both:
        call = both.node.client.loads()
        if code is Code.OK:
            await call
        else:
            assert (await failure(call)).code() is code


async def run(*arguments: str) -> int:
    async with asyncio.timeout(2 * WAIT):
        return await asyncio.to_thread(main, arguments)


async def test_commands_say_that_control_is_off(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with serving(grpc__control="off") as served:
        address = f"--address={served.server.address}"
        assert await run("diagnose", address, f"-o{tmp_path / 'd.tar.gz'}") == 1
        missing = re.findall(
            r"missing: (\w+)\.json: UNIMPLEMENTED: .*grpc\.control = off", capfd.readouterr().out
        )
        assert {"server", "model", "loads", "topology", "config"} <= set(missing)
        assert await run("generate", "hello", address, "--max-new-tokens=1") == 0
        capfd.readouterr()
        assert await run("generate", "--ids", "4 5", address, "--max-new-tokens=3") == 0
        assert capfd.readouterr().out == "6 7 8 \n"
        assert await run("bench", "online", address, "--requests=1") == 1
        assert "grpc.control = off" in capfd.readouterr().err

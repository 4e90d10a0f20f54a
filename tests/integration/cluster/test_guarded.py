"""A server whose nodes know one another by certificates and a token, started as an operator does."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from grpc import aio

from ep_server.v1 import decode_pb2, decode_pb2_grpc
from tests.support.certificates import make_certificates
from tests.support.cluster.nodes import WAIT, nodes
from tests.support.fabric.fabric_ends import needs
from tests.support.frontend import Code, failure
from tests.support.raw_client import RawClient


@pytest.fixture(autouse=True)
def network() -> None:
    needs("system")


@pytest.mark.slow
async def test_rendezvous_serves_only_nodes_with_certificate_and_token(
    tmp_path: Path,
) -> None:
    files, token = make_certificates(tmp_path), tmp_path / "token"
    token.write_text("secret\n")

    def shown(name: str) -> tuple[str, ...]:
        return (
            *(
                "--cluster-tls-cert",
                str(files / f"{name}.pem"),
                "--cluster-tls-key",
                str(files / f"{name}.key"),
            ),
            *("--cluster-tls-ca", str(files / "ca.pem"), "--cluster-token-file", str(token)),
        )

    async with nodes() as made:
        leader, other = await made.start(0, *shown("server")), await made.start(1, *shown("client"))
        await leader.serving()
        async with RawClient(await other.serving()) as client:
            answer = await client.complete("12+30=", temperature=0.0, dp_rank=1, timeout=WAIT)
        assert answer.text.split() == ["42"]
        async with aio.insecure_channel(made.rendezvous) as channel:
            call = decode_pb2_grpc.DecodeStub(channel).Generate(decode_pb2.GenerateRequest(text="1+1="))
            assert (await failure(call)).code() is Code.UNAVAILABLE
        leader.signal(signal.SIGTERM)
        assert [await leader.end(), await other.end()] == [0, 0]


@pytest.mark.slow
async def test_a_call_at_the_rendezvous_needs_the_token_of_nodes(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    async with nodes(options=("--cluster-token-file", str(token))) as made:
        leader, other = await made.start(0), await made.start(1)
        await leader.serving()
        async with RawClient(made.rendezvous) as client:
            error = await failure(client.generate("1+1=", timeout=WAIT))
        assert error.code() is Code.UNAUTHENTICATED
        async with RawClient(await other.serving()) as client:
            assert (await client.complete("12+30=", temperature=0.0, timeout=WAIT)).text.split() == ["42"]
        leader.signal(signal.SIGTERM)
        assert [await leader.end(), await other.end()] == [0, 0]


async def test_each_node_has_control_on_its_own_loopback() -> None:
    async with nodes(options=("--grpc-control", "loopback", "--grpc-control-port", "0")) as made:
        both = [await made.start(0), await made.start(1)]
        for node in both:
            async with RawClient(await node.serving()) as client:
                assert (await failure(client.loads())).code() is Code.UNIMPLEMENTED
            (own,) = [
                line.rpartition(" on ")[2] for line in node.lines if line.startswith("ep_server.v1.Control")
            ]
            async with RawClient(own) as client:
                assert (await client.server_info()).ranks == 2
        both[0].signal(signal.SIGTERM)
        assert [await node.end() for node in both] == [0, 0]

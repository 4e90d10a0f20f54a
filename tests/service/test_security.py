"""Bearer tokens, TLS and mutual TLS, with certificates made for the test."""

from __future__ import annotations

import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ep_server.client import Target, generate_request
from ep_server.config import Config
from ep_server.errors import ConfigError
from ep_server.interceptors import TokenFile
from ep_server.ranks.fake import FakeRanks
from ep_server.server import Server
from ep_server.v1.control_pb2 import GetLoadsRequest
from ep_server.v1.control_pb2_grpc import ControlStub
from tests.service.harness import MODEL, Code, failure, serving, trailers


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text("# accepted\nsecret-one\n\n  secret-two  \n")
    return file


async def test_a_call_needs_a_token(tokens: Path) -> None:
    async with serving(grpc__token_file=str(tokens), target=Target("", token="secret-two")) as served:
        assert (await served.client.complete([1], max_new_tokens=1)).token_ids == [2]
        assert (await served.client.loads()).in_flight >= 0
        for metadata in (
            [],
            [("authorization", "Bearer wrong")],
            [("authorization", "secret-one")],
            [("authorization", "Basic secret-one")],
            [("authorization", "Bearer ")],
            [("authorization", "Bearer # accepted")],
        ):
            stream = served.client.decode.Generate(generate_request([1]), metadata=metadata)
            error = await failure(stream)
            assert error.code() is Code.UNAUTHENTICATED
            assert trailers(error)["epserver-error"] == "Unauthenticated"
            unary = served.client.control.GetLoads(GetLoadsRequest(), metadata=metadata)
            assert (await failure(unary)).code() is Code.UNAUTHENTICATED
        assert len(served.ranks.requests) == 1
        stub = reflection_pb2_grpc.ServerReflectionStub(served.client.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        assert (await failure(call)).code() is Code.UNAUTHENTICATED
        assert await served.client.serving()  # health stays open: probes carry no token


async def test_a_changed_token_file_is_read_again(tokens: Path) -> None:
    async with serving(grpc__token_file=str(tokens), target=Target("", token="new-secret")) as served:
        assert (await failure(served.client.loads())).code() is Code.UNAUTHENTICATED
        replacement = tokens.with_name("next")
        replacement.write_text("new-secret\n")
        replacement.replace(tokens)  # as an operator, or a mounted secret, would do it
        assert await served.client.loads()


def test_a_token_file_that_breaks_keeps_its_tokens(tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = TokenFile(str(tokens))
    tokens.write_text("# nothing\n")
    assert known.accepts("Bearer secret-one") and "grpc.token_file" in caplog.text
    tokens.unlink()
    assert known.accepts("bearer secret-two")
    assert not known.accepts(None) and not known.accepts("Bearer secret-three")


def test_a_token_file_must_be_there_and_hold_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grpc\.token_file = .*a readable file"):
        TokenFile(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n# no token\n")
    with pytest.raises(ConfigError, match="at least one token"):
        TokenFile(str(tmp_path / "empty"))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca, server (localhost, 127.0.0.1), client signed by ca; stranger signed by itself."""
    directory = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    new = (
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    )
    for name in ("ca", "stranger"):
        openssl(*new, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name in ("server", "client"):
        san = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key")
        openssl(*new, *signed, *san, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    return directory


async def test_tls(certificates: Path) -> None:
    server = {
        f"grpc__tls_{part}": str(certificates / f"server.{end}")
        for part, end in (("cert", "pem"), ("key", "key"))
    }
    async with serving(target=Target("", tls_ca=str(certificates / "ca.pem")), **server) as served:
        assert (await served.client.complete([1], max_new_tokens=1)).token_ids == [2]
        async with grpc.aio.insecure_channel(served.server.address) as plain:
            assert (await failure(ControlStub(plain).GetLoads(GetLoadsRequest()))).code() is Code.UNAVAILABLE


async def test_mutual_tls(certificates: Path) -> None:
    def path(name: str) -> str:
        return str(certificates / name)

    server = {
        "grpc__tls_cert": path("server.pem"),
        "grpc__tls_key": path("server.key"),
        "grpc__tls_client_ca": path("ca.pem"),
    }
    known = Target("", tls_ca=path("ca.pem"), tls_cert=path("client.pem"), tls_key=path("client.key"))
    async with serving(target=known, **server) as served:
        assert (await served.client.complete([1], max_new_tokens=1)).token_ids == [2]
    stranger = Target("", tls_ca=path("ca.pem"), tls_cert=path("stranger.pem"), tls_key=path("stranger.key"))
    for target in (Target("", tls_ca=path("ca.pem")), stranger):
        async with serving(target=target, **server) as served:
            assert (await failure(served.client.loads())).code() is Code.UNAVAILABLE


@pytest.mark.parametrize(
    "values, message",
    [
        ({"tls_cert": "none", "tls_key": "server.key"}, r"grpc\.tls_cert = .*a readable file"),
        ({"tls_cert": "server.pem", "tls_key": "none"}, r"grpc\.tls_key = .*a readable file"),
        ({"tls_cert": "server.pem", "tls_key": "client.key"}, r"grpc\.tls_cert = .*fits grpc\.tls_key"),
        (
            {"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "server.key"},
            r"grpc\.tls_client_ca = .*a PEM bundle",
        ),
    ],
)
async def test_broken_certificates_name_the_field(
    certificates: Path, values: dict[str, str], message: str
) -> None:
    given = {f"grpc.{name}": str(certificates / file) for name, file in values.items()}
    server = Server(Config.from_values({"grpc.port": 0, **given}), MODEL, FakeRanks())
    with pytest.raises(ConfigError, match=message):
        await server.start(lambda *_: None)
    await server.stop()

"""Bearer tokens, TLS and mutual TLS, with certificates made for the test."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import ssl
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2_grpc

from ep_server.client import Target, generate_request
from ep_server.config import Config
from ep_server.errors import ConfigError
from ep_server.frontend.interceptors import TokenFile
from ep_server.frontend.server import Server
from ep_server.testing.fake_ranks import FakeRanks
from ep_server.v1.control_pb2 import GetLoadsRequest
from ep_server.v1.control_pb2_grpc import ControlStub
from tests.support.certificates import issue, make_certificates
from tests.support.frontend import MODEL, Code, failure, logged, next_event, rest, serving, trailers
from tests.support.raw_client import RawClient


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
        call = reflection_pb2_grpc.ServerReflectionStub(served.client.channel).ServerReflectionInfo()
        assert await call.code() is Code.UNAUTHENTICATED  # a write after it would hide it
        assert await served.client.serving()  # health stays open: probes carry no token


async def test_a_changed_token_file_is_read_again(tokens: Path) -> None:
    async with serving(grpc__token_file=str(tokens), target=Target("", token="new-secret")) as served:
        assert (await failure(served.client.loads())).code() is Code.UNAUTHENTICATED
        replacement = tokens.with_name("next")
        replacement.write_text("new-secret\n")
        replacement.replace(tokens)  # as an operator, or a mounted secret, would do it
        assert await served.client.loads()


def test_an_empty_token_file_revokes_every_token(tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = TokenFile(str(tokens))
    assert known.accepts("Bearer secret-one") and known.accepts("bearer secret-two")
    tokens.write_text("# nothing\n")
    for header in ("Bearer secret-one", "Bearer ", "Bearer # nothing", None):
        assert not known.accepts(header)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert str(tokens) in caplog.text and "every call that needs a token is refused" in caplog.text


@pytest.mark.parametrize("content", [None, b"secret-one\n\xff\xfe"])
def test_an_unreadable_token_file_revokes_until_it_is_back(
    tokens: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    known, text = TokenFile(str(tokens)), tokens.read_text()
    if content is None:
        tokens.unlink()
    else:
        tokens.write_bytes(content)
    assert not any(known.accepts("Bearer secret-one") for _ in range(3))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    tokens.write_text(text)
    assert known.accepts("Bearer secret-one") and not known.accepts("Bearer secret-three")


def test_a_mounted_secret_is_swapped_by_its_link(tmp_path: Path) -> None:
    """As the kubelet does it: the file is a link through a folder that is a link."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens").write_text(f"{name}-secret\n")
    data = tmp_path / "..data"
    data.symlink_to("old")
    (tmp_path / "tokens").symlink_to("..data/tokens")
    known = TokenFile(str(tmp_path / "tokens"))
    assert known.accepts("Bearer old-secret")
    (tmp_path / "next").symlink_to("new")
    (tmp_path / "next").replace(data)
    assert known.accepts("Bearer new-secret") and not known.accepts("Bearer old-secret")
    data.unlink()
    assert not known.accepts("Bearer new-secret")
    data.symlink_to("new")
    assert known.accepts("Bearer new-secret")


async def test_callers_are_refused_once_the_token_file_is_gone(tokens: Path) -> None:
    async with serving(grpc__token_file=str(tokens), target=Target("", token="secret-one")) as served:
        assert await served.client.loads()
        tokens.unlink()
        assert (await failure(served.client.loads())).code() is Code.UNAUTHENTICATED
        assert (await failure(served.client.generate([1]))).code() is Code.UNAUTHENTICATED
        assert await served.client.serving()
        tokens.write_text("secret-one\n")
        assert await served.client.loads()


def test_a_token_file_must_be_there_and_hold_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grpc\.token_file = .*a readable file"):
        TokenFile(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n# no token\n")
    with pytest.raises(ConfigError, match="at least one token"):
        TokenFile(str(tmp_path / "empty"))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


async def test_tls(certificates: Path) -> None:
    server = {
        f"grpc__tls_{part}": str(certificates / f"server.{end}")
        for part, end in (("cert", "pem"), ("key", "key"))
    }
    async with serving(target=Target("", tls_ca=str(certificates / "ca.pem")), **server) as served:
        assert (await served.client.complete([1], max_new_tokens=1)).token_ids == [2]
        async with grpc.aio.insecure_channel(served.server.address) as plain:
            assert (await failure(ControlStub(plain).GetLoads(GetLoadsRequest()))).code() is Code.UNAVAILABLE


def _shown(address: str, ca: Path) -> str:
    """The certificate that a new connection gets, PEM."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), ca_certs=str(ca), timeout=30)


async def test_certificates_are_rotated_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ep_server")
    files = make_certificates(tmp_path)
    ca, pem, key = files / "ca.pem", files / "server.pem", files / "server.key"
    paths = {"grpc__tls_cert": str(pem), "grpc__tls_key": str(key)}
    async with serving(FakeRanks(), target=Target("", tls_ca=str(ca)), **paths) as served:
        address = served.server.address
        first, old_key = pem.read_text(), key.read_bytes()
        assert await asyncio.to_thread(_shown, address, ca) == first
        served.ranks.hold()
        open_stream = served.client.generate([1], max_new_tokens=3)
        await next_event(open_stream)  # the prompt's; no token yet

        issue(files, "server")
        key.write_bytes(old_key)  # half of a rotation: what does not fit is not taken
        assert pem.read_text() != first
        assert await asyncio.to_thread(_shown, address, ca) == first
        assert "the old ones stay in use: grpc.tls_cert" in caplog.text

        issue(files, "server")
        assert await asyncio.to_thread(_shown, address, ca) == pem.read_text() != first
        async with RawClient(Target(address, tls_ca=str(ca))) as newcomer:
            assert (await newcomer.server_info()).ranks == 1
        served.ranks.release()
        assert len(await rest(open_stream)) >= 1  # the stream from before goes on to its end


async def test_a_client_authority_is_rotated(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    paths = {
        f"grpc__tls_{name}": str(files / f"server.{end}") for name, end in (("cert", "pem"), ("key", "key"))
    }
    bundle = files / "clients.pem"
    bundle.write_bytes((files / "ca.pem").read_bytes())
    ca = str(files / "ca.pem")
    stranger = Target("", ca, str(files / "stranger.pem"), str(files / "stranger.key"))
    async with serving(target=stranger, grpc__tls_client_ca=str(bundle), **paths) as served:
        assert (await failure(served.client.loads())).code() is Code.UNAVAILABLE
        bundle.write_bytes((files / "ca.pem").read_bytes() + (files / "stranger.pem").read_bytes())
        async with RawClient(dataclasses.replace(stranger, address=served.server.address)) as again:
            assert (await again.server_info()).ranks == 1


@pytest.mark.parametrize("content", [None, b"", b"no certificate\n"])
async def test_removing_the_client_authority_revokes(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_certificates(tmp_path)
    paths = {
        f"grpc__tls_{name}": str(files / f"server.{end}") for name, end in (("cert", "pem"), ("key", "key"))
    }
    bundle, text = files / "clients.pem", (files / "ca.pem").read_bytes()
    bundle.write_bytes(text)
    known = Target("", str(files / "ca.pem"), str(files / "client.pem"), str(files / "client.key"))
    async with serving(target=known, grpc__tls_client_ca=str(bundle), **paths) as served:
        assert await served.client.loads()
        bundle.unlink() if content is None else bundle.write_bytes(content)
        target = dataclasses.replace(known, address=served.server.address)
        async with RawClient(target) as late:
            assert (await failure(late.loads())).code() is Code.UNAVAILABLE
        (error,) = logged(caplog, logging.ERROR)
        assert "grpc.tls_client_ca" in error
        bundle.write_bytes(text)
        async with RawClient(target) as again:
            assert await again.loads()


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

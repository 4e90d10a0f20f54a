"""Who is kept out of the rendezvous by tokens and TLS, and where it listens. Over real connections."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from ep_server.cluster.claim import hello_of
from ep_server.cluster.discovery import NodePlace
from ep_server.cluster.follower import joined
from ep_server.cluster.leader import Leader
from ep_server.cluster.security import bind_address, first_token
from ep_server.errors import ConfigError
from tests.support.certificates import make_certificates
from tests.support.cluster.rendezvous import (
    NODES,
    WAIT,
    config_of,
    rendezvous,
)


async def test_tokens_keep_strangers_out(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("# ours\n\nsecret\nolder\n")
    wrong.write_text("guess\n")
    async with rendezvous(cluster__token_file=str(right)) as meeting, asyncio.timeout(WAIT):
        claim = meeting.claim(1)
        for file in (str(wrong), ""):
            message = await meeting.refused(claim, cluster__token_file=file)
            assert message.endswith("does not take the token of cluster.token_file")
        async with meeting.join(claim) as link:
            assert link.reason == ""
            right.write_text("newer\nsecret\n")  # rotated: the first one of a file is shown, all are taken
            assert "joined under this number" in await meeting.refused(claim)


async def test_a_node_waits_for_a_token_that_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    async with rendezvous(cluster__token_file=str(token)) as meeting, asyncio.timeout(WAIT):
        claim, joining = meeting.claim(1), meeting.joining()
        token.unlink()

        async def come() -> str:
            async with joined(joining, hello_of(claim), lambda _: None) as link:
                return link.reason

        coming = asyncio.create_task(come())
        while "cluster.token_file" not in caplog.text:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # it tries more than once
        assert not coming.done() and len(caplog.records) == 1
        token.write_text("secret\n")
        assert await coming == ""


async def test_mutual_tls_keeps_strangers_out(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)

    def shown(name: str) -> dict[str, str]:
        return {
            "cluster__tls_cert": str(files / f"{name}.pem"),
            "cluster__tls_key": str(files / f"{name}.key"),
            "cluster__tls_ca": str(files / "ca.pem"),
        }

    quick = {"cluster__connect_seconds": 1.0}
    async with rendezvous(**shown("server")) as meeting, asyncio.timeout(WAIT):
        claim = meeting.claim(1)
        assert "was not reached" in await meeting.refused(claim, **(shown("stranger") | quick))
        bare = dict.fromkeys(shown("server"), "")
        assert "was not reached" in await meeting.refused(claim, **(bare | quick))
        async with meeting.join(claim, **shown("client")) as link:
            assert link.reason == ""


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_tls_between_nodes_is_mutual_or_not_at_all(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.tls_"):
        config_of(0, **{f"cluster__tls_{name}": "x"})


async def test_port_errors_use_the_names_of_cluster_options(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = NodePlace(0, NODES, "127.0.0.1", int(other.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"cluster\.rendezvous = .*in use"):
            await Leader(config_of(0), place).open(lambda server: None)
    missing = str(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"cluster\.token_file"):
        await Leader(config_of(0, cluster__token_file=missing), place).open(lambda server: None)
    with pytest.raises(ConfigError, match=r"cluster\.token_file"):
        first_token(missing)
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="at least one token"):
        first_token(str(tmp_path / "empty"))


def test_node_0_listens_on_its_own_address_or_on_all() -> None:
    assert [bind_address(host) for host in ("127.0.0.1", "localhost", "::1")] == [
        "127.0.0.1",
        "localhost",
        "::1",
    ]
    everywhere = bind_address("a-name.of.a.service")
    assert everywhere in ("::", "0.0.0.0")
    assert bind_address("198.51.100.7") == everywhere  # not of this host: an address that others see

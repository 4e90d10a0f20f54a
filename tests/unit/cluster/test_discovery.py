"""Which node a process is: from the configuration, a Pod's name, a hostfile, LeaderWorkerSet's variables."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from ep_server.cluster.discovery import NodePlace, Surroundings, find_place, resolved, this_host
from ep_server.config import RENDEZVOUS_PORT, ClusterConfig, Config
from ep_server.errors import ConfigError, StartupError


def host(name: str = "here", *, names: Collection[str] = ()) -> Surroundings:
    """A host of this name. names: what else leads to it."""
    return Surroundings(name, lambda other: other.lower() in (name.lower(), *names))


def place(surroundings: Surroundings | None = None, **cluster: Any) -> NodePlace:
    return find_place(ClusterConfig(**cluster), surroundings or host())


def refused(surroundings: Surroundings | None = None, **cluster: Any) -> str:
    with pytest.raises(ConfigError) as error:
        place(surroundings, **cluster)
    return str(error.value)


@pytest.fixture
def hostfile(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        (tmp_path / "hosts").write_text(text)
        return str(tmp_path / "hosts")

    return write


def test_one_node_needs_nothing() -> None:
    assert place() == place(node_rank=0) == NodePlace(0, 1)
    assert place(host("moe-ep-server-3"), rendezvous="nowhere") == NodePlace(0, 1)


def test_what_is_said_wins(hostfile: Any) -> None:
    file = hostfile("a\nb\nhere\n")
    assert place(nodes=2, node_rank=1, rendezvous="r:7") == NodePlace(1, 2, "r", 7)
    said = place(host("moe-0"), nodes=3, node_rank=2, rendezvous="moe-0.sets:7", hostfile=file)
    assert said == NodePlace(2, 3, "moe-0.sets", 7)
    assert place(node_rank=0, hostfile=file) == NodePlace(0, 3, "a", RENDEZVOUS_PORT)


@pytest.mark.parametrize(
    "given, address", [("[::1]:7", "[::1]:7"), ("10.0.0.1:65535", "10.0.0.1:65535"), ("x.y:1", "x.y:1")]
)
def test_addresses(given: str, address: str) -> None:
    assert place(nodes=2, node_rank=0, rendezvous=given).address == address


@pytest.mark.parametrize(
    "name, node", [("moe-ep-server-0", 0), ("moe-ep-server-1", 1), ("moe-ep-server-1.moe.svc", 1)]
)
def test_the_ordinal_of_a_pod(name: str, node: int) -> None:
    found = place(host(name), nodes=2, rendezvous="moe-ep-server-0.moe-ep-server-headless:7")
    assert found == NodePlace(node, 2, "moe-ep-server-0.moe-ep-server-headless", 7)


@pytest.mark.parametrize(
    "name, rendezvous",
    [
        ("other-1", "moe-0.sets:7"),  # of another set
        ("moe-1", "moe-3.sets:7"),  # Pod 3 does not lead
        ("moe-1", "10.0.0.1:7"),
        ("moe-01", "moe-0.sets:7"),
        ("moe1", "moe-0.sets:7"),
    ],
)
def test_a_number_in_a_name_is_an_ordinal_only_beside_pod_0(name: str, rendezvous: str) -> None:
    message = refused(host(name), nodes=2, rendezvous=rendezvous)
    assert message.startswith("cluster.node_rank = -1: must be given: none of ") and name in message


def test_the_line_of_the_hostfile(hostfile: Any) -> None:
    file = hostfile("# the group\nGPU-1 slots=8\n\n 10.0.0.2  # second\ngpu-3.cluster\n")
    assert place(host("gpu-1"), hostfile=file) == NodePlace(0, 3, "GPU-1", RENDEZVOUS_PORT)
    assert place(host(names=["10.0.0.2"]), hostfile=file).node == 1
    assert place(host(names=["gpu-3.cluster"]), hostfile=file, rendezvous="r:7") == NodePlace(2, 3, "r", 7)
    assert place(host("gpu-1"), hostfile=file, rendezvous=":7") == NodePlace(0, 3, "GPU-1", 7)
    assert place(host("gpu-1"), nodes=2, hostfile=file) == NodePlace(0, 2, "GPU-1", RENDEZVOUS_PORT)


def test_a_hostfile_of_one_host_is_one_node(hostfile: Any) -> None:
    assert place(host("a"), hostfile=hostfile("a\n")) == NodePlace(0, 1)


@pytest.mark.parametrize(
    "cluster, message",
    [
        ({"nodes": 2}, "cluster.rendezvous = '': must be host:port of node 0 with cluster.nodes = 2"),
        (
            {"nodes": 2, "rendezvous": "a"},
            "cluster.rendezvous = 'a': must be host:port, with a port of 1 to 65535",
        ),
        ({"nodes": 2, "rendezvous": "a:"}, "cluster.rendezvous = 'a:': must be host:port"),
        ({"nodes": 2, "rendezvous": "a:0"}, "cluster.rendezvous = 'a:0': must be host:port"),
        ({"nodes": 2, "rendezvous": "a:65536"}, "cluster.rendezvous = 'a:65536': must be host:port"),
        ({"nodes": 2, "rendezvous": "a:1٣"}, "cluster.rendezvous = 'a:1٣': must be host:port"),
        ({"nodes": 2, "rendezvous": ":7"}, "cluster.rendezvous = ':7': must be host:port"),
        ({"nodes": 2, "rendezvous": "::1:7"}, "cluster.rendezvous = '::1:7': must be [address]:port"),
        (
            {"nodes": 2, "node_rank": 2, "rendezvous": "a:7"},
            "cluster.node_rank = 2: must be 0 to 1, with cluster.nodes = 2",
        ),
        ({"node_rank": 1}, "cluster.node_rank = 1: must be 0 to 0, with cluster.nodes = 1"),
        ({"nodes": 2, "rendezvous": "a:7"}, "cluster.node_rank = -1: must be given"),
    ],
)
def test_mistakes_are_named(cluster: dict[str, Any], message: str) -> None:
    assert refused(**cluster).startswith(message)


@pytest.mark.parametrize(
    "text, cluster, message",
    [
        ("a\nb\n", {"nodes": 3}, "cluster.nodes = 3: must be at most 2, the hosts in cluster.hostfile"),
        ("a\nB\nb\n", {}, "names each host once, b comes twice"),
        ("# none\n\n", {}, "a file with at least one host"),
        ("a\nb\nhere\n", {"nodes": 2}, "cluster.node_rank = -1: must be given: none of"),
        ("a\nb\n", {}, "cluster.hostfile says which node here is"),
        ("a\nhere\nhome\n", {}, "given: here and home in cluster.hostfile are both this host"),
        ("a\nhere\n", {"rendezvous": "b"}, "cluster.rendezvous = 'b': must be host:port"),
        ("a " * (1 << 20), {}, "a file of at most 1048576 characters"),
    ],
)  # fmt: skip
def test_mistakes_of_a_hostfile_are_named(
    hostfile: Any, text: str, cluster: dict[str, Any], message: str
) -> None:
    assert message in refused(host(names=["home"]), hostfile=hostfile(text), **cluster)


def test_a_hostfile_must_be_there(tmp_path: Path) -> None:
    assert refused(hostfile=str(tmp_path / "none")).startswith("cluster.hostfile = ")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert "must be a readable file" in refused(hostfile=str(tmp_path / "bytes"))


# -- LeaderWorkerSet -------------------------------------------------------------------------------------

LWS = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3", "LWS_LEADER_ADDRESS": "moe-0.moe.space"}


def loaded(environ: dict[str, str], **flags: Any) -> ClusterConfig:
    return Config.load(None, {f"cluster.{name}": value for name, value in flags.items()}, environ).cluster


def test_what_leader_worker_set_says_is_enough() -> None:
    assert find_place(loaded(LWS), host("moe-0-3")) == NodePlace(3, 4, "moe-0.moe.space", RENDEZVOUS_PORT)
    assert find_place(loaded(LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}), host()) == NodePlace(
        0, 1
    )


def test_every_other_source_wins_over_leader_worker_set() -> None:
    found = loaded(LWS, nodes=2, node_rank=1, rendezvous="r:7")
    assert (found.nodes, found.node_rank, found.rendezvous) == (2, 1, "r:7")
    assert loaded(LWS | {"EP_SERVER_CLUSTER__NODE_RANK": "2"}).node_rank == 2
    assert loaded(LWS, node_rank=-1).node_rank == 3  # -1 asks for it
    assert loaded(LWS, rendezvous=":7").rendezvous == "moe-0.moe.space:7"
    assert loaded({}) == ClusterConfig()


def test_a_bad_variable_names_the_field() -> None:
    with pytest.raises(ConfigError, match=re.escape("cluster.node_rank = 'three': must be a number (int)")):
        loaded(LWS | {"LWS_WORKER_INDEX": "three"})


# -- what comes of it ------------------------------------------------------------------------------------


def test_a_settled_configuration_says_the_same_anywhere(hostfile: Any) -> None:
    config = Config.load(None, {"cluster.hostfile": hostfile("a\nhere\n")}, {})
    found = find_place(config.cluster, host())
    settled = found.settled(config)
    assert settled.cluster.hostfile == "" and settled.cluster.rendezvous == f"a:{RENDEZVOUS_PORT}"
    assert find_place(settled.cluster, host("elsewhere")) == found
    assert NodePlace(0, 1).settled(Config()).cluster == ClusterConfig(node_rank=0)


def test_more_ranks_than_a_group_can_have() -> None:
    config = Config.load(None, {"cluster.nodes": 22, "parallel.ranks": 3}, {})
    with pytest.raises(
        ConfigError, match=r"cluster\.nodes = 22: must be at most 21 with parallel\.ranks = 3"
    ):
        NodePlace(1, 22, "a", 1).settled(config)
    NodePlace(1, 21, "a", 1).settled(config)


def test_this_host_knows_its_name_and_addresses() -> None:
    here = this_host()
    assert here.name == socket.gethostname()
    for own in (here.name, here.name.upper(), "localhost", "127.0.0.1"):
        assert here.is_here(own)
    for other in ("192.0.2.1", "no-such-host.invalid"):  # reserved for documents and for tests
        assert not here.is_here(other)


async def test_a_name_is_asked_for_until_it_is_there() -> None:
    asked = []

    async def resolve(name: str) -> list[str]:
        asked.append(name)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ["10.0.0.1"]

    assert await resolved("pod-0", 30.0, resolve) == ["10.0.0.1"] and asked == ["pod-0"] * 3
    assert await resolved("127.0.0.1", 5.0) == ["127.0.0.1"]


async def test_a_name_that_never_comes_is_named() -> None:
    async def resolve(_: str) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(
        StartupError, match=r"pod-0 has no address after .* = 0\.15 \(name or service not known\)"
    ):
        await resolved("pod-0", 0.15, resolve)

    async def hangs(_: str) -> list[str]:
        await asyncio.Event().wait()
        return []

    with pytest.raises(StartupError, match="no answer"):
        await resolved("pod-0", 0.05, hangs)

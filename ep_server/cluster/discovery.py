"""[1] Finds this node's number, the number of nodes, and node 0's address, from configuration and host name.

The configuration wins (LeaderWorkerSet's variables are a source of it, see config.py). Next is the ordinal at
the end of a Pod's name, if the rendezvous names Pod 0 of the same StatefulSet. Last is the line of the
hostfile that names this host. Node 0 listens on the rendezvous, or on the first host of the file.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ep_server.config import RENDEZVOUS_PORT, ClusterConfig, Config
from ep_server.errors import ConfigError, StartupError
from ep_server.exchange.spec import MAX_RANKS

FIRST_WAIT, LONGEST_WAIT = 0.1, 2.0  # seconds between two lookups of a name
MAX_HOSTFILE_BYTES = 1 << 20

_POD = re.compile(r"(?P<set>.+)-(?P<ordinal>0|[1-9][0-9]*)")
_WITH_PORT = "host:port, with a port of 1 to 65535"

Resolve = Callable[[str], Awaitable[list[str]]]


@dataclass(frozen=True, slots=True)
class NodePlace:
    """node: 0 leads. rendezvous_host, rendezvous_port: of node 0; "" and 0 if there is only one node."""

    node: int
    nodes: int
    rendezvous_host: str = ""
    rendezvous_port: int = 0

    @property
    def address(self) -> str:
        """host:port of node 0, an IPv6 address in brackets."""
        host = self.rendezvous_host
        return f"[{host}]:{self.rendezvous_port}" if ":" in host else f"{host}:{self.rendezvous_port}"

    def settled(self, config: Config) -> Config:
        """The configuration with this place filled in, instead of its sources.

        Raises: ConfigError for more ranks than a group can have.
        """
        ranks = config.parallel.ranks
        if self.nodes * ranks > MAX_RANKS:
            allowed = f"at most {MAX_RANKS // ranks} with parallel.ranks = {ranks}: {MAX_RANKS} ranks in all"
            raise ConfigError("cluster.nodes", self.nodes, allowed)
        address = self.address if self.nodes > 1 else ""
        cluster = replace(
            config.cluster, nodes=self.nodes, node_rank=self.node, rendezvous=address, hostfile=""
        )
        return replace(config, cluster=cluster)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Facts about this host. name: as `hostname` prints it. is_here: whether a host is this one."""

    name: str
    is_here: Callable[[str], bool]


def find_place(cluster: ClusterConfig, surroundings: Surroundings) -> NodePlace:
    """Finds the place. Raises: ConfigError that names field and value."""
    hosts = _hosts(cluster.hostfile) if cluster.hostfile else []
    nodes = cluster.nodes if cluster.nodes > 1 else max(len(hosts), 1)
    if hosts and nodes > len(hosts):
        allowed = f"at most {len(hosts)}, the hosts in cluster.hostfile"
        raise ConfigError("cluster.nodes", nodes, allowed)
    if nodes == 1:
        _check_node(cluster.node_rank, nodes)
        return NodePlace(0, 1)
    host, port = _rendezvous(cluster, nodes, hosts)
    node = cluster.node_rank
    if node < 0:
        node = _node_here(host, hosts[:nodes], surroundings)
    _check_node(node, nodes)
    return NodePlace(node, nodes, host, port)


def this_host() -> Surroundings:
    """The host that this process runs on."""
    return Surroundings(socket.gethostname(), _is_here)


async def resolved(host: str, seconds: float, resolve: Resolve | None = None) -> list[str]:
    """Addresses of a host. Retries until there are any, because names of Pods appear as these start.

    Args:
        resolve: raises OSError while the name has no address; the system's if None.
    Raises: StartupError after so many seconds.
    """
    resolve = resolve or _resolve
    wait, reason = FIRST_WAIT, "no answer"
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return await resolve(host)
                except OSError as error:
                    reason = (error.strerror or str(error)).lower()
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)
    field = "cluster.rendezvous"
    raise StartupError(
        f"{field}: {host} has no address after cluster.connect_seconds = {seconds:g} ({reason})"
    )


def _hosts(path: str) -> list[str]:
    """The first word of each line; comments and empty lines are skipped."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MAX_HOSTFILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("cluster.hostfile", path, f"a readable file ({error})") from error
    if len(text) > MAX_HOSTFILE_BYTES:
        raise ConfigError("cluster.hostfile", path, f"a file of at most {MAX_HOSTFILE_BYTES} characters")
    words = [line.partition("#")[0].split() for line in text.splitlines()]
    hosts = [line[0] for line in words if line]
    if not hosts:
        raise ConfigError("cluster.hostfile", path, "a file with at least one host")
    seen: set[str] = set()
    for host in hosts:
        if host.lower() in seen:
            raise ConfigError(
                "cluster.hostfile", path, f"a file that names each host once, {host} comes twice"
            )
        seen.add(host.lower())
    return hosts


def _rendezvous(cluster: ClusterConfig, nodes: int, hosts: list[str]) -> tuple[str, int]:
    if not cluster.rendezvous:
        if hosts:
            return hosts[0], RENDEZVOUS_PORT
        raise ConfigError("cluster.rendezvous", "", f"host:port of node 0 with cluster.nodes = {nodes}")
    host, separator, port = cluster.rendezvous.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not separator or not port.isascii() or not port.isdecimal() or not 1 <= int(port[:6]) <= 65535:
        raise ConfigError("cluster.rendezvous", cluster.rendezvous, _WITH_PORT)
    if ":" in host and not bracketed:
        raise ConfigError("cluster.rendezvous", cluster.rendezvous, "[address]:port for an IPv6 address")
    host = host[1:-1] if bracketed else host
    if not host and not hosts:
        raise ConfigError("cluster.rendezvous", cluster.rendezvous, _WITH_PORT)
    return host or hosts[0], int(port)


def _node_here(leader: str, hosts: list[str], surroundings: Surroundings) -> int:
    """The number of this node, if the configuration does not set it."""
    first = _POD.fullmatch(leader.partition(".")[0])
    own = _POD.fullmatch(surroundings.name.partition(".")[0])
    if first and own and first["ordinal"] == "0" and own["set"] == first["set"]:
        return int(own["ordinal"])
    here = [number for number, host in enumerate(hosts) if surroundings.is_here(host)]
    if len(here) == 1:
        return here[0]
    if here:
        both = " and ".join(hosts[number] for number in here[:2])
        raise ConfigError("cluster.node_rank", -1, f"given: {both} in cluster.hostfile are both this host")
    sources = "LeaderWorkerSet, the ordinal of a Pod of the rendezvous' StatefulSet, cluster.hostfile"
    allowed = f"given: none of {sources} says which node {surroundings.name} is"
    raise ConfigError("cluster.node_rank", -1, allowed)


def _check_node(node: int, nodes: int) -> None:
    if node >= nodes:
        raise ConfigError("cluster.node_rank", node, f"0 to {nodes - 1}, with cluster.nodes = {nodes}")


def _is_here(host: str) -> bool:
    """Whether a name or address is this host's: its own name, or an address that can be bound here."""
    names = {socket.gethostname().lower(), socket.gethostname().partition(".")[0].lower()}
    if host.lower() in names or host.lower() == socket.getfqdn().lower():
        return True
    with suppress(OSError):
        return any(_is_bindable(*found) for found in _addresses(host))
    return False


def _addresses(host: str) -> list[tuple[int, str]]:
    """(family, address), each once. Raises: OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    return list(dict.fromkeys((int(family), str(address[0])) for family, _, _, _, address in found))


def _is_bindable(family: int, address: str) -> bool:
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


async def _resolve(host: str) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))

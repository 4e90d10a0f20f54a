"""Ends of exchanges in groups that mix shared memory and network: which ranks share a host, and what."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.host import HostExchange
from ep_server.exchange.segment import HostShare, create_host_share
from ep_server.exchange.spec import Waiting
from ep_server.testing.namespaces import enter
from tests.support.exchange.ranks import poison
from tests.support.fabric.fabric_ends import connected, through_file, through_group

PASS_SECONDS = 30.0


@dataclass(frozen=True)
class MixedEnd:
    """One rank's: where all meet (a file), its network, its host's share, the namespace it moves to."""

    meeting: str
    options: FabricOptions
    share: HostShare
    namespace: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Descriptors survive pickling into a spawned child."""
        descriptors = [DupFd(fd) for fd in self.share.descriptors]
        return (_detach, (self.meeting, self.options, self.share.hosts, descriptors, self.namespace))

    def open(self, spec: ExchangeSpec, **waiting: Any) -> HostExchange:
        if self.namespace:
            enter(self.namespace)
        try:
            link = FabricLink(spec, self.options, Waiting(**waiting), self.share)
        finally:
            self.share.close()
        return connected(link, through_file(self.meeting, spec))


def _detach(
    meeting: str, options: FabricOptions, hosts: tuple[int, ...], descriptors: list[Any], namespace: str
) -> MixedEnd:
    fd, *bells = [int(one.detach()) for one in descriptors]
    return MixedEnd(meeting, options, HostShare(hosts, fd, tuple(bells)), namespace)


@contextlib.contextmanager
def mixed_ends(
    folder: Path,
    hosts: tuple[int, ...],
    spec_kwargs: dict[str, Any],
    options: FabricOptions,
    namespaces: tuple[str, ...] = (),
) -> Iterator[list[MixedEnd]]:
    """Of ranks on these hosts. namespaces: one per host, or none: all on the loopback."""
    spec = ExchangeSpec(rank=0, num_ranks=len(hosts), **spec_kwargs)
    with contextlib.ExitStack() as stack:
        shares = {}
        for host in sorted(set(hosts)):
            shares[host] = create_host_share(spec, hosts, host)
            stack.callback(shares[host].close)
            poison(shares[host].fd, spec)
        meeting = str(folder / "meeting")
        yield [
            MixedEnd(meeting, options, shares[host], namespaces[host] if namespaces else "") for host in hosts
        ]


def from_process_group(
    options: FabricOptions, hosts: tuple[int, ...], spec: ExchangeSpec, group: dist.ProcessGroup
) -> HostExchange:
    """An exchange of ranks that run already: the first of each host makes its share and passes it on."""
    share = _share(hosts, spec, group)
    try:
        link = FabricLink(spec, options, share=share)
    finally:
        share.close()
    return connected(link, through_group(group))


def _share(hosts: tuple[int, ...], spec: ExchangeSpec, group: dist.ProcessGroup) -> HostShare:
    host = hosts[spec.rank]
    first = hosts.index(host)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ours:
        ours.settimeout(PASS_SECONDS)
        if spec.rank == first:
            ours.bind(f"\0ep_server_test/{secrets.token_hex(16)}")
            ours.listen(spec.num_ranks)
        addresses: list[Any] = [None] * spec.num_ranks
        dist.all_gather_object(addresses, ours.getsockname(), group=group)
        if spec.rank != first:
            ours.connect(addresses[first])
            _, (fd, *bells), _, _ = socket.recv_fds(ours, 1, spec.num_ranks + 1)
            return HostShare(hosts, fd, tuple(bells))
        share = create_host_share(spec, hosts, host)
        poison(share.fd, spec)
        for _ in range(hosts.count(host) - 1):
            client, _address = ours.accept()
            with client:
                socket.send_fds(client, [b"\0"], list(share.descriptors))
        return share

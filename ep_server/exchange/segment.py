"""Creates the memory that the ranks of one host share, and reports how much is available. Units: bytes.

The frontend creates it before its ranks start; they inherit the descriptors. This module needs no torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ep_server import _C
from ep_server.errors import ConfigError, StartupError
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.spec import check_hosts, geometry_of, group_bytes


def create_segment(spec: ExchangeSpec) -> int:
    """Creates the memory of a group on one host, all pages at once, before its ranks start.

    Args:
        spec: of any rank.
    Returns: a descriptor, close-on-exec. Ranks inherit it (`pass_fds`) and open their group with it; every
      holder closes its own. The memory is freed with the last mapping and descriptor.
    Raises: ConfigError; StartupError with the numbers where the host has too little memory.
    """
    what = f"the exchange of {spec.num_ranks} ranks needs"
    return _created(spec, group_bytes(spec), what, lambda: _C.create_segment(geometry_of(spec)))


def _created(spec: ExchangeSpec, needed: int, what: str, create: Callable[[], int]) -> int:
    available = available_memory()
    too_little = (
        f"{what} {needed / 2**20:.1f} MiB of shared memory, {available / 2**20:.1f} MiB are available: "
        f"lower max_tokens ({spec.max_tokens}) or num_banks ({spec.num_banks})"
    )
    if needed > available:
        raise StartupError(too_little)
    try:
        return create()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise StartupError(too_little) from error
        raise StartupError(f"the exchange segment of {needed} bytes cannot be created: {error}") from error


def report_lost(segment: int, rank: int, generation: int) -> None:
    """Ends every wait of the group: its ranks raise PeerLost until they reset it. From any process.

    Args:
        segment: descriptor of create_segment(). rank: its process has ended.
        generation: in force, or the one that forms.
    """
    _C.Segment(segment).abort_without(rank, generation)


def available_memory() -> int:
    """Bytes that this process may still allocate: the host's free memory, limited by the control group."""
    limits = [_meminfo_available()]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            limits.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(0, min(limits))


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


@dataclass(frozen=True, slots=True)
class HostShare:
    """What the ranks of one host share. The caller closes the descriptors once the ranks have theirs.

    hosts: [R] number of each rank's host.
    fd: the memory, with one region per rank of this host.
    bells: one eventfd per rank of this host, in rank order. A writer wakes a rank that sleeps on the network
      with it.
    """

    hosts: tuple[int, ...]
    fd: int
    bells: tuple[int, ...]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All of them, for `pass_fds`."""
        return (self.fd, *self.bells)

    def close(self) -> None:
        """Closes the descriptors of this process; its exchanges have their own. Once."""
        for fd in self.descriptors:
            os.close(fd)


def create_host_share(spec: ExchangeSpec, hosts: tuple[int, ...], host: int) -> HostShare:
    """Creates what the ranks of a host share, all pages at once, before they start.

    Args:
        spec: of any rank. hosts: [R] number of each rank's host. host: this one's.
    Returns: close-on-exec descriptors, which the ranks inherit (`pass_fds`) and give to FabricLink.
    Raises: ConfigError; StartupError with the numbers where the host has too little memory.
    """
    check_hosts(hosts, spec)
    here = hosts.count(host)
    if not here:
        raise ConfigError("host", host, f"one of {sorted(set(hosts))}, on which there are ranks")
    if not _C.FABRIC:
        raise StartupError("this build cannot reach other hosts: it has no headers of libfabric")
    geometry = geometry_of(spec)
    needed, what = _C.host_segment_bytes(geometry, here), f"the exchange of {here} ranks of host {host} needs"
    fd = _created(spec, needed, what, lambda: _C.create_host_segment(geometry, here))
    return HostShare(hosts, fd, _bells(fd, here))


def _bells(fd: int, count: int) -> tuple[int, ...]:
    made: list[int] = []
    try:
        for _ in range(count):
            made.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    except OSError as error:
        for one in (fd, *made):
            os.close(one)
        raise StartupError(f"no eventfd for a rank of this host: {error}") from error
    return tuple(made)

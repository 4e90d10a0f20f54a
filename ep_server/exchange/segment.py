"""Creates the memory that the ranks of one host share, and reports how much there is. Units: bytes.

The front creates it before its ranks start, and they inherit its descriptors. So this module needs no torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path

from ep_server import _C
from ep_server.errors import ConfigError, StartupError
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.geometry import geometry_of, group_bytes


def create_segment(spec: ExchangeSpec) -> int:
    """Creates the memory of a group, all pages at once, before its ranks start.

    Args:
        spec: of any rank.
    Returns: a descriptor, close-on-exec. Ranks inherit it (`pass_fds`) and give it to ShmExchange; every
      holder closes its own. The memory is gone when the last mapping and descriptor are.
    Raises: ConfigError; StartupError with the numbers where the host has too little memory.
    """
    needed, available = group_bytes(spec), available_memory()
    if needed > available:
        raise _too_little(spec, needed, available)
    try:
        return _C.create_segment(geometry_of(spec))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise _too_little(spec, needed, available) from error
        raise StartupError(f"the exchange segment of {needed} bytes cannot be created: {error}") from error


def available_memory() -> int:
    """Bytes that this process may still get: what the host has and what its control group allows."""
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


def _too_little(spec: ExchangeSpec, needed: int, available: int) -> StartupError:
    return StartupError(
        f"the exchange of {spec.num_ranks} ranks needs {needed / 2**20:.1f} MiB of shared memory, "
        f"{available / 2**20:.1f} MiB are available: lower max_tokens ({spec.max_tokens}) "
        f"or num_banks ({spec.num_banks})"
    )


@dataclass(frozen=True, slots=True)
class HostShare:
    """What one host's ranks share. The descriptors stay the caller's, who closes them once ranks have theirs.

    hosts: [R] number of each rank's host.
    fd: the memory, with one region per rank of this host.
    bells: one eventfd per rank of this host, in rank order; whoever writes to a rank that sleeps on the
      network rings its bell.
    """

    hosts: tuple[int, ...]
    fd: int
    bells: tuple[int, ...]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All of them, as `pass_fds` wants them."""
        return (self.fd, *self.bells)

    def close(self) -> None:
        """Closes the descriptors of this process; its exchanges have their own. Once."""
        for fd in self.descriptors:
            os.close(fd)


def check_hosts(hosts: tuple[int, ...], spec: ExchangeSpec) -> None:
    """Raises ConfigError unless `hosts` has a number for every rank."""
    if len(hosts) != spec.num_ranks:
        raise ConfigError("hosts", hosts, f"one number per rank: {spec.num_ranks}")
    if not all(0 <= host < 1 << 16 for host in hosts):
        raise ConfigError("hosts", hosts, f"numbers from 0 to {(1 << 16) - 1}")


def create_host_share(spec: ExchangeSpec, hosts: tuple[int, ...], host: int) -> HostShare:
    """Makes it, all pages at once, before the ranks of this host start.

    Args:
        spec: of any rank. hosts: [R] number of each rank's host. host: this one's.
    Returns: close-on-exec descriptors, which the ranks inherit (`pass_fds`) and give to FabricExchange. All
      is gone when the last mapping and descriptor are.
    Raises: ConfigError; StartupError with the numbers where the host has too little memory.
    """
    check_hosts(hosts, spec)
    here = hosts.count(host)
    if not here:
        raise ConfigError("host", host, f"one of {sorted(set(hosts))}, on which there are ranks")
    if not _C.FABRIC:
        raise StartupError("this build cannot reach other hosts: it has no headers of libfabric")
    geometry = geometry_of(spec)
    needed, available = _C.host_segment_bytes(geometry, here), available_memory()
    too_little = (
        f"the {here} ranks of host {host} need {needed / 2**20:.1f} MiB of shared memory for the exchange, "
        f"{available / 2**20:.1f} MiB are available: lower max_tokens ({spec.max_tokens}) "
        f"or num_banks ({spec.num_banks})"
    )
    if needed > available:
        raise StartupError(too_little)
    try:
        fd = _C.create_host_segment(geometry, here)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise StartupError(too_little) from error
        raise StartupError(f"the exchange segment of {needed} bytes cannot be created: {error}") from error
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

"""Gives the ranks of a group their common memory. Knows sizes and descriptors, nothing of operations.

On one host a group has one anonymous segment without a name: whoever starts the ranks creates it and lets
them inherit the descriptor, or `from_process_group` passes it over a Unix socket. Units: bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ep_server import _C
from ep_server.ep.exchange import ExchangeSpec
from ep_server.ep.geometry import geometry_of, group_bytes
from ep_server.ep.native import NativeExchange
from ep_server.errors import ConfigError, StartupError

PASS_SECONDS = 60.0  # to hand the descriptor to every rank


def create_segment(spec: ExchangeSpec) -> int:
    """Creates the memory of a group, all pages at once, before its ranks start.

    Args:
        spec: of any rank.
    Returns: a descriptor, close-on-exec. Ranks inherit it (`pass_fds`) and give it to NativeExchange; every
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


def from_process_group(group: Any, spec: ExchangeSpec, **options: Any) -> NativeExchange:
    """An exchange for the ranks of a torch.distributed group on one host. Collective.

    Args:
        group: a ProcessGroup with object collectives (gloo), or None for the default one.
        spec: rank and num_ranks must be those of the group.
        options: keywords of NativeExchange.
    Raises: ConfigError, StartupError (on every rank if rank 0 cannot create the segment).
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if (spec.rank, spec.num_ranks) != (rank, size):
        raise ConfigError("rank, num_ranks", (spec.rank, spec.num_ranks), f"{(rank, size)}, as in the group")
    _check_one_host(group, size)
    with contextlib.ExitStack() as stack:
        fd = _share(group, spec, stack)
        exchange = NativeExchange(spec, fd=fd, **options)
    exchange.barrier()
    return exchange


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


def _check_one_host(group: Any, size: int) -> None:
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, Path("/proc/sys/kernel/random/boot_id").read_text().strip(), group=group)
    if len(set(hosts)) != 1:
        raise ConfigError("group", f"ranks on {len(set(hosts))} hosts", "on one host for shared memory")


def _share(group: Any, spec: ExchangeSpec, stack: contextlib.ExitStack) -> int:
    """The segment's descriptor on every rank; closed by the stack."""
    address: list[Any] = [None]
    server = None
    if spec.rank == 0:
        try:
            fd = create_segment(spec)
            stack.callback(os.close, fd)
            server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            server.bind(f"\0ep_server/{secrets.token_hex(16)}")  # abstract: no file to leave behind
            server.listen(spec.num_ranks)
            address = [server.getsockname()]
        except (StartupError, OSError) as error:
            address = [error]
    dist.broadcast_object_list(address, src=dist.get_global_rank(group, 0) if group else 0, group=group)
    if isinstance(address[0], Exception):
        raise StartupError(str(address[0]))
    if server is not None:
        _serve(server, fd, spec.num_ranks - 1)
        return fd
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(PASS_SECONDS)
        client.connect(address[0])
        _, fds, _, _ = socket.recv_fds(client, 1, 1)
    if not fds:
        raise StartupError("rank 0 closed the socket before it passed the exchange segment")
    stack.callback(os.close, fds[0])
    return fds[0]


def _serve(server: socket.socket, fd: int, count: int) -> None:
    server.settimeout(PASS_SECONDS)
    while count:
        client, _ = server.accept()
        with client:
            peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", peer)[1] != os.getuid():
                continue  # another user of this host found the name: it gets nothing
            socket.send_fds(client, [b"\0"], [fd])
            count -= 1

"""Makes the exchanges of ranks that already have a torch.distributed group, on one host.

Rank 0 creates the group's segment and passes its descriptor to the others over a Unix socket. Ranks that are
started for the purpose inherit it instead (segment.py). Knows descriptors, nothing of operations.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ep_server.errors import ConfigError, StartupError
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.segment import create_segment
from ep_server.exchange.shm import ShmExchange

PASS_SECONDS = 60.0  # to hand the descriptor to every rank


def from_process_group(group: Any, spec: ExchangeSpec, **options: Any) -> ShmExchange:
    """An exchange for the ranks of a torch.distributed group on one host. Collective.

    Args:
        group: a ProcessGroup with object collectives (gloo), or None for the default one.
        spec: rank and num_ranks must be those of the group.
        options: keywords of ShmExchange.
    Raises: ConfigError, StartupError (on every rank if rank 0 cannot create the segment).
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if (spec.rank, spec.num_ranks) != (rank, size):
        raise ConfigError("rank, num_ranks", (spec.rank, spec.num_ranks), f"{(rank, size)}, as in the group")
    _check_one_host(group, size)
    with contextlib.ExitStack() as stack:
        fd = _share(group, spec, stack)
        exchange = ShmExchange(spec, fd=fd, **options)
    exchange.barrier()
    return exchange


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

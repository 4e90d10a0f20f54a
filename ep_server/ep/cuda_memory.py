"""Passes the memory of GPUs between the processes of a group: descriptors over Unix sockets, in pairs.

Needs an exchange of the same ranks for the addresses. Knows nothing of what the memory holds. Seconds.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import struct
import threading
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from ep_server.ep import bootstrap
from ep_server.ep.exchange import ExchangeSpec
from ep_server.ep.native import NativeExchange
from ep_server.errors import ConfigError, StartupError

PASS_SECONDS = 60.0


def share_regions(control: NativeExchange, spec: ExchangeSpec, group: Any) -> None:
    """Gives every rank's region to every other and attaches theirs. Collective.

    Args:
        group: a `_cuda.Group`.
    Raises: ConfigError where specs differ; StartupError where a peer's memory cannot be had.
    """
    _check_alike(control, spec)
    fd = group.export_fd()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(f"\0ep_server/{secrets.token_hex(16)}")  # abstract: no file to leave behind
            server.listen(spec.num_ranks)
            server.settimeout(PASS_SECONDS)
            names = control.all_gather(server.getsockname())
            serving = threading.Thread(target=_serve, args=(server, fd, spec.num_ranks - 1), daemon=True)
            serving.start()
            for peer, name in enumerate(names):
                if peer != spec.rank:
                    _attach(group, peer, name)
            serving.join(PASS_SECONDS)
            control.barrier()
    finally:
        os.close(fd)


def _check_alike(control: NativeExchange, spec: ExchangeSpec) -> None:
    fields = {k: str(v) for k, v in asdict(spec).items() if k not in {"rank", "timeout_ns"}}
    digest = hashlib.blake2b(repr(fields).encode(), digest_size=32).digest()
    for peer, theirs in enumerate(control.all_gather(digest)):
        if theirs != digest:
            raise ConfigError("spec", f"another one than rank {peer}'s", "the same on all ranks but for rank")


def _serve(server: socket.socket, fd: int, count: int) -> None:
    while count:
        try:
            client, _ = server.accept()
        except OSError:
            return  # the peers' own deadlines say what is missing
        with client:
            peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", peer)[1] != os.getuid():
                continue  # another user of this host found the name: it gets nothing
            socket.send_fds(client, [b"\0"], [fd])
            count -= 1


def _attach(group: Any, peer: int, name: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(PASS_SECONDS)
        client.connect(name)
        _, fds, _, _ = socket.recv_fds(client, 1, 1)
    if not fds:
        raise StartupError(f"rank {peer} closed the socket before it passed its memory")
    try:
        group.attach(peer, fds[0])
    finally:
        os.close(fds[0])


def from_process_group(group: Any, spec: ExchangeSpec, **options: Any) -> Any:
    """A CudaExchange for the ranks of a torch.distributed group on one host. Collective.

    Args:
        group: a ProcessGroup with object collectives (gloo), or None for the default one.
        options: keywords of CudaExchange.
    """
    from ep_server.ep.cuda import CudaExchange  # imports this module
    from ep_server.ep.cuda_handle import control_spec

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if (spec.rank, spec.num_ranks) != (rank, size):
        raise ConfigError("rank, num_ranks", (spec.rank, spec.num_ranks), f"{(rank, size)}, as in the group")
    control = bootstrap.from_process_group(group, control_spec(spec))
    return CudaExchange(spec, control=control, **options)

"""How the ranks of one host share memory: descriptors, passed over Unix sockets whose names all ranks gather.

Every transport starts this way, except on ranks that inherit what they need (segment.py). The ranks of a
group may be processes, or threads of one. Durations in seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import NamedTuple, Protocol

from ep_server.errors import ConfigError, StartupError
from ep_server.exchange.spec import MAX_RANKS, ExchangeSpec

PASS_SECONDS = 60.0  # to pass descriptors
_TAKEN, _FAILED = b"taken", b"failed"
MOST_PASSED = 1 + MAX_RANKS  # a segment, and a bell for each rank


class Rendezvous(Protocol):
    """Connects ranks before they share memory: an exchange or a HostGroup."""

    def all_gather(self, record: bytes) -> list[bytes]:
        """A record of at most 64 bytes of every rank, in rank order."""
        ...

    def barrier(self) -> None:
        """Returns once every rank has called it. Has no deadline."""
        ...


class Shareable(Protocol):
    """A region of GPU memory and its peers: a `_cuda.Group`."""

    def export_fd(self) -> int:
        """A new descriptor of this rank's region."""
        ...

    def attach(self, rank: int, fd: int) -> None:
        """Maps a peer's region; the descriptor stays the caller's."""
        ...


def share_segment(rendezvous: Rendezvous, rank: int, ranks: range, create: Callable[[], int]) -> int:
    """share_descriptors() of one segment."""
    return share_descriptors(rendezvous, rank, ranks, lambda: (create(),))[0]


def share_descriptors(
    rendezvous: Rendezvous, rank: int, ranks: range, create: Callable[[], Sequence[int]]
) -> list[int]:
    """Descriptors of the same things on each of `ranks`, for the caller to close.

    Args:
        rendezvous: of all ranks, also others than `ranks`: collective over them.
        rank: this one, of `ranks`. create: makes the things, on the first of them.
    """
    with contextlib.ExitStack() as stack:
        name = b""
        if rank == ranks.start:
            made = create()
            for one in made:
                stack.callback(os.close, one)
            server = stack.enter_context(listening(len(ranks)))
            name = server.getsockname()
            stack.callback(Serving(server, made, len(ranks)).stop)
        rendezvous.barrier()  # creating a large segment takes its time
        names, taken, failed = rendezvous.all_gather(name), list[int](), None
        try:
            taken = take_descriptors(ranks.start, names[ranks.start])
        except StartupError as error:
            failed = error
        try:
            rendezvous.barrier()  # until then the first rank serves
            outcomes = rendezvous.all_gather(_FAILED if failed else _TAKEN)
            if _FAILED in outcomes:
                what = f"rank {outcomes.index(_FAILED)} cannot take what the first rank of its host shares"
                raise failed or StartupError(what)
        except BaseException:
            for one in taken:
                os.close(one)
            raise
        return taken


def share_regions(
    control: Rendezvous, spec: ExchangeSpec, group: Shareable, fresh: Collection[int] | None = None
) -> None:
    """Gives every rank's region to every other and attaches theirs. Collective.

    A rank that fails leaves the others waiting: it must abort `control`.

    Args:
        fresh: ranks that have attached no region yet, the same on all ranks; None = all. The others attach
          theirs only, in place of what they had of these ranks.
    Raises: ConfigError where specs differ; StartupError where a peer's memory cannot be mapped; what attach()
      raises; ExchangeError where another rank failed.
    """
    control.barrier()  # the others may still allocate
    _check_alike(control, spec)
    with contextlib.ExitStack() as stack:
        fd = group.export_fd()
        stack.callback(os.close, fd)
        server = stack.enter_context(listening(spec.num_ranks))
        names = control.all_gather(server.getsockname())
        peers = {peer for peer, name in enumerate(names) if name} - {spec.rank}  # a masked rank has none
        if fresh is not None and spec.rank not in fresh:
            peers &= set(fresh)
        serving = Serving(server, (fd,), len(peers))
        stack.callback(serving.stop)  # before the descriptors are closed and their numbers reused
        for peer in sorted(peers):
            _attach(group, peer, names[peer])
        control.barrier()


class Standing(NamedTuple):
    """What a rank brings into a new generation. epoch: its last one. fresh: see share_regions()."""

    epoch: int
    fresh: bool


_STANDING = struct.Struct("<Q?")


def share_anew(control: Rendezvous, spec: ExchangeSpec, group: Shareable, mine: Standing) -> int:
    """share_regions() with the ranks that are fresh, if there are any. Collective over the unmasked ranks.

    Returns: the last epoch of all. Raises: as share_regions(); the rank is as fresh as before then.
    """
    records = control.all_gather(_STANDING.pack(*mine))
    all_of = {rank: Standing(*_STANDING.unpack(record)) for rank, record in enumerate(records) if record}
    if fresh := {rank for rank, one in all_of.items() if one.fresh}:
        share_regions(control, spec, group, fresh)
    return max(one.epoch for one in all_of.values())


def _check_alike(control: Rendezvous, spec: ExchangeSpec) -> None:
    fields = {k: str(v) for k, v in asdict(spec).items() if k not in {"rank", "timeout_ns"}}
    digest = hashlib.blake2b(repr(fields).encode(), digest_size=32).digest()
    for peer, theirs in enumerate(control.all_gather(digest)):
        if theirs and theirs != digest:  # a masked rank gives nothing
            raise ConfigError("spec", f"another one than rank {peer}'s", "the same on all ranks but for rank")


def _attach(group: Shareable, peer: int, name: bytes) -> None:
    (fd,) = take_descriptors(peer, name)
    try:
        group.attach(peer, fd)
    finally:
        os.close(fd)


def listening(count: int) -> socket.socket:
    """A socket of this host for a Serving of `count` processes."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"\0ep_server/{secrets.token_hex(16)}")  # abstract: no file to leave behind
    server.listen(count)
    server.settimeout(PASS_SECONDS)
    return server


class Serving:
    """A thread that passes descriptors to the first `count` processes of this user that connect."""

    def __init__(self, server: socket.socket, descriptors: Sequence[int], count: int) -> None:
        self._server, self._descriptors, self._count = server, descriptors, count
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, served or not."""
        self._stopped.set()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client, contextlib.suppress(OSError):
            client.setblocking(False)
            client.connect(self._server.getsockname())  # ends its accept
        self._thread.join()

    def _run(self) -> None:
        while self._count:
            try:
                client, _ = self._server.accept()
            except OSError:
                return  # the peers' own deadlines report what is missing
            with client, contextlib.suppress(OSError):  # a peer that has ended needs nothing
                if self._stopped.is_set():
                    return
                self._pass_to(client)

    def _pass_to(self, client: socket.socket) -> None:
        peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", peer)[1] != os.getuid():
            return  # another user of this host: gets nothing
        socket.send_fds(client, [b"\0"], self._descriptors)
        self._count -= 1


def take_descriptors(peer: int, name: bytes) -> list[int]:
    """What the Serving of a rank passes, for the caller to close. name: its socket. Raises StartupError."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(PASS_SECONDS)
            client.connect(name)
            _, fds, _, _ = socket.recv_fds(client, 1, MOST_PASSED)
    except OSError as error:
        raise StartupError(f"rank {peer} did not pass its memory: {error}") from error
    if not fds:
        raise StartupError(f"rank {peer} closed the socket before it passed its memory")
    return fds

"""Processes that have imported their libraries and wait to become a rank of a group that is not planned yet.

A process gets the memory that its group shares over a socket, right before its Start message. Used in one
event loop, but for receive(), which runs in the process itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ep_server.errors import StartupError
from ep_server.ranks.process import NO_CALLBACKS, STANDBY, RankCallbacks, RankProcess
from ep_server.v1 import rank_pb2 as pb

log = logging.getLogger(__name__)

END_SECONDS = 10.0
RECEIVE_SECONDS = 10.0
MAX_DESCRIPTORS = 250  # that a message of a Unix socket may carry, with a margin


@dataclass(frozen=True, slots=True)
class Waiting:
    """A process on standby. inside: number of its end of the socket, in the process."""

    process: RankProcess
    descriptors: socket.socket
    inside: int

    def become(self, rank: int, callbacks: RankCallbacks, shared: Sequence[int]) -> RankProcess:
        """Makes it a rank, and hands over the descriptors of its group. Raises: OSError."""
        self.process.become(rank, callbacks)
        with self.descriptors:
            socket.send_fds(self.descriptors, [b"\0"], list(shared))
        return self.process

    def close(self) -> None:
        """Closes channel and socket of a process that has ended."""
        self.process.close()
        self.descriptors.close()


class StandbyPool:
    """At most `count` processes."""

    def __init__(self, count: int, module: str, hang_seconds: float) -> None:
        """module, hang_seconds: as RankProcess.spawn."""
        self._count, self._module, self._hang_seconds = count, module, hang_seconds
        self._waiting: list[Waiting] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"StandbyPool({self._waiting!r})"

    async def fill(self) -> None:
        """Starts as many as are missing."""
        self._drop_ended()
        try:
            while len(self._waiting) < self._count and not self._closed:
                self._waiting.append(await self._start())
        except OSError as error:
            log.warning("no process can be kept on standby: %s", error)

    def take(self) -> Waiting | None:
        """One that waits; None if none does."""
        self._drop_ended()
        return self._waiting.pop(0) if self._waiting else None

    async def close(self) -> None:
        """Ends all. Idempotent."""
        self._closed = True
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.process.signal(signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await asyncio.gather(*(one.process.exited.wait() for one in waiting))
        for one in waiting:
            one.close()

    def _drop_ended(self) -> None:
        for one in self._waiting:
            if one.process.exited.is_set():
                one.close()
        self._waiting = [one for one in self._waiting if not one.process.exited.is_set()]

    async def _start(self) -> Waiting:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                process = await RankProcess.spawn(
                    STANDBY, self._module, (theirs.fileno(),), NO_CALLBACKS, self._hang_seconds
                )
            except BaseException:
                ours.close()
                raise
            return Waiting(process, ours, theirs.fileno())


def receive(start: pb.Start) -> None:
    """In a process that was on standby: fills in the descriptors of its group. Raises: StartupError."""
    if not start.HasField("handover"):
        return
    wanted = 1 + len(start.bells)
    with socket.socket(fileno=start.handover) as inherited:
        inherited.settimeout(RECEIVE_SECONDS)
        try:
            _, found, _, _ = socket.recv_fds(inherited, 1, MAX_DESCRIPTORS)
        except OSError as error:
            raise StartupError(f"the memory that ranks share was not handed over: {error}") from error
    if len(found) != wanted:
        for fd in found:
            os.close(fd)
        raise StartupError(f"{len(found)} descriptors were handed over, {wanted} are needed")
    start.exchange_fd = found[0]
    start.bells[:] = found[1:]
    start.ClearField("handover")

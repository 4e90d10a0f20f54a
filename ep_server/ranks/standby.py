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
from ep_server.ranks.process import STANDBY, RankCallbacks, RankProcess, exit_reason
from ep_server.v1 import rank_pb2 as pb

log = logging.getLogger(__name__)

END_SECONDS = 10.0
RECEIVE_SECONDS = 10.0
FILL_SECONDS = 2.0  # before a process starts: after a loss the requests run again first, on the same cores
LONGEST_FILL_SECONDS = 60.0  # the same where processes end again and again
MAX_DESCRIPTORS = 250  # that a message of a Unix socket may carry, with a margin


@dataclass(frozen=True, slots=True)
class Waiting:
    """A process on standby. inside: number of its end of the socket, in the process.

    imported: it has imported all it needs, which takes long behind processes that are busy.
    """

    process: RankProcess
    descriptors: socket.socket
    inside: int
    imported: asyncio.Event

    def become(self, rank: int, callbacks: RankCallbacks, shared: Sequence[int]) -> RankProcess:
        """Hands over the descriptors of a group, and makes it one of its ranks.

        Raises: OSError if the process has ended. It is closed then, and no callback is called.
        """
        try:
            with self.descriptors:
                socket.send_fds(self.descriptors, [b"\0"], list(shared))
        except OSError:
            self.process.signal(signal.SIGKILL)
            self.process.close()
            raise
        self.process.become(rank, callbacks)
        return self.process

    def close(self) -> None:
        """Closes channel and socket of a process that has ended."""
        self.process.close()
        self.descriptors.close()


class StandbyPool:
    """At most `count` processes. One that ends is replaced."""

    def __init__(self, count: int, module: str, hang_seconds: float, seconds: float = FILL_SECONDS) -> None:
        """module, hang_seconds: as RankProcess.spawn. seconds: from fill() until processes start."""
        self._count, self._module, self._hang_seconds = count, module, hang_seconds
        self._seconds = self._wait = seconds
        self._waiting: list[Waiting] = []
        self._closed = asyncio.Event()
        self._filling: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"StandbyPool({self._waiting!r})"

    def fill(self) -> None:
        """Begins to start as many as are missing."""
        if not self._closed.is_set() and (self._filling is None or self._filling.done()):
            self._filling = asyncio.get_running_loop().create_task(self._fill(self._wait))

    def take(self, *, imported: bool = False) -> Waiting | None:
        """One that waits, and maybe has imported all; None if none does. fill() follows."""
        self._wait = self._seconds
        alive = (one for one in self._waiting if not one.process.exited.is_set())
        found = next((one for one in alive if one.imported.is_set() or not imported), None)
        if found is not None:
            self._waiting.remove(found)
        return found

    async def close(self) -> None:
        """Ends all. Idempotent."""
        self._closed.set()
        if self._filling is not None:
            await asyncio.wait((self._filling,))
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.process.signal(signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await asyncio.gather(*(one.process.exited.wait() for one in waiting))
        for one in waiting:
            one.close()

    async def _fill(self, seconds: float) -> None:
        await self._rest(seconds)
        while len(self._waiting) < self._count and not self._closed.is_set():
            try:
                one = await self._start()
            except OSError as error:
                seconds, self._wait = self._wait, min(2 * self._wait, LONGEST_FILL_SECONDS)
                log.warning("no process can be kept on standby: %s; again in %.0f s", error, seconds)
                await self._rest(seconds)
                continue
            if one.process.ended.is_set():
                one.close()
            else:
                self._waiting.append(one)

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    def _on_exit(self, _rank: int, code: int) -> None:
        """One has ended before it became a rank."""
        if self._closed.is_set():
            return
        log.warning("a process on standby %s; another one starts in %.0f s", exit_reason(code), self._wait)
        for one in [one for one in self._waiting if one.process.ended.is_set()]:
            self._waiting.remove(one)
            one.close()
        self.fill()
        self._wait = min(2 * self._wait, LONGEST_FILL_SECONDS)

    async def _start(self) -> Waiting:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        imported = asyncio.Event()
        process: RankProcess | None = None

        def closed(_rank: int, reason: str) -> None:
            """It would not get a Start message. Another one follows once it has ended."""
            if not self._closed.is_set():
                log.warning("a process on standby %s", reason)
            if process is not None:
                process.signal(signal.SIGKILL)

        callbacks = RankCallbacks(lambda *_: imported.set(), closed, self._on_exit)
        with theirs:
            try:
                process = await RankProcess.spawn(
                    STANDBY, self._module, (theirs.fileno(),), callbacks, self._hang_seconds
                )
            except BaseException:
                ours.close()
                raise
            return Waiting(process, ours, theirs.fileno(), imported)


def receive(start: pb.Start) -> None:
    """In a process that was on standby: fills in the descriptors of its group. Raises: StartupError."""
    if not start.HasField("handover"):
        return
    bells, memories = len(start.bells), [name for name in ("shadow_fd", "kv_fd") if start.HasField(name)]
    wanted = 1 + bells + len(memories)
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
    start.exchange_fd, *rest = found
    start.bells[:] = rest[:bells]
    for name, fd in zip(memories, rest[bells:], strict=True):
        setattr(start, name, fd)
    start.ClearField("handover")

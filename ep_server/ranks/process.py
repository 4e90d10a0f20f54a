"""One rank as the frontend sees it: a child process, its channel and its exit.

Used in one event loop. The thread that spawns ranks must outlive them: they die with it. Units: seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import ep_server
from ep_server.errors import StartupError
from ep_server.ranks.channel import FrontChannel

LOOK_SECONDS = 0.02  # between two looks whether a process has ended
READ_SECONDS = 0.001  # the same once it has, until what it sent is read
PF_EXITING = 0x4  # of the kernel: in the flags of /proc/pid/stat
SOCKET_BYTES = 1 << 20  # per direction, so that a busy process does not stall its peer at once
# `-m module` alone would prefer an ep_server in the working directory.
BOOTSTRAP = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True, slots=True)
class RankCallbacks:
    """A rank's events; the first argument is its number. on_exit is called once, with or without on_closed.

    on_host_lost: the host of this rank and others is lost; called once, for its first rank.
    """

    on_frame: Callable[[int, bytes], None]
    on_closed: Callable[[int, str], None]
    on_exit: Callable[[int, int], None]
    on_host_lost: Callable[[int, str], None] = lambda rank, reason: None


STANDBY = -1  # in place of a rank, until the process takes one
NO_CALLBACKS = RankCallbacks(lambda rank, frame: None, lambda rank, why: None, lambda rank, code: None)


class RankProcess:
    """A running child process. `returncode` as in subprocess; None while it runs.

    ended: it runs no more code, and what it sent has been read. exited: its memory is freed too, which may
      take seconds on a GPU. on_closed and on_exit are called once it has ended.
    """

    def __init__(self, rank: int, popen: subprocess.Popen[bytes], callbacks: RankCallbacks) -> None:
        self.rank = rank
        self.pid = popen.pid
        self.ended, self.exited = asyncio.Event(), asyncio.Event()
        self._popen = popen
        self._callbacks = callbacks
        self._channel: FrontChannel | None = None
        self._pidfd = os.pidfd_open(popen.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, self._on_exit)
        self._next_look = loop.call_later(LOOK_SECONDS, self._look)

    def __repr__(self) -> str:
        return f"RankProcess(rank={self.rank}, pid={self.pid}, returncode={self.returncode})"

    @classmethod
    async def spawn(
        cls,
        rank: int,
        module: str,
        inherited: tuple[int, ...],
        callbacks: RankCallbacks,
        hang_seconds: float,
    ) -> RankProcess:
        """Starts `python -m module --rank --channel --parent`, with this process's import path.

        Args:
            inherited: descriptors the child gets in addition to its channel, under the same numbers.
            hang_seconds: an idle child that does not answer for so long is lost. So is one that a signal
              has stopped.
        Raises: OSError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            command = [sys.executable, "-P", "-c", BOOTSTRAP, json.dumps(import_path()), module]
            command += ["--rank", str(rank), "--channel", str(theirs.fileno()), "--parent", str(os.getpid())]
            try:
                popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), *inherited),
                    process_group=0,  # a ^C on the terminal goes to the frontend, which drains
                )
            except BaseException:
                ours.close()
                raise
        process = cls(rank, popen, callbacks)
        await process._connect(ours, hang_seconds)
        return process

    async def _connect(self, sock: socket.socket, hang_seconds: float) -> None:
        try:
            self._channel = await FrontChannel.connect(
                sock,
                lambda payload: self._callbacks.on_frame(self.rank, payload),
                lambda reason: self._callbacks.on_closed(self.rank, reason),
            )
        except BaseException:  # nobody has it; the next process of its rank must not be taken for it
            self._callbacks = NO_CALLBACKS
            self.signal(signal.SIGKILL)
            raise
        self._channel.watch(hang_seconds, self._is_stopped)

    def become(self, rank: int, callbacks: RankCallbacks) -> None:
        """A process on standby takes the place of a rank, before its Start message."""
        self.rank, self._callbacks = rank, callbacks

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the signal."""
        return self._popen.returncode

    @property
    def buffered(self) -> int:
        """Bytes sent that the rank has not read yet."""
        return self._channel.buffered if self._channel else 0

    def send(self, payload: bytes) -> None:
        """Sends a frame; does not block."""
        if self._channel is not None:
            self._channel.send(payload)

    def signal(self, number: signal.Signals) -> None:
        """Signals the process unless it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                self._popen.send_signal(number)

    def close(self) -> None:
        """Closes the channel."""
        if self._channel is not None:
            self._channel.close()

    def _is_stopped(self) -> bool:
        """Whether a signal has stopped it, until SIGCONT."""
        with suppress(OSError):  # the process has ended
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def _look(self) -> None:
        """The system reports the end of a process only once it has freed its memory."""
        code = code_at_end(self.pid)
        if code is None:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        else:
            self._end(code)

    def _on_exit(self) -> None:
        code = self._popen.wait()  # returns at once: a readable pidfd is an ended process
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._next_look.cancel()
        self.exited.set()
        self._end(code)

    def _end(self, code: int) -> None:
        """Once what the process sent has been read."""
        if self._channel is not None and not self._channel.finish():
            self._next_look = asyncio.get_running_loop().call_later(READ_SECONDS, self._end, code)
        elif not self.ended.is_set():
            self.ended.set()
            self._callbacks.on_exit(self.rank, code)


def code_at_end(pid: int) -> int | None:
    """The exit code, or minus the signal, of a process whose threads run no more code, zombie or not yet one.

    None if one of them still runs; also for code 0, which may mean that it cannot be read.
    """
    try:
        status = _ending(Path(f"/proc/{pid}/stat"))
        threads = list(Path(f"/proc/{pid}/task").iterdir()) if status else []
    except OSError:
        return None
    for thread in threads:
        with suppress(OSError):  # it has ended
            if _ending(thread / "stat") is None:
                return None
    return os.waitstatus_to_exitcode(status) if status else None


def _ending(stat: Path) -> int | None:
    """The wait status of a thread that ends; None while it runs. Raises: OSError."""
    fields = stat.read_text().rpartition(")")[2].split()
    return int(fields[49]) if int(fields[6]) & PF_EXITING else None


def import_path() -> list[str]:
    """sys.path for a process that must import the same modules, whatever its working directory contains."""
    root = str(Path(ep_server.__file__).parents[1])
    absolute = [entry for entry in sys.path if Path(entry).is_absolute()]
    return absolute if root in absolute else [root, *absolute]


@contextmanager
def closing(descriptors: Iterable[int]) -> Iterator[None]:
    """Closes them in the end."""
    try:
        yield
    finally:
        for fd in descriptors:
            os.close(fd)


@contextmanager
def starting() -> Iterator[None]:
    """Raises: StartupError in place of OSError: another start may succeed."""
    try:
        yield
    except OSError as error:
        raise StartupError(f"the processes of the ranks cannot be started: {error}") from error


def exit_reason(code: int) -> str:
    """How a process ended, in words."""
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"
    return f"ended with exit code {code}"

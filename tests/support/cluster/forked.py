"""A fork of the zygote as asyncio shows a process that it has executed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

from tests.support.ranks.zygote import Forked, zygote


class ForkedProcess:
    """What tests use of asyncio.subprocess.Process. stderr: what it writes there."""

    def __init__(self, forked: Forked, stderr: asyncio.StreamReader) -> None:
        self.pid, self.stderr = forked.pid, stderr
        self._forked, self._ended = forked, asyncio.Event()
        self._pidfd = os.pidfd_open(forked.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    @property
    def returncode(self) -> int | None:
        return self._forked.returncode

    async def wait(self) -> int:
        await self._ended.wait()
        return self._forked.wait()

    def send_signal(self, number: signal.Signals) -> None:
        self._forked.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._forked.wait()
        self._ended.set()


async def fork(module: str, arguments: Sequence[str], limit: int) -> ForkedProcess:
    """Runs a module as a program. limit: of a line that it writes."""
    ours, theirs = os.pipe()
    stderr = asyncio.StreamReader(limit)
    file = os.fdopen(ours, "rb")
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stderr), file)
    try:
        return ForkedProcess(zygote().fork(module, arguments, {1: 1, 2: theirs}), stderr)
    finally:
        os.close(theirs)

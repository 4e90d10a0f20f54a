"""Load over gRPC from several processes at once, so that the readers are not what is measured.

Every reader is a process; all start at the same moment of the monotonic clock. What a reader could not do
is an error of the benchmark, what a request could not do is counted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ep_server.cli.bench.load import Load, poisson, shares
from ep_server.cli.bench.reader import Work
from ep_server.cli.bench.trace import Trace
from ep_server.client import Target
from ep_server.errors import InternalError, StartupError
from ep_server.ranks.process import BOOTSTRAP, import_path

MODULE = "ep_server.cli.bench.reader"
READY_SECONDS = 600.0  # for a reader to start and to warm up
LEAD_SECONDS = 0.1  # from the order to start to the start
MARGIN_SECONDS = 60.0  # beyond the deadlines of the requests
END_SECONDS = 5.0
LINE_BYTES = 1 << 30  # the longest line holds the traces of a reader


@dataclass(frozen=True, slots=True)
class Crowd:
    """Whom to ask, and how often before the clock starts. readers: of `started`."""

    target: Target
    readers: Sequence[Reader]
    warmup: int = 0


@asynccontextmanager
async def started(count: int) -> AsyncIterator[Sequence[Reader]]:
    """So many client processes, which have nothing to do yet; they are ended with the context."""
    readers = [Reader() for _ in range(count)]
    try:
        for reader in readers:
            await reader.start()
        yield readers
    except BaseException:
        for reader in readers:  # what they would still tell is of no use
            reader.kill()
        raise
    finally:
        await asyncio.gather(*(reader.stop() for reader in readers))


async def run(
    crowd: Crowd,
    load: Load,
    on_done: Callable[[int], None] = lambda _: None,
    on_warm: Callable[[], Awaitable[None]] | None = None,
) -> list[Trace]:
    """Runs the whole load.

    Args:
        on_done: called with the number of requests that ended so far.
        on_warm: awaited between the warm-up and the load.
    Returns: one trace for each request, by index.
    Raises: StartupError if a reader does not become ready; InternalError if one does not end.
    """
    parts = divide(crowd.target, load, len(crowd.readers), crowd.warmup)
    readers = crowd.readers[: len(parts)]
    done = dict.fromkeys(readers, 0)

    def progress(reader: Reader, count: int) -> None:
        done[reader] = count
        on_done(sum(done.values()))

    await asyncio.gather(*(reader.prepare(work) for reader, work in zip(readers, parts, strict=True)))
    if on_warm is not None:
        await on_warm()
    begin = time.monotonic() + LEAD_SECONDS
    seconds = longest(load)
    lists = await asyncio.gather(*(reader.run(begin, seconds, progress) for reader in readers))
    return sorted((trace for traces in lists for trace in traces), key=lambda trace: trace.index)


def divide(target: Target, load: Load, readers: int, warmup: int) -> list[Work]:
    """The share of each reader that has one: request i goes to reader i modulo their number."""
    count = min(readers, load.requests if load.rate else min(load.requests, load.concurrency))
    offsets = poisson(load.rate, load.requests, load.seed) if load.rate else []
    streams = shares(load.concurrency, count)
    return [
        Work(
            target,
            load,
            indices=range(reader, load.requests, count),
            offsets=offsets[reader::count],
            streams=streams[reader],
            warmup=range(reader - warmup, 0, count),
        )
        for reader in range(count)
    ]


def longest(load: Load) -> float:
    """Seconds after which every request must have ended, by its own deadline."""
    if load.rate:
        return poisson(load.rate, load.requests, load.seed)[-1] + load.timeout + MARGIN_SECONDS
    return -(-load.requests // load.concurrency) * load.timeout + MARGIN_SECONDS


class Reader:
    """A client process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def pid(self) -> int:
        """Of the process; 0 before its start."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Starts it; like a rank it ends when the thread that started it does."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", BOOTSTRAP, json.dumps(import_path()), MODULE]
            command.append(str(os.getpid()))
            # Not through the event loop, which would fork: gRPC does not like that once it has begun to talk.
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                process_group=0,  # a ^C on the terminal is for the process that started it
            )
        self._streams = await asyncio.open_connection(sock=ours, limit=LINE_BYTES)

    async def prepare(self, work: Work) -> None:
        """Gives it its share and returns when it is warm. Raises: StartupError."""
        values = {"indices": list(work.indices), "warmup": list(work.warmup)}
        self._tell(dataclasses.asdict(work) | values)
        try:
            async with asyncio.timeout(READY_SECONDS):
                said = await self._hear()
        except TimeoutError:
            raise StartupError(f"a client process was not ready within {READY_SECONDS:g} s") from None
        if "error" in said:
            raise StartupError(f"a client process could not start: {said['error']}")

    async def run(self, begin: float, seconds: float, on_done: Callable[[Reader, int], None]) -> list[Trace]:
        """Its part of the load, from `begin` on, which takes `seconds` at most."""
        self._tell({"begin": begin})
        try:
            async with asyncio.timeout(seconds):
                while "traces" not in (said := await self._hear()):
                    if "error" in said:
                        raise InternalError(f"a client process failed: {said['error']}")
                    on_done(self, said["done"])
        except TimeoutError:
            raise InternalError(f"a client process did not end within {seconds:g} s") from None
        traces = [Trace.from_values(values) for values in said["traces"]]
        on_done(self, len(traces))
        return traces

    def kill(self) -> None:
        """Ends the process at once."""
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        """Waits for the end of the process, which comes with that of its work."""
        if self._streams is not None:
            self._streams[1].close()
        if self._process is not None:
            await asyncio.to_thread(_end, self._process)

    def _tell(self, values: dict[str, Any]) -> None:
        assert self._streams is not None
        self._streams[1].write(json.dumps(values).encode() + b"\n")

    async def _hear(self) -> dict[str, Any]:
        assert self._streams is not None
        line = await self._streams[0].readline()
        if not line:
            raise InternalError("a client process ended without a word")
        said: dict[str, Any] = json.loads(line)
        return said


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

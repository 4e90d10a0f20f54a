"""A client process of an online benchmark, and the parent's handle on it.

The two exchange lines of JSON. The parent sends the work, then the start time. The process sends {"ready"}
after the warm-up, {"done": n} as it proceeds and {"traces": [...]} at the end, or {"error": text}. Several
processes share the load, so that the clients do not limit the measurement.
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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import uvloop

from ep_server.cli.bench.load import OK, Load, Trace
from ep_server.client import AsyncClient, Target, generate_request
from ep_server.errors import InternalError, StartupError
from ep_server.ranks.life import die_with
from ep_server.ranks.process import BOOTSTRAP, import_path

MODULE = "ep_server.cli.bench.client_process"
READY_SECONDS = 600.0  # for a process to start and to warm up
START_SECONDS = 600.0  # from the warm-up to the start time
END_SECONDS = 5.0
DONE_SECONDS = 0.2  # between two progress lines
LINE_BYTES = 1 << 30  # the longest line has all traces of a process


@dataclass(frozen=True, slots=True)
class Work:
    """The share of one process.

    indices: its requests. offsets: their arrivals in seconds from the start; empty for a closed loop.
    streams: requests in flight in a closed loop. warmup: indices of requests before the clock starts.
    """

    target: Target
    load: Load
    indices: Sequence[int]
    offsets: Sequence[float]
    streams: int
    warmup: Sequence[int]

    def values(self) -> dict[str, Any]:
        """For JSON. `from_values` reverses it."""
        return dataclasses.asdict(self) | {"indices": list(self.indices), "warmup": list(self.warmup)}

    @staticmethod
    def from_values(values: dict[str, Any]) -> Work:
        """Work from `values`."""
        return Work(Target(**values.pop("target")), Load(**values.pop("load")), **values)


class ClientProcess:
    """The parent's handle."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Starts the process. It ends when the thread that started it ends."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", BOOTSTRAP, json.dumps(import_path()), MODULE]
            command.append(str(os.getpid()))
            # Not asyncio's subprocess, which would fork: gRPC does not survive a fork once it is in use.
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                process_group=0,  # Ctrl-C on the terminal interrupts the parent alone
            )
        self._streams = await asyncio.open_connection(sock=ours, limit=LINE_BYTES)

    async def prepare(self, work: Work) -> None:
        """Sends the work and waits for the warm-up. Raises: StartupError."""
        self._send(work.values())
        try:
            async with asyncio.timeout(READY_SECONDS):
                reply = await self._receive()
        except TimeoutError:
            raise StartupError(f"a client process was not ready within {READY_SECONDS:g} s") from None
        if "error" in reply:
            raise StartupError(f"a client process could not start: {reply['error']}")

    async def run(
        self, begin: float, seconds: float, on_done: Callable[[ClientProcess, int], None]
    ) -> list[Trace]:
        """Runs its share of the load.

        Args:
            begin: start on the monotonic clock. seconds: time limit. on_done: called with requests done.
        Raises: InternalError if the process fails or exceeds the limit.
        """
        self._send({"begin": begin})
        try:
            async with asyncio.timeout(seconds):
                while "traces" not in (reply := await self._receive()):
                    if "error" in reply:
                        raise InternalError(f"a client process failed: {reply['error']}")
                    on_done(self, reply["done"])
        except TimeoutError:
            raise InternalError(f"a client process did not end within {seconds:g} s") from None
        traces = [Trace.from_values(values) for values in reply["traces"]]
        on_done(self, len(traces))
        return traces

    def kill(self) -> None:
        """Ends the process at once."""
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        """Closes the connection, which ends the process, and waits for it."""
        if self._streams is not None:
            self._streams[1].close()
        if self._process is not None:
            await asyncio.to_thread(_wait, self._process)

    def _send(self, values: dict[str, Any]) -> None:
        assert self._streams is not None
        self._streams[1].write(json.dumps(values).encode() + b"\n")

    async def _receive(self) -> dict[str, Any]:
        assert self._streams is not None
        line = await self._streams[0].readline()
        if not line:
            raise InternalError("a client process exited without a result")
        reply: dict[str, Any] = json.loads(line)
        return reply


@asynccontextmanager
async def started(count: int) -> AsyncIterator[Sequence[ClientProcess]]:
    """Starts `count` idle client processes. They end with the context."""
    processes = [ClientProcess() for _ in range(count)]
    try:
        for process in processes:
            await process.start()
        yield processes
    except BaseException:
        for process in processes:  # their results are of no use any more
            process.kill()
        raise
    finally:
        await asyncio.gather(*(process.stop() for process in processes))


async def run(client: AsyncClient, work: Work, begin: float, on_done: Callable[[], None]) -> list[Trace]:
    """Runs all requests of this process. begin: monotonic time that offsets count from."""
    traces = [Trace(index, work.load.new_tokens, begin) for index in work.indices]
    async with asyncio.TaskGroup() as group:
        if work.offsets:
            for trace, offset in zip(traces, work.offsets, strict=True):
                trace.planned = begin + offset
                await asyncio.sleep(max(0.0, trace.planned - time.monotonic()))
                group.create_task(_request(client, work.load, trace, on_done))
        else:
            await asyncio.sleep(max(0.0, begin - time.monotonic()))
            left = iter(traces)
            for _ in range(work.streams):
                group.create_task(_stream(client, work.load, left, on_done))
    return traces


async def _stream(
    client: AsyncClient, load: Load, left: Iterator[Trace], on_done: Callable[[], None]
) -> None:
    """One stream of a closed loop: a request after another."""
    for trace in left:
        trace.planned = time.monotonic()
        await _request(client, load, trace, on_done)


async def _request(client: AsyncClient, load: Load, trace: Trace, on_done: Callable[[], None]) -> None:
    request = generate_request(
        load.prompt(trace.index),
        max_new_tokens=load.new_tokens,
        ignore_eos=True,
        temperature=0.0,
        seed=max(trace.index, 0),
        output_text=False,
        stream_interval=load.stream_interval,
    )
    # The stub itself: a retry would hide a refusal, and objects would cost the client time.
    call = client.decode.Generate(request, timeout=load.timeout, metadata=client.target.metadata)
    trace.sent, status, why = time.monotonic(), OK, ""
    try:
        async for event in call:
            if event.HasField("tokens"):
                trace.arrivals.append((time.monotonic(), len(event.tokens.token_ids)))
    except grpc.aio.AioRpcError as error:
        status, why = error.code().name, error.details() or ""
    trace.end(status, time.monotonic(), why)
    on_done()


async def _warm_up(client: AsyncClient, work: Work) -> None:
    streams = max(1, min(work.streams, len(work.warmup)))
    warm = Work(work.target, work.load, work.warmup, (), streams, ())
    await run(client, warm, time.monotonic(), lambda: None)


async def _serve(work: Work) -> None:
    done, reported = 0, 0.0

    def on_done() -> None:
        nonlocal done, reported
        done += 1
        if time.monotonic() - reported >= DONE_SECONDS:
            reported = time.monotonic()
            _print(done=done)

    async with AsyncClient(work.target) as client:
        await _warm_up(client, work)
        _print(ready=True)
        async with asyncio.timeout(START_SECONDS):
            line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            return  # the parent has gone
        traces = await run(client, work, json.loads(line)["begin"], on_done)
    _print(traces=[trace.values() for trace in traces])


def _print(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> int:
    """The process: reads the work and runs it. Its argument is the parent's id. Returns: exit code."""
    die_with(int(sys.argv[1]))
    line = sys.stdin.readline()
    if not line:
        return 0  # there is no work
    try:
        uvloop.run(_serve(Work.from_values(json.loads(line))))
    except Exception as error:
        cause = error
        while isinstance(cause, ExceptionGroup):  # requests that failed for the same reason
            cause = cause.exceptions[0]
        with suppress(OSError):  # the parent may have gone
            _print(error=" ".join(f"{type(cause).__name__}: {cause}".split()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One client process of an online benchmark; started by `online`, not by hand.

It is told what to do in lines of JSON. In: the work, then the time to start. Out: {"ready"} after the
warm-up, {"done": n} now and then, {"traces": [...]} in the end, or {"error": text} instead. Knows the gRPC
client, and nothing of the other readers.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import uvloop

from ep_server.cli.bench.load import Load, prompt
from ep_server.cli.bench.trace import OK, Trace
from ep_server.client import AsyncClient, Target
from ep_server.ranks.life import die_with

DONE_SECONDS = 0.2  # between two lines that tell progress
START_SECONDS = 600.0  # until the line with the time to start must have come


@dataclass(frozen=True, slots=True)
class Work:
    """A reader's share. indices: its requests. offsets: their arrivals, seconds from the start, or empty.

    streams: requests in flight of a closed loop. warmup: indices of requests before the clock starts.
    """

    target: Target
    load: Load
    indices: Sequence[int]
    offsets: Sequence[float]
    streams: int
    warmup: Sequence[int]

    @staticmethod
    def from_values(values: dict[str, Any]) -> Work:
        """From JSON."""
        return Work(Target(**values.pop("target")), Load(**values.pop("load")), **values)


async def run(client: AsyncClient, work: Work, begin: float, on_done: Callable[[], None]) -> list[Trace]:
    """All requests of this reader. begin: monotonic time that offsets count from."""
    traces = [Trace(index, work.load.new_tokens, begin) for index in work.indices]
    async with asyncio.TaskGroup() as group:
        if work.offsets:
            for trace, offset in zip(traces, work.offsets, strict=True):
                trace.planned = begin + offset
                await asyncio.sleep(max(0.0, trace.planned - time.monotonic()))
                group.create_task(_one(client, work.load, trace, on_done))
        else:
            await asyncio.sleep(max(0.0, begin - time.monotonic()))
            left = iter(traces)
            for _ in range(work.streams):
                group.create_task(_one_after_another(client, work.load, left, on_done))
    return traces


async def _one_after_another(
    client: AsyncClient, load: Load, left: Iterator[Trace], on_done: Callable[[], None]
) -> None:
    for trace in left:
        trace.planned = time.monotonic()
        await _one(client, load, trace, on_done)


async def _one(client: AsyncClient, load: Load, trace: Trace, on_done: Callable[[], None]) -> None:
    call = client.generate(
        prompt(load, trace.index),
        timeout=load.timeout,
        max_new_tokens=load.new_tokens,
        ignore_eos=True,
        temperature=0.0,
        seed=max(trace.index, 0),
        output_text=False,
        stream_interval=load.stream_interval,
    )
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
    done, told = 0, 0.0

    def on_done() -> None:
        nonlocal done, told
        done += 1
        if time.monotonic() - told >= DONE_SECONDS:
            told = time.monotonic()
            _say(done=done)

    async with AsyncClient(work.target) as client:
        await _warm_up(client, work)
        _say(ready=True)
        async with asyncio.timeout(START_SECONDS):
            line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            return  # nobody waits for this reader any more
        traces = await run(client, work, json.loads(line)["begin"], on_done)
    _say(traces=[trace.values() for trace in traces])


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> int:
    """Reads the work and does it. Its argument is the process that started it. Returns: exit code."""
    die_with(int(sys.argv[1]))
    line = sys.stdin.readline()
    if not line:
        return 0  # there is nothing to do
    try:
        uvloop.run(_serve(Work.from_values(json.loads(line))))
    except Exception as error:
        cause = error
        while isinstance(cause, ExceptionGroup):  # of requests that ended for the same reason
            cause = cause.exceptions[0]
        with suppress(OSError):  # nobody may be left to be told
            _say(error=" ".join(f"{type(cause).__name__}: {cause}".split()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Load over gRPC and what came of it: closed loop (so many at once) or Poisson (so many per second).

Knows the client only. TTFT and ITL are measured here, at the reader: network and server together. Several
tokens in one message share its arrival: the first gets the gap, the others 0. Units: seconds, tokens.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc

from ep_server.client import AsyncClient

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked. rate: arrivals per second, 0 = closed loop with `concurrency` readers.

    vocab_size: prompts are drawn from ids 0 to vocab_size - 1.
    """

    requests: int
    concurrency: int
    rate: float
    prompt_tokens: int
    new_tokens: int
    vocab_size: int
    seed: int


@dataclass(slots=True)
class Report:
    """What was measured; errors by status name."""

    seconds: float = 0.0
    tokens: int = 0
    messages: int = 0
    first_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, float | dict[str, float]]:
        """Numbers by name, for a table or JSON; durations in seconds."""
        elapsed = max(self.seconds, 1e-9)
        return {
            "requests": len(self.total),
            "errors": float(sum(self.errors.values())),
            "seconds": self.seconds,
            "output_tokens": self.tokens,
            "tokens_per_second": self.tokens / elapsed,
            "requests_per_second": len(self.total) / elapsed,
            "tokens_per_message": self.tokens / max(self.messages, 1),
            "time_to_first_token": quantiles(self.first_token),
            "inter_token_latency": quantiles(self.gaps),
            "end_to_end": quantiles(self.total),
        }


def quantiles(values: list[float]) -> dict[str, float]:
    """mean, p50, p90, p99, max; empty for no values. Nearest rank."""
    if not values:
        return {}
    ordered = sorted(values)
    picked = {f"p{round(q * 100)}": ordered[min(int(q * len(ordered)), len(ordered) - 1)] for q in QUANTILES}
    return {"mean": sum(ordered) / len(ordered), **picked, "max": ordered[-1]}


async def run(client: AsyncClient, load: Load, on_done: Callable[[], None] = lambda: None) -> Report:
    """Runs the whole load. on_done: called after each request."""
    report = Report()
    source = random.Random(load.seed)
    prompts = [
        [source.randrange(load.vocab_size) for _ in range(load.prompt_tokens)] for _ in range(load.requests)
    ]
    started = time.perf_counter()

    def done(_task: asyncio.Task[None]) -> None:
        limit.release()
        on_done()

    limit = asyncio.Semaphore(load.concurrency if load.rate == 0 else load.requests)
    async with asyncio.TaskGroup() as group:
        async for index in _arrivals(load, source):
            await limit.acquire()
            task = group.create_task(_one(client, load, prompts[index], index, report))
            task.add_done_callback(done)
    report.seconds = time.perf_counter() - started
    return report


async def _arrivals(load: Load, source: random.Random) -> AsyncIterator[int]:
    """Indices of requests, at their time of arrival."""
    due = time.perf_counter()
    for index in range(load.requests):
        if load.rate > 0:
            due += source.expovariate(load.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        yield index


async def _one(client: AsyncClient, load: Load, prompt: list[int], index: int, report: Report) -> None:
    fields = {"max_new_tokens": load.new_tokens, "ignore_eos": True, "temperature": 0.0, "seed": index}
    started = last = time.perf_counter()
    count = 0
    try:
        async for event in client.generate(prompt, output_text=False, **fields):
            if not event.HasField("tokens"):
                continue
            now = time.perf_counter()
            new = len(event.tokens.token_ids)
            if count == 0:
                report.first_token.append(now - started)
                report.gaps += [0.0] * (new - 1)
            else:
                report.gaps += [now - last, *[0.0] * (new - 1)]
            last, count = now, count + new
            report.messages += 1
    except grpc.aio.AioRpcError as error:
        report.errors[error.code().name] += 1
    else:
        report.total.append(time.perf_counter() - started)
    report.tokens += count

"""`ep-server bench online`: starts or finds a server, sends the load, reports what callers saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from rich.console import Console

from ep_server.cli.app import App, assemble
from ep_server.cli.bench.breakdown import TIMED_EVERY, Reports, Steps, steps_between
from ep_server.cli.bench.client_process import ClientProcess, Work, started
from ep_server.cli.bench.load import Load, Trace
from ep_server.cli.bench.offline import settled
from ep_server.cli.bench.report import OnlineReport, Output
from ep_server.cli.bench.summary import Slo, summarise
from ep_server.cli.progress import Bars
from ep_server.client import AsyncClient, Target
from ep_server.config import Config
from ep_server.errors import ConfigError, RankLost
from ep_server.frontend.server import Server
from ep_server.models.families import read_spec
from ep_server.models.sizes import context_limit

LEAD_SECONDS = 0.1  # from the order to start until the start
MARGIN_SECONDS = 60.0  # beyond the deadlines of the requests
Processes = Sequence[ClientProcess]


async def run(
    server: Target | Config, load: Load, *, clients: int, warmup: int, slo: Slo, output: Output
) -> int:
    """The whole command.

    Args:
        server: a running server, or the configuration of one to start.
        clients: client processes. warmup: requests before the clock starts.
    Returns: exit code, 1 if a request failed.
    Raises: ConfigError for lengths that the model cannot serve; StartupError; grpc.RpcError if no server
        answers.
    """
    if isinstance(server, Config):  # before anything is loaded
        load.check_length(context_limit(read_spec(server.model.path), server.model.max_context))
    console = Console(stderr=True)
    config: Config | None = None
    steps: Steps | None = None
    with Bars(console, console.print) as bars:

        def on_done(done: int) -> None:
            bars.show("requests", done, load.requests)

        async with started(min(clients, load.requests)) as processes:
            if isinstance(server, Target):
                name, load = await fit(load, server)
                traces = await send(load, server, processes, warmup, on_done)
            else:
                async with own_server(prepared(server, load), bars) as app:
                    config, target = app.server.config, Target(app.server.address)
                    name, load = await fit(load, target)
                    before: Reports = {}

                    async def on_warm() -> None:
                        nonlocal before
                        before = await settled(app.server.engine)

                    traces = await send(load, target, processes, warmup, on_done, on_warm)
                    steps = await _steps(app.server, before)
    found = summarise(traces, 0 if load.rate else load.concurrency, slo)
    output.show(OnlineReport(name, load, clients, traces, found, config, steps))
    return 1 if found["errors"] else 0


async def fit(load: Load, target: Target) -> tuple[str, Load]:
    """Returns: the served model's name, the load with its vocabulary. Raises: ConfigError."""
    async with AsyncClient(target) as client:
        info: Any = await client.model_info()
    load.check_length(info.max_context)
    return info.name, replace(load, vocab_size=info.vocab_size)


async def send(
    load: Load,
    target: Target,
    processes: Processes,
    warmup: int = 0,
    on_done: Callable[[int], None] = lambda _: None,
    on_warm: Callable[[], Awaitable[None]] | None = None,
) -> list[Trace]:
    """Sends the whole load. All processes start at the same moment.

    Args:
        processes: from client_process.started. warmup: requests before the clock starts.
        on_done: called with the number of requests that have ended.
        on_warm: awaited between the warm-up and the load.
    Returns: one trace per request, by index.
    Raises: StartupError if a process does not become ready; InternalError if one does not end.
    """
    shares = divide(target, load, len(processes), warmup)
    processes = processes[: len(shares)]
    done = dict.fromkeys(processes, 0)

    def progress(process: ClientProcess, count: int) -> None:
        done[process] = count
        on_done(sum(done.values()))

    await asyncio.gather(*(process.prepare(work) for process, work in zip(processes, shares, strict=True)))
    if on_warm is not None:
        await on_warm()
    begin = time.monotonic() + LEAD_SECONDS
    limit = longest(load)
    lists = await asyncio.gather(*(process.run(begin, limit, progress) for process in processes))
    return sorted((trace for traces in lists for trace in traces), key=lambda trace: trace.index)


def divide(target: Target, load: Load, processes: int, warmup: int) -> list[Work]:
    """The share of each process that gets one: request i goes to process i modulo their number."""
    count = min(processes, load.requests if load.rate else min(load.requests, load.concurrency))
    offsets, (each, more) = load.arrivals(), divmod(load.concurrency, count)
    return [
        Work(
            target,
            load,
            indices=range(process, load.requests, count),
            offsets=offsets[process::count],
            streams=each + (process < more),
            warmup=range(process - warmup, 0, count),
        )
        for process in range(count)
    ]


def longest(load: Load) -> float:
    """Seconds after which every request must have ended, by its own deadline."""
    if load.rate:
        return load.arrivals()[-1] + load.timeout + MARGIN_SECONDS
    return -(-load.requests // load.concurrency) * load.timeout + MARGIN_SECONDS


def prepared(config: Config, load: Load) -> Config:
    """The configuration of the server to start: free ports on loopback, room for a closed loop.

    On GPUs some steps are timed, since the host's share of a step is not known otherwise.
    Raises: ConfigError for several nodes.
    """
    if config.cluster.nodes != 1:
        raise ConfigError(
            "cluster.nodes", config.cluster.nodes, "1: the benchmark starts a server on one host"
        )
    streams, scheduler = 0 if load.rate else load.concurrency, config.scheduler
    running = -(-streams // config.parallel.ranks)
    closed = ("tls_cert", "tls_key", "tls_client_ca", "token_file")
    given = {
        **{f"grpc.{name}": "" for name in closed},
        "grpc.host": "127.0.0.1",
        "grpc.port": 0,
        "grpc.control": "on",
        "metrics.port": 0,
        "grpc.max_streams": max(config.grpc.max_streams, streams),
        "scheduler.max_queue": max(scheduler.max_queue, streams),
        "scheduler.max_running": max(scheduler.max_running, running),
        "scheduler.max_step_tokens": max(config.step_tokens, running),
    }
    if config.parallel.device == "cuda":
        given["metrics.device_phases"] = config.metrics.device_phases or TIMED_EVERY
    return Config.from_values(config.values() | given)


@asynccontextmanager
async def own_server(config: Config, bars: Bars) -> AsyncIterator[App]:
    """A server as `ep-server serve` runs it. On an error or Ctrl-C it stops without draining.

    Raises: StartupError; RankLost.
    """
    async with assemble(config) as app:
        serving = asyncio.Event()
        life = asyncio.create_task(app.server.live(bars.loading, serving.set))
        came_up = asyncio.create_task(serving.wait())
        try:
            await asyncio.wait((life, came_up), return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
                raise RankLost(app.server.engine.lost_message)
            yield app
        except BaseException:
            app.server.ask_to_stop()  # with the one below this is the second: stop at once
            raise
        finally:
            came_up.cancel()
            app.server.ask_to_stop()
            await life


async def _steps(server: Server, before: Reports) -> Steps | None:
    """The steps since `before`."""
    layers = sum(read_spec(server.config.model.path).sparse_layers)
    return steps_between(before, await settled(server.engine), layers)

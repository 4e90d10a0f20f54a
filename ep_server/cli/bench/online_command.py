"""`ep-server bench online`: finds or starts a server, puts load on it, shows what its callers saw."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ep_server.cli.app import App, assemble
from ep_server.cli.bench import online, pictures, tables
from ep_server.cli.bench.breakdown import Reports, Steps, steps_between
from ep_server.cli.bench.load import Load, check_length
from ep_server.cli.bench.offline import settled
from ep_server.cli.bench.offline_plan import TIMED_EVERY
from ep_server.cli.bench.output import Output
from ep_server.cli.bench.report import Slo, summarise
from ep_server.cli.bench.trace import Trace
from ep_server.cli.progress import Bars
from ep_server.client import AsyncClient, Target
from ep_server.config import Config
from ep_server.errors import ConfigError, RankLost
from ep_server.frontend.server import Server
from ep_server.models.families import read_spec
from ep_server.models.sizes import context_limit


@dataclass(frozen=True, slots=True)
class Asked:
    """Fields of load.Load; how large the vocabulary is, the server says."""

    requests: int
    concurrency: int
    rate: float
    prompt_tokens: int
    new_tokens: int
    seed: int
    stream_interval: int
    timeout: float

    def load(self, vocab_size: int) -> Load:
        """For a model."""
        return Load(**dataclasses.asdict(self), vocab_size=vocab_size)


@dataclass(frozen=True, slots=True)
class Readers:
    """clients: processes. warmup: requests before the clock starts. slo_*: milliseconds."""

    clients: int
    warmup: int
    slo_ttft_ms: float | None
    slo_itl_ms: float | None

    @property
    def slo(self) -> Slo:
        """In seconds."""
        limits = (self.slo_ttft_ms, self.slo_itl_ms)
        return Slo(*(None if limit is None else limit / 1000 for limit in limits))


@dataclass(frozen=True, slots=True)
class Measured:
    """What callers saw of a model, and the steps that its server took where it is our own, so configured."""

    name: str
    traces: list[Trace]
    steps: Steps | None = None
    config: Config | None = None


async def run(server: Target | Config, asked: Asked, readers: Readers, output: Output) -> int:
    """Measures and shows.

    Args:
        server: the one that runs there, or that of a configuration, which is started.
    Returns: exit code, 1 if a request failed.
    Raises: ConfigError for lengths that the model does not take; StartupError; grpc.RpcError where nobody
        answers.
    """
    if isinstance(server, Config):  # before it loads anything
        longest = context_limit(read_spec(server.model.path), server.model.max_context)
        check_length(asked.prompt_tokens, asked.new_tokens, longest)
    console = Console(stderr=True)
    with Bars(console, console.print) as bars:
        async with online.started(min(readers.clients, asked.requests)) as processes:
            if isinstance(server, Target):
                crowd = online.Crowd(server, processes, readers.warmup)
                measured = await _measure(crowd, asked, bars)
            else:
                async with started(prepared(server, asked), bars) as app:
                    crowd = online.Crowd(Target(app.server.address), processes, readers.warmup)
                    measured = await _measure_own(app.server, crowd, asked, bars)
    found = summarise(measured.traces, 0 if asked.rate else asked.concurrency, readers.slo)
    _show(measured, found, asked, readers, output)
    return 1 if found["errors"] else 0


def _show(measured: Measured, found: dict[str, Any], asked: Asked, readers: Readers, output: Output) -> None:
    name, steps = measured.name, measured.steps
    arrivals = f"{asked.rate:g} requests/s (Poisson)" if asked.rate else f"{asked.concurrency} at once"
    lengths = f"{asked.prompt_tokens} + {asked.new_tokens} tokens"
    title = f"{name}: {asked.requests} requests, {arrivals}, {lengths}"
    given = {"load": dataclasses.asdict(asked), "clients": readers.clients}
    config = {"config": None if measured.config is None else measured.config.changed()}
    step = {"step": None if steps is None else {**dataclasses.asdict(steps), "host_share": steps.host_share}}

    def tell(console: Console) -> None:
        tables.online(console, found, title)
        if steps is not None:
            tables.step(console, steps, {}, f"the server, mean of {steps.count} steps, prefill included")
            mode = "" if measured.config is None else measured.config.parallel.overlap
            console.print(tables.overlap_line(steps, mode))

    values = {"mode": "online", "model": name, **given, **config, **found, **step}
    output.show(values, tell, lambda: pictures.online(title, measured.traces))


async def _measure_own(server: Server, crowd: online.Crowd, asked: Asked, bars: Bars) -> Measured:
    before: Reports = {}

    async def on_warm() -> None:
        nonlocal before
        before = await settled(server.engine)

    measured = await _measure(crowd, asked, bars, on_warm)
    layers = sum(read_spec(server.config.model.path).sparse_layers)
    steps = steps_between(before, await settled(server.engine), layers)
    return dataclasses.replace(measured, steps=steps, config=server.config)


async def _measure(
    crowd: online.Crowd, asked: Asked, bars: Bars, on_warm: Callable[[], Awaitable[None]] | None = None
) -> Measured:
    async with AsyncClient(crowd.target) as client:
        info: Any = await client.model_info()
    check_length(asked.prompt_tokens, asked.new_tokens, info.max_context)
    load = asked.load(info.vocab_size)
    traces = await online.run(crowd, load, lambda done: bars.show("requests", done, load.requests), on_warm)
    return Measured(info.name, traces)


def prepared(config: Config, asked: Asked) -> Config:
    """The configuration on free ports that only this host reaches, with room for a closed loop.

    GPUs time some of their steps: else nobody could tell what the host costs.
    Raises: ConfigError for several nodes.
    """
    if config.cluster.nodes != 1:
        raise ConfigError("cluster.nodes", config.cluster.nodes, "1: the server that is started has one host")
    streams, scheduler = 0 if asked.rate else asked.concurrency, config.scheduler
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
        "scheduler.max_step_tokens": max(scheduler.max_step_tokens, running),
    }
    if config.parallel.device == "cuda":
        given["metrics.device_phases"] = config.metrics.device_phases or TIMED_EVERY
    return Config.from_values(config.values() | given)


@asynccontextmanager
async def started(config: Config, bars: Bars) -> AsyncIterator[App]:
    """A server as `ep-server serve` has it, for this host alone; whoever ends us, it does not drain.

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
            app.server.ask_to_stop()  # with the one below the second: what still streams is of no use
            raise
        finally:
            came_up.cancel()
            app.server.ask_to_stop()
            await life

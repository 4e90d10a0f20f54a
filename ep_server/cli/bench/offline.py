"""`ep-server bench offline`: decode throughput of an engine in this process, without gRPC and text.

All prompts are submitted at once and all outputs have the same length. From the last first token to the first
end, all sequences decode. Tokens are counted as they leave the streams. Units: seconds, tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from rich.console import Console

from ep_server.cli.app import warn_if_made_up
from ep_server.cli.bench.breakdown import TIMED_EVERY, Rates, Reports, Steps, less, steps_between
from ep_server.cli.bench.load import OK, Load, Trace
from ep_server.cli.bench.report import OfflineReport, Output
from ep_server.cli.bench.summary import Plan, Result, Round, short_of, steady
from ep_server.cli.progress import Bars
from ep_server.config import Config
from ep_server.engine.active_request import Submission
from ep_server.engine.engine import Engine, EngineSettings
from ep_server.engine.stream import TokenStream
from ep_server.errors import ConfigError, DeadlineExceeded, EpServerError, RankLost
from ep_server.frontend.served_model import ServedModel
from ep_server.models.families import read_spec
from ep_server.models.sizes import context_limit
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.protocol import Ranks
from ep_server.records import Request, Sampling, Stopping

ATTEMPTS = 5  # short runs, at most, to find one with the prefill steps of the whole run
REPORT_SECONDS = 30.0  # for every rank to report once it is idle
LOOK_SECONDS = 0.02
LEAST_STEPS = 64  # of a window: with fewer, chance decides which steps a device timed
Progress = Callable[[int, str, int, int], None]


async def run(config: Config, plan: Plan, rates: Rates, output: Output) -> int:
    """The whole command. Returns: exit code. Raises: ConfigError, StartupError."""
    model = ServedModel.load(config.model)
    warn_if_made_up(config.model)
    config, spec = prepared(config, plan), read_spec(config.model.path)
    plan.load(1, 1, model.vocab_size).check_length(context_limit(spec, config.model.max_context))
    console, done, total = Console(stderr=True), 0, len(plan.batches) * plan.rounds
    with Bars(console, console.print) as bars:

        def on_round() -> None:
            nonlocal done
            done += 1
            bars.show("rounds", done, total)
            if not console.is_terminal:  # bars print complete stages only
                console.print(f"round {done} of {total}")

        async with running(config, model, bars.loading) as engine:
            results = await measure(engine, model, plan, sum(spec.sparse_layers), on_round)
    output.show(OfflineReport(model.name, config, spec, plan, rates, results))
    return 0


def prepared(config: Config, plan: Plan) -> Config:
    """The configuration with room for the largest batch. On GPUs some steps are timed.

    Raises: ConfigError if scheduler.kv_blocks is set and too small, or for several nodes.
    """
    if config.cluster.nodes != 1:
        raise ConfigError("cluster.nodes", config.cluster.nodes, "1: bench offline runs on one host")
    length, most, scheduler = plan.prompt_tokens + plan.new_tokens, max(plan.batches), config.scheduler
    blocks = most * -(-length // scheduler.block_size)
    if 0 < scheduler.kv_blocks < blocks:
        allowed = f"0, or at least {blocks} for {most} sequences of {length} tokens on a rank"
        raise ConfigError("scheduler.kv_blocks", scheduler.kv_blocks, allowed)
    total = most * config.parallel.ranks
    room = {
        # One more for each sequence: a step may be planned before the end of a sequence is known.
        "scheduler.kv_blocks": scheduler.kv_blocks or blocks + most,
        "scheduler.max_running": max(scheduler.max_running, most),
        "scheduler.max_step_tokens": max(config.step_tokens, most),
        "scheduler.max_queue": max(scheduler.max_queue, total),
        "grpc.max_streams": max(config.grpc.max_streams, total),
        "grpc.stream_buffer": max(config.grpc.stream_buffer, plan.new_tokens),
    }
    if config.parallel.device == "cuda":
        room["metrics.device_phases"] = config.metrics.device_phases or TIMED_EVERY
    return Config.from_values(config.values() | room)


@asynccontextmanager
async def running(
    config: Config, model: ServedModel, progress: Progress, ranks: Ranks | None = None
) -> AsyncIterator[Engine]:
    """An engine that accepts requests. Raises: StartupError."""
    settings = EngineSettings(
        max_context=model.max_context,
        max_running=config.scheduler.max_running,
        max_queue=config.scheduler.max_queue,
        max_streams=config.grpc.max_streams,
        stream_buffer=config.grpc.stream_buffer,
    )
    engine = Engine(ranks or RankProcesses(config), settings)
    try:
        await engine.start(progress)
        yield engine
    finally:
        await engine.stop()


async def measure(
    engine: Engine, model: ServedModel, plan: Plan, sparse_layers: int, on_round: Callable[[], None]
) -> list[Result]:
    """Measures every batch size in turn.

    Args:
        sparse_layers: layers with experts. on_round: called after each round.
    Raises: ConfigError for lengths that the model cannot serve; EpServerError if a request fails.
    """
    results = []
    for batch in plan.batches:
        load = plan.load(batch, engine.num_ranks, model.vocab_size)
        load.check_length(engine.max_context)
        bench = _Batch(engine, load, sparse_layers)
        await bench.run(short_of(plan.new_tokens))  # warm-up of this batch size
        rounds = []
        for _ in range(plan.rounds):
            rounds.append(await bench.round())
            on_round()
        results.append(Result(batch, engine.num_ranks, tuple(rounds)))
    return results


class _Batch:
    """One batch size."""

    def __init__(self, engine: Engine, load: Load, sparse_layers: int) -> None:
        self._engine, self._load, self._sparse_layers = engine, load, sparse_layers
        self._prompts = [tuple(load.prompt(index)) for index in range(load.requests)]

    async def round(self) -> Round:
        """A whole run, and short runs until one has as many prefill steps: then only decoding differs."""
        new_tokens, short_tokens = self._load.new_tokens, short_of(self._load.new_tokens)
        traces, steps, decoding = await self.run(new_tokens)
        for _ in range(ATTEMPTS):
            short_traces, short_steps, _ = await self.run(short_tokens)
            if not steps or not short_steps or steps.count - short_steps.count == new_tokens - short_tokens:
                break
        whole = steady(traces, self._load.concurrency)
        beyond = _seconds(traces) - _seconds(short_traces)
        tokens = self._load.requests * (new_tokens - short_tokens)
        return Round(
            by_difference=tokens / beyond if tokens and beyond > 0 else None,
            direct=None if whole is None else whole.rate,
            whole=self._load.requests * new_tokens / _seconds(traces),
            steps=decoding or (less(steps, short_steps) if steps and short_steps else None),
        )

    async def run(self, new_tokens: int) -> tuple[list[Trace], Steps | None, Steps | None]:
        """Runs all prompts at once. Returns: what callers saw, all steps, the steps of a Window."""
        before = dict(self._engine.rank_statistics)
        begin = time.monotonic()
        traces = [Trace(index, new_tokens, begin) for index in range(self._load.requests)]
        streams = [self._submit(trace) for trace in traces]
        window = Window(self._engine, traces)
        try:
            async with asyncio.timeout(self._load.timeout):
                errors = await asyncio.gather(window.watch(), *map(_read, traces, streams))
        except TimeoutError:
            late = f"{len(traces)} requests did not end within {self._load.timeout:g} s"
            raise DeadlineExceeded(late) from None
        finally:
            for stream in streams:
                stream.close()
        for error in errors:
            if error is not None:
                raise error
        after = await settled(self._engine)
        whole = steps_between(before, after, self._sparse_layers)
        return traces, whole, window.steps(self._sparse_layers)

    def _submit(self, trace: Trace) -> TokenStream:
        request = Request(
            request_id=f"bench-{trace.index}",
            number=0,
            prompt_ids=self._prompts[trace.index],
            sampling=Sampling(temperature=0.0, seed=trace.index),
            stopping=Stopping(trace.asked),
            bypass_prefix_cache=True,
            dp_rank=trace.index % self._engine.num_ranks,
        )
        ((_, stream),) = self._engine.submit([Submission(request)])
        trace.sent = time.monotonic()
        return stream


class Window:
    """Reports of the ranks while all sequences decode.

    It starts with the first report that every rank made after all sequences had begun to decode and ends with
    the last one before a sequence ended. Ranks report twice a second, so up to a second is lost, and a short
    run has no window.
    """

    def __init__(self, engine: Engine, traces: Sequence[Trace]) -> None:
        self._engine, self._traces = engine, traces
        self._stale: Reports | None = None  # perhaps made before all sequences decoded
        self._begin: Reports | None = None
        self._end: Reports = {}

    async def watch(self) -> None:
        """Returns once a sequence has ended."""
        while self.look():
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> bool:
        """Reads the ranks' latest reports. Returns: False once a sequence has ended."""
        if any(trace.ended for trace in self._traces):
            return False
        reports = dict(self._engine.rank_statistics)
        if self._stale is None:
            if all(trace.arrivals for trace in self._traces):
                self._stale = reports
        elif all(reports[rank] is not stale for rank, stale in self._stale.items()):
            self._begin = self._begin or reports
            self._end = reports
        return True

    def steps(self, sparse_layers: int) -> Steps | None:
        """The steps of the window; None if they were too few."""
        if self._begin is None:
            return None
        steps = steps_between(self._begin, self._end, sparse_layers)
        return steps if steps is not None and steps.count >= LEAST_STEPS else None


async def settled(engine: Engine) -> Reports:
    """Waits until every rank is idle and has reported. Returns: these reports.

    Raises: DeadlineExceeded if a rank does not report; RankLost.
    """
    submitted = engine.statistics().submitted
    try:
        async with asyncio.timeout(REPORT_SECONDS):
            while not _parked(engine.rank_statistics, engine.num_ranks, submitted):
                if engine.lost.is_set():
                    raise RankLost(engine.lost_message)
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise DeadlineExceeded(f"a rank did not report within {REPORT_SECONDS:g} s") from None
    return dict(engine.rank_statistics)


def _parked(reports: Reports, ranks: int, submitted: int) -> bool:
    # Before the first request no rank reports that it has parked.
    known = [report.counters.get("parked_at_work", 0) for report in reports.values()]
    return not submitted or known == [submitted] * ranks


async def _read(trace: Trace, stream: TokenStream) -> EpServerError | None:
    """Reads a stream to its end. Returns: the error that ended it, if any."""
    status, failed = OK, None
    try:
        while True:
            chunk = await stream.read()
            if chunk.events:
                trace.arrivals.append((time.monotonic(), len(chunk.events)))
            if chunk.completion is not None:
                break
    except EpServerError as error:
        status, failed = error.status, error
    trace.end(status, time.monotonic())
    return failed


def _seconds(traces: Sequence[Trace]) -> float:
    return max(trace.ended for trace in traces) - min(trace.planned for trace in traces)

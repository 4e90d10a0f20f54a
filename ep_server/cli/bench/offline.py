"""Decode throughput of an engine in this process: rank processes as the server has them, no gRPC, no text.

Every prompt is submitted at once and every output has the same length, so from the last first token to the
first end all sequences decode. Tokens are counted where a caller gets them: out of the streams.
Units: seconds, tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from ep_server.cli.bench.breakdown import Reports, Steps, less, steps_between
from ep_server.cli.bench.load import Load, check_length, prompt
from ep_server.cli.bench.offline_plan import Plan, Result, Round, short_of
from ep_server.cli.bench.report import steady
from ep_server.cli.bench.trace import OK, Trace
from ep_server.cli.bench.window import Window
from ep_server.config import Config
from ep_server.engine.active_request import Submission
from ep_server.engine.engine import Engine, EngineSettings
from ep_server.engine.stream import TokenStream
from ep_server.errors import DeadlineExceeded, EpServerError, RankLost
from ep_server.frontend.served_model import ServedModel
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.protocol import Ranks
from ep_server.records import Request, Sampling, Stopping

ATTEMPTS = 5  # short runs, at most, to find one like the whole run
REPORT_SECONDS = 30.0  # for every rank to tell what it measured, once nothing is left to do
Progress = Callable[[int, str, int, int], None]


@asynccontextmanager
async def running(
    config: Config, model: ServedModel, progress: Progress, ranks: Ranks | None = None
) -> AsyncIterator[Engine]:
    """An engine that takes requests. Raises: StartupError."""
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
    """Every batch size in turn.

    Args:
        sparse_layers: layers with experts. on_round: called after each round.
    Raises: ConfigError for lengths that the model does not take; EpServerError where a request fails.
    """
    check_length(plan.prompt_tokens, plan.new_tokens, engine.max_context)
    results = []
    for batch in plan.batches:
        load = plan.load(batch, engine.num_ranks, model.vocab_size)
        bench = _Bench(engine, load, sparse_layers)
        await bench.run(short_of(plan.new_tokens))  # what a first batch of this size has to do once
        rounds = []
        for _ in range(plan.rounds):
            rounds.append(await bench.round())
            on_round()
        results.append(Result(batch, engine.num_ranks, tuple(rounds)))
    return results


class _Bench:
    """One batch size."""

    def __init__(self, engine: Engine, load: Load, sparse_layers: int) -> None:
        self._engine, self._load, self._sparse_layers = engine, load, sparse_layers
        self._prompts = [tuple(prompt(load, index)) for index in range(load.requests)]

    async def round(self) -> Round:
        """A whole run, and short ones until one took as many steps of prefill: then only decoding differs."""
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
        """All prompts at once. Returns: what callers saw, the steps it took, those of a Window."""
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


async def settled(engine: Engine) -> Reports:
    """Every rank's report of the moment when it had nothing left to do.

    Raises: DeadlineExceeded where one does not tell; RankLost.
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
    # Before the first request nobody has parked at one.
    known = [report.counters.get("parked_at_work", 0) for report in reports.values()]
    return not submitted or known == [submitted] * ranks


async def _read(trace: Trace, stream: TokenStream) -> EpServerError | None:
    """Takes all there is. Returns: what the stream ended with, if not well."""
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

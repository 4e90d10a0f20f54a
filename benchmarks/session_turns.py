"""Second turns over an evicted history: from the host tier against a new prefill, beside other streams.

    python3 benchmarks/session_turns.py [--history 16384] [--streams 32] [--rounds 5] [--eager]

Weights are random, of a config.json in benchmarks/shapes. At first each round's history runs, and others
until it is evicted. Then other streams decode all the time, beside one first turn over a new history, which
is a new prefill, and a second turn over the history of each round, which must find it in the host tier. The
streams' gaps between tokens are sorted by what runs meanwhile. A turn ends with its first token. Times are
from submit() to that token, in the server's process, without gRPC. Gaps include what the readers' event
loop adds. The times of the rank's steps do not: a step lasts from the end of the one before to its own end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ep_server.cli.bench.offline import running
from ep_server.config import Config
from ep_server.engine.active_request import Submission
from ep_server.engine.engine import Engine
from ep_server.frontend.served_model import ServedModel
from ep_server.models.families import read_spec
from ep_server.models.sizes import cache_dtype, kv_block_bytes, serving_dtype
from ep_server.records import Request, Sampling, StepTrace, Stopping

SHAPES = Path(__file__).parent / "shapes"
BLOCK = 16
ADDED = 32  # tokens that the second turn adds to its history
PROMPT = 16  # tokens of a stream
STREAM = 1024  # tokens that it decodes before the next one begins
LOOK_SECONDS = 0.2  # a rank reports its last 64 steps every half second

Windows = list[tuple[float, float]]  # begin, end; s of the host's monotonic clock


@dataclass
class Streams:
    """Requests that decode until stopped. gaps: (begin, end) between two tokens of one stream."""

    engine: Engine
    vocab: int
    tokens: int  # of one request
    gaps: list[tuple[float, float]] = field(default_factory=list)
    started: int = 0
    stopped: bool = False

    async def run(self, number: int) -> None:
        """One stream; where its request ends, the next begins."""
        draws = random.Random(number)
        while not self.stopped:
            prompt = tuple(draws.randrange(3, self.vocab) for _ in range(PROMPT))
            request = asked(f"stream-{number}-{draws.random()}", prompt, self.tokens, bypass=True)
            ((_, stream),) = self.engine.submit([Submission(request)])
            last, done = 0.0, False
            try:
                while not done and not self.stopped:
                    chunk = await stream.read()
                    now = time.perf_counter()
                    if last:
                        self.gaps.append((last, now))
                    else:
                        self.started += 1
                    last, done = now, chunk.completion is not None
            finally:
                stream.close()

    def during(self, windows: Windows) -> list[float]:
        """Gaps that overlap one of these times."""
        return [end - begin for begin, end in self.gaps if overlaps(begin, end, windows)]


@dataclass
class Steps:
    """The steps of rank 0 as it reports them, by number."""

    engine: Engine
    traces: dict[int, StepTrace] = field(default_factory=dict)
    stopped: bool = False

    async def follow(self) -> None:
        """Keeps the traces until stopped."""
        while not self.stopped:
            if (found := self.engine.rank_statistics.get(0)) is not None:
                self.traces |= {trace.step: trace for trace in found.last_steps}
            await asyncio.sleep(LOOK_SECONDS)

    def during(self, windows: Windows) -> list[tuple[float, StepTrace]]:
        """(seconds, trace) of each step that overlaps one of these times."""
        found = []
        for number, trace in self.traces.items():
            if (before := self.traces.get(number - 1)) is not None:
                begin, end = ended(before), ended(trace)
                if overlaps(begin, end, windows):
                    found.append((end - begin, trace))
        return found


def overlaps(begin: float, end: float, windows: Windows) -> bool:
    return any(begin < until and end > since for since, until in windows)


def ended(step: StepTrace) -> float:
    parts = step.plan_ns, step.vote_ns, step.run_ns, step.publish_ns
    return (step.start_ns + sum(parts)) / 1e9


def asked(name: str, prompt: tuple[int, ...], new: int, *, bypass: bool = False) -> Request:
    sampling = Sampling(temperature=0.0, seed=0)
    return Request(name, 0, prompt, sampling, Stopping(new), bypass_prefix_cache=bypass)


async def turn(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, float, int]:
    """Asks for one token. Returns: (submit, token, prompt tokens found in a cache)."""
    begin = time.perf_counter()
    ((_, stream),) = engine.submit([Submission(asked(f"turn-{begin}", prompt, 1))])
    try:
        cached = 0
        while True:
            chunk = await stream.read()
            if chunk.events:
                end, cached = time.perf_counter(), chunk.events[0].cached_tokens
            if chunk.completion is not None:
                return begin, end, cached
    finally:
        stream.close()


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def configured(options: argparse.Namespace, folder: Path, *, graphs: bool) -> tuple[Config, int, int]:
    """The server, the tokens of one stream's request, and the histories that evict one."""
    values = json.loads((SHAPES / options.shape / "config.json").read_text())
    if options.layers:
        values["num_hidden_layers"] = options.layers
    longest = options.history + ADDED + 1
    values["max_position_embeddings"] = max(values["max_position_embeddings"], longest)
    (folder / "config.json").write_text(json.dumps(values))
    spec = read_spec(folder)
    new = min(longest - PROMPT, STREAM)
    per_stream = -(-(PROMPT + new) // BLOCK)
    history = -(-longest // BLOCK)
    blocks = options.streams * (per_stream + 1) + history + history // 4
    others = blocks // history + 1  # histories that evict one
    block = kv_block_bytes(spec, BLOCK, cache_dtype(serving_dtype(spec, "auto"), options.kv_dtype))
    held = (options.rounds * (others + 2) + 1) * history * block  # every history
    config = Config.from_values(
        {
            "model.path": str(folder),
            "model.load_format": "dummy",
            "model.kv_dtype": options.kv_dtype,
            "model.max_context": longest,
            "parallel.device": options.device,
            "parallel.graphs": graphs,
            "scheduler.block_size": BLOCK,
            "scheduler.max_running": options.streams + 2,
            "scheduler.max_step_tokens": options.step,
            "scheduler.itl_budget_ms": options.budget,
            "scheduler.kv_blocks": blocks,
            "scheduler.kv_host_gib": held / 2**30,
        }
    )
    return config, new, others


async def measure(options: argparse.Namespace, folder: Path, *, graphs: bool) -> dict[str, float]:
    config, new, others = configured(options, folder, graphs=graphs)
    vocab, draws = read_spec(folder).vocab_size, random.Random(1)

    def drawn(tokens: int) -> tuple[int, ...]:
        return tuple(draws.randrange(3, vocab) for _ in range(tokens))

    # Drawn now: it takes milliseconds, in which the event loop could not read the streams.
    prompts = [[drawn(options.history) for _ in range(others + 1)] for _ in range(options.rounds)]
    again = [(*those[0], *drawn(ADDED)) for those in prompts]
    alone = drawn(options.history)

    first, second, quiet = Windows(), Windows(), Windows()
    launched = time.perf_counter()
    async with running(config, ServedModel.load(config.model), lambda *_: None) as engine:
        start = time.perf_counter() - launched
        for prompt in (prompt for those in prompts for prompt in those):
            await turn(engine, prompt)
        streams, steps = Streams(engine, vocab, new), Steps(engine)
        tasks = [asyncio.create_task(streams.run(number)) for number in range(options.streams)]
        tasks.append(asyncio.create_task(steps.follow()))
        while streams.started < options.streams:
            await asyncio.sleep(0.05)
        begin, end, _ = await turn(engine, alone)
        first.append((begin, end))
        for more in again:
            await asyncio.sleep(options.pause)
            since = time.perf_counter()
            await asyncio.sleep(options.pause)
            quiet.append((since, time.perf_counter()))
            begin, end, cached = await turn(engine, more)
            second.append((begin, end))
            if cached < options.history - BLOCK:
                raise SystemExit(f"a second turn found {cached} of {options.history} tokens")
        await asyncio.sleep(1.0)  # ranks report every half second
        load = engine.rank_statistics[0].load
        counters = dict(engine.rank_statistics[0].counters)
        if load.prefix_host_hits < 0.9 * options.rounds * options.history:
            raise SystemExit(f"only {load.prefix_host_hits} prompt tokens came from the host tier")
        streams.stopped = steps.stopped = True
        await asyncio.gather(*tasks)
    cold, warm = ([end - begin for begin, end in turns] for turns in (first, second))
    return {
        "start, s": start,
        "steps": counters["run_steps"],
        "steps launched kernel by kernel": counters["run_steps"] - counters["graph_steps"],
        "first turn, s": statistics.median(cold),
        "second turn, s": statistics.median(warm),
        "sooner by": statistics.median(cold) / statistics.median(warm),
        **gaps_of(streams, first, second, quiet),
        **steps_of(steps, second, quiet),
        "prompt tokens from the host": load.prefix_host_hits,
        "GB saved": counters.get("kv_saved_bytes", 0) / 1e9,
        "GB loaded": counters.get("kv_loaded_bytes", 0) / 1e9,
    }


def gaps_of(streams: Streams, first: Windows, second: Windows, quiet: Windows) -> dict[str, float]:
    """What the streams' readers see."""
    before, meanwhile = streams.during(quiet), streams.during(second)
    return {
        "gap p50 without turns, ms": quantile(before, 0.5) * 1e3,
        "gap p99 without turns, ms": quantile(before, 0.99) * 1e3,
        "gap p50 in second turns, ms": quantile(meanwhile, 0.5) * 1e3,
        "gap p99 in second turns, ms": quantile(meanwhile, 0.99) * 1e3,
        "gap p99 in second turns / without": quantile(meanwhile, 0.99) / quantile(before, 0.99),
        "gap p99 in first turns, ms": quantile(streams.during(first), 0.99) * 1e3,
        "gap p99 of pauses and second turns, ms": quantile(streams.during(quiet + second), 0.99) * 1e3,
        "gaps in second turns": len(meanwhile),
    }


def steps_of(steps: Steps, second: Windows, quiet: Windows) -> dict[str, float]:
    """What the rank's steps take: those that begin or end in second turns, with and without prompt tokens."""
    before, meanwhile = [time for time, _ in steps.during(quiet)], steps.during(second)
    mixed = [time for time, step in meanwhile if step.tokens > step.sequences]
    single = [time for time, step in meanwhile if step.tokens == step.sequences]
    planned = [step.plan_ns / 1e9 for _, step in meanwhile]
    return {
        "step p50 without turns, ms": quantile(before, 0.5) * 1e3,
        "step p99 without turns, ms": quantile(before, 0.99) * 1e3,
        "steps in second turns": len(meanwhile),
        "  with prompt tokens": len(mixed),
        "  with prompt tokens, p50, ms": quantile(mixed, 0.5) * 1e3,
        "  with prompt tokens, longest, ms": quantile(mixed, 1.0) * 1e3,
        "  without, p50, ms": quantile(single, 0.5) * 1e3,
        "  without, longest, ms": quantile(single, 1.0) * 1e3,
        "  longest plan, ms": quantile(planned, 1.0) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Second turns over an evicted history.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: as the shape")
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "fp8_e4m3"))
    parser.add_argument("--history", type=int, default=16384, help="tokens")
    parser.add_argument("--streams", type=int, default=32, help="that decode meanwhile")
    parser.add_argument("--budget", type=float, default=-1.0, help="scheduler.itl_budget_ms")
    parser.add_argument("--step", type=int, default=2048, help="scheduler.max_step_tokens")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds without turns, twice a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="also measure without graphs")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    found = {}
    for graphs in (True, False) if options.eager else (True,):
        name = f"parallel.graphs = {str(graphs).lower()}"
        with tempfile.TemporaryDirectory() as folder:
            found[name] = asyncio.run(measure(options, Path(folder), graphs=graphs))
        print(name)
        for what, value in found[name].items():
            print(f"{what:<40} {value:12.4f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""Balance of experts in a server under load: rows per rank and layer, step by step, while experts move.

    python benchmarks/balance_streams.py [--ranks 4] [--spare-slots 3] [--seconds 90] [--balance auto]
    python benchmarks/balance_streams.py --device cuda --ranks 2 --spare-slots 7 --streams 128 \\
        --model benchmarks/shapes/qwen3-30b-a3b

Real ranks serve a model with random weights and Zipf routing (model.routing = zipf). Streams run all the
time. A line is printed for every 100 steps: maximum / mean rows of ranks, tokens per second, and the time
between two tokens of a stream (p99). At the end: that time while experts move and while none does, and the
same of the steps of rank 0, by its own clock: the readers share a process with the server. A stream that ends
with an error, or with fewer tokens than asked for, is a failure. On GPUs ranks fill a host shadow
(--shadow on) while the first lines are printed; --wait lets them do so before.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.session_turns import Steps, Windows, quantile
from ep_server.client import AsyncClient
from ep_server.config import Config
from ep_server.engine.engine import Engine
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.server import Server
from ep_server.ranks.launcher import RankProcesses

STEPS = 100
QUANTILES = (("p50", 0.5), ("p99", 0.99), ("longest", 1.0))
LOOK_SECONDS = 0.005  # between two looks whether experts move
ASSETS = Path(__file__).parents[1] / "ep_server" / "assets" / "demo_model"


class Gaps:
    """Seconds between two tokens of a stream, while experts move (True) and while none does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokens = 0
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.recent: list[float] = []  # since the last line

    def add(self, tokens: int, since: float) -> float:
        """Tokens came. since: the time of those before, 0 = these are the first. Returns: now."""
        now = time.monotonic()
        self.tokens += tokens
        if since:
            self.seconds[self._engine.balancer.moving].append(now - since)
            self.recent.append(now - since)
        return now

    def p99(self, *, moving: bool) -> str:
        """In milliseconds, and of how many."""
        found = self.seconds[moving]
        return f"{p99(found):.1f} ms of {len(found)}" if found else "none"


def p99(seconds: list[float]) -> float:
    """In milliseconds."""
    return sorted(seconds)[len(seconds) * 99 // 100] * 1000 if seconds else 0.0


def write_model(folder: Path, args: argparse.Namespace) -> None:
    """A config.json with made-up weights: that of --model, or the demo model with other sizes."""
    if args.model:
        (folder / "config.json").write_bytes((Path(args.model) / "config.json").read_bytes())
        return
    config = json.loads((ASSETS / "config.json").read_text())
    config |= {
        "num_local_experts": args.experts,
        "num_experts_per_tok": args.top_k,
        "hidden_size": args.hidden,
    }
    config |= {"num_hidden_layers": args.layers, "moe_intermediate_size": args.ffn, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((ASSETS / name).read_bytes())


def configured(folder: Path, args: argparse.Namespace) -> Config:
    return Config.from_values(
        {
            "grpc.port": 0,
            "model.path": str(folder),
            "model.load_format": "dummy",
            "model.routing": "zipf",
            "parallel.ranks": args.ranks,
            "parallel.device": args.device,
            "parallel.threads_per_rank": 1 if args.device == "cpu" else 0,
            "exchange.timeout_seconds": 120.0,
            "resilience.spare_slots": str(args.spare_slots),
            "resilience.standby": 0,
            "resilience.balance": args.balance,
            "resilience.shadow": args.shadow,
            "resilience.balance_seconds": args.period,
            "resilience.balance_moves": args.moves,
            "scheduler.max_running": args.streams,
            "scheduler.prefix_cache": False,
        }
    )


async def stream(
    client: AsyncClient, number: int, new: int, counts: dict[str, int], over: asyncio.Event, gaps: Gaps
) -> None:
    while not over.is_set():
        prompt = [1 + (number + 3 * n) % 9 for n in range(16)]
        try:
            came, last = 0, 0.0
            async for tokens in client.generate(prompt, max_new_tokens=new, ignore_eos=True, seed=number):
                came += len(tokens.token_ids)
                last = gaps.add(len(tokens.token_ids), last)
            counts["ended" if came == new else "short"] += 1
        except Exception as error:
            counts["failed"] += 1
            print(f"stream {number}: {error}", flush=True)


async def follow_moves(engine: Engine, over: asyncio.Event) -> tuple[Windows, Windows]:
    """When experts moved, and when none did, from begin to end; s of the monotonic clock."""
    found: dict[bool, Windows] = {True: [], False: []}
    began, moving = time.monotonic(), engine.balancer.moving
    while not over.is_set():
        await asyncio.sleep(LOOK_SECONDS)
        if engine.balancer.moving != moving or over.is_set():
            found[moving].append((began, time.monotonic()))
            began, moving = time.monotonic(), not moving
    return found[True], found[False]


def print_steps(steps: Steps, moving: Windows, still: Windows) -> None:
    """Steps that begin or end while experts move count there."""
    during = {step.step for _, step in steps.during(moving)}
    for what, prompts in (("all", True), ("without prompt tokens", False)):
        both: dict[bool, list[float]] = {True: [], False: []}
        for seconds, step in steps.during(moving + still):
            if prompts or step.tokens == step.sequences:
                both[step.step in during].append(seconds * 1e3)
        for number, values in both.items():
            shown = ", ".join(f"{name} {quantile(values, q):.1f}" for name, q in QUANTILES)
            print(f"steps, {what}, {'experts move' if number else 'else'}: {len(values)}, {shown} ms")


def steps_of(engine: Engine) -> int:
    return min((one.load.steps for one in engine.rank_statistics.values()), default=0)


def imbalances(before: list[tuple[int, ...]], now: list[tuple[int, ...]], experts: int) -> list[float]:
    """By layer: maximum / mean over ranks of the rows between two counts."""
    found = []
    for first in range(0, len(now[0]), experts):
        part = slice(first, first + experts)
        rows = [sum(late[part]) - sum(early[part]) for early, late in zip(before, now, strict=True)]
        found.append(max(rows) * len(rows) / max(1, sum(rows)))
    return found


async def watch(engine: Engine, args: argparse.Namespace, gaps: Gaps) -> None:
    experts = engine.balancer.placement.num_experts
    last, tokens = time.monotonic(), gaps.tokens
    began, steps, before = time.monotonic(), steps_of(engine), await engine.balancer.count_rows()
    print(
        "| s | steps | mean of layers | worst layer | tokens/s | p99 |\n|---|---|---|---|---|---|", flush=True
    )
    while time.monotonic() - began < args.seconds:
        await asyncio.sleep(0.2)
        if steps_of(engine) - steps < STEPS:
            continue
        now, passed = await engine.balancer.count_rows(), steps_of(engine) - steps
        found, clock = imbalances(before, now, experts), time.monotonic()
        mean, worst, rate = sum(found) / len(found), max(found), (gaps.tokens - tokens) / (clock - last)
        found, gaps.recent = gaps.recent, []
        row = f"{clock - began:.1f} | {passed} | {mean:.3f} | {worst:.3f} | {rate:.0f} | {p99(found):.1f} ms"
        print(f"| {row} |", flush=True)
        last, tokens = clock, gaps.tokens
        before, steps = now, steps + passed


async def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, args)
        config = configured(folder, args)
        server = Server(config, ServedModel.load(config.model), RankProcesses(config, outlive=True))
        await server.start(lambda *_: None)
        await asyncio.sleep(args.wait)
        gc.collect()
        gc.freeze()  # as the command line does once it serves
        counts = {"ended": 0, "short": 0, "failed": 0}
        async with AsyncClient(server.address) as client:
            over, gaps = asyncio.Event(), Gaps(server.engine)
            streams = [
                asyncio.create_task(stream(client, n, args.new_tokens, counts, over, gaps))
                for n in range(args.streams)
            ]
            steps = Steps(server.engine)
            moves = asyncio.create_task(follow_moves(server.engine, over))
            traces = asyncio.create_task(steps.follow())
            await watch(server.engine, args, gaps)
            over.set()
            steps.stopped = True
            await asyncio.gather(*streams, traces)
        await server.drain()
        await server.stop()
    print(f"\nstreams: {counts}")
    print(f"time between tokens, p99: experts move {gaps.p99(moving=True)}, else {gaps.p99(moving=False)}")
    print_steps(steps, *await moves)
    return int(bool(counts["short"] or counts["failed"] or not counts["ended"]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--ranks", type=int, default=4)
    option("--device", choices=("cpu", "cuda"), default="cpu")
    option("--model", default="", help="folder with the config.json of another model")
    option("--spare-slots", type=int, default=3, help="per layer and rank")
    option("--balance", choices=("auto", "off"), default="auto")
    option("--shadow", choices=("on", "off"), default="off", help="experts come from host memory")
    option("--wait", type=float, default=0.0, help="seconds between the start and the first stream")
    option("--period", type=float, default=5.0, help="seconds between plans")
    option("--moves", type=int, default=64, help="experts to load in one plan")
    option("--seconds", type=float, default=90.0)
    option("--streams", type=int, default=64, help="at once, over all ranks")
    option("--new-tokens", type=int, default=128)
    option("--experts", type=int, default=128)
    option("--top-k", type=int, default=8)
    option("--layers", type=int, default=4)
    option("--hidden", type=int, default=64)
    option("--ffn", type=int, default=32)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("ep_server.engine.balancer").setLevel(logging.INFO)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())

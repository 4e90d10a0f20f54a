"""One long prompt beside streams that decode: their gaps with and without it, and its first token.

    python3 benchmarks/long_prompt.py [--prompt 32768] [--streams 64] [--budgets=-1,0]

Weights are random, of a config.json in benchmarks/shapes. Each scheduler.itl_budget_ms has a server of its
own. A round has a pause without prompts, then one prompt, which ends with its first token. The first round is
not counted. Times are from submit() to that token, in the server's process, without gRPC.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from session_turns import PROMPT, SHAPES, Streams, quantile, turn

from ep_server.cli.bench.offline import running
from ep_server.config import Config
from ep_server.frontend.served_model import ServedModel
from ep_server.models.families import read_spec

DECODED = 8192  # tokens of a stream, which does not end while it is measured


def configured(options: argparse.Namespace, budget: float, folder: Path) -> Config:
    """A server with room for the streams and one prompt."""
    values = json.loads((SHAPES / options.shape / "config.json").read_text())
    if options.layers:
        values["num_hidden_layers"] = options.layers
    longest = max(options.prompt, PROMPT + DECODED) + 16
    values["max_position_embeddings"] = max(values["max_position_embeddings"], longest)
    (folder / "config.json").write_text(json.dumps(values))
    tokens = options.streams * (PROMPT + DECODED) + 2 * options.prompt
    return Config.from_values(
        {
            "model.path": str(folder),
            "model.load_format": "dummy",
            "model.routing": options.routing,
            "model.max_context": longest,
            "parallel.device": options.device,
            "parallel.ranks": options.ranks,
            "scheduler.max_running": options.running,
            "scheduler.max_step_tokens": options.step,
            "scheduler.kv_blocks": tokens // 16 + options.streams,
            "scheduler.prefix_cache": False,
            "scheduler.itl_budget_ms": budget,
        }
    )


async def measure(options: argparse.Namespace, budget: float, folder: Path) -> dict[str, float]:
    """Figures of one server."""
    config = configured(options, budget, folder)
    vocab, draws = read_spec(folder).vocab_size, random.Random(1)
    quiet, beside, alone = list[tuple[float, float]](), list[tuple[float, float]](), list[float]()

    def prompt() -> tuple[int, ...]:
        return tuple(draws.randrange(3, vocab) for _ in range(options.prompt))

    async with running(config, ServedModel.load(config.model), lambda *_: None) as engine:
        for _ in range(2):
            begin, end, _ = await turn(engine, prompt())
            alone.append(end - begin)
        streams = Streams(engine, vocab, DECODED)
        tasks = [asyncio.create_task(streams.run(number)) for number in range(options.streams)]
        while streams.started < options.streams:
            await asyncio.sleep(0.05)
        for number in range(options.rounds + 1):
            await asyncio.sleep(0.2)
            since = time.perf_counter()
            await asyncio.sleep(options.pause)
            until = time.perf_counter()
            begin, end, _ = await turn(engine, prompt())
            if number:
                quiet.append((since, until))
                beside.append((begin, end))
        streams.stopped = True
        await asyncio.gather(*tasks)
    before, meanwhile = streams.during(quiet), streams.during(beside)
    first = statistics.median(end - begin for begin, end in beside)
    return {
        "first token, s": first,
        "first token without streams, s": alone[-1],
        "prompt tokens/s beside the streams": options.prompt / first,
        "gap p50 without, ms": quantile(before, 0.5) * 1e3,
        "gap p99 without, ms": quantile(before, 0.99) * 1e3,
        "gap p50 with, ms": quantile(meanwhile, 0.5) * 1e3,
        "gap p99 with, ms": quantile(meanwhile, 0.99) * 1e3,
        "longest gap with, ms": max(meanwhile) * 1e3,
        "p99 with / without": quantile(meanwhile, 0.99) / quantile(before, 0.99),
    }


def main() -> None:
    """Prints the figures of each budget."""
    parser = argparse.ArgumentParser(description="One long prompt beside streams that decode.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: as the shape")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=32768, help="tokens")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--running", type=int, default=128, help="scheduler.max_running")
    parser.add_argument("--step", type=int, default=8192, help="scheduler.max_step_tokens")
    parser.add_argument("--budgets", default="-1", help="scheduler.itl_budget_ms, separated by commas")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds without prompts, each round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    for budget in map(float, options.budgets.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(measure(options, budget, Path(folder)))
        print(f"scheduler.itl_budget_ms = {budget:g}")
        for name, value in found.items():
            print(f"  {name:<40} {value:12.4f}", flush=True)


if __name__ == "__main__":
    main()

"""Scales a server under load and gives it new weights, over and over, and prints the pauses of its streams.

    python benchmarks/scale_and_update.py [--rounds 20] [--ranks 2 4 3] [--streams 32]
    python benchmarks/scale_and_update.py --device cuda --ranks 1 2 --model CHECKPOINT

A round goes through the numbers of ranks, updates the weights and returns to the first number. The weights
alternate between a checkpoint and a copy with other values. --model: the demo model, `114m` for one that
benchmarks/make_checkpoint.py writes, or a folder. Streams run all the time, each the next request once one
has ended. Exit status 1: one ended with an error, or with another number of tokens than asked for.

By change: `pause` is how long a rank ran no step, as the server reports it. `gap` is the longest time between
two tokens of any stream while the change ran, which includes the loading of new ranks on the same cores.
`whole` is the time of the call. Each is a median, 99th percentile and maximum over all rounds. "none": the
time between two changes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from safetensors.torch import load_file, save_file

from benchmarks.make_checkpoint import make_checkpoint
from ep_server.cli.chaos.report import quantiles
from ep_server.cli.chaos.streams import Answer
from ep_server.cli.demo.run import DEMO_MODEL
from ep_server.client import AsyncClient
from ep_server.config import Config
from ep_server.errors import EpServerError
from ep_server.frontend.served_model import ServedModel
from ep_server.frontend.server import Server
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.restarting import RestartingRanks

CHANGED = 1.01  # factor of the matrices in the other checkpoint
Window = tuple[str, float, float, float]  # change, its begin and end (time.monotonic()), its pause


class Load:
    """Streams without a break. answers: ended ones. wrong: what went wrong, one line each."""

    def __init__(self, client: AsyncClient, args: argparse.Namespace, vocabulary: int) -> None:
        self.answers: list[Answer] = []
        self.wrong: list[str] = []
        self.over = asyncio.Event()
        self._client, self._args, self._vocabulary = client, args, vocabulary

    async def stream(self, number: int) -> None:
        """Requests of one caller, until `over`."""
        draw = random.Random(number)
        while not self.over.is_set():
            prompt = [draw.randrange(1, self._vocabulary) for _ in range(draw.randint(*self._args.prompt))]
            new = draw.randint(*self._args.new)
            try:
                stream = self._client.generate(prompt, max_new_tokens=new, ignore_eos=True, seed=number)
                answer = Answer(stream.output)
                async for tokens in stream:
                    answer.got(tokens, time.monotonic())
            except EpServerError as error:
                self.wrong.append(f"stream {number}: {error}")
                await asyncio.sleep(0.1)
                continue
            if len(answer.output.token_ids) != new:
                self.wrong.append(f"stream {number}: {len(answer.output.token_ids)} tokens instead of {new}")
            self.answers.append(answer)


def write_models(model: str, folder: Path) -> list[str]:
    """Two checkpoints of the same shapes. Returns: their paths."""
    first, other = folder / "first", folder / "other"
    if model == "114m":
        make_checkpoint(first)
    else:
        shutil.copytree(model or DEMO_MODEL, first)
    shutil.copytree(first, other)
    for file in other.glob("*.safetensors"):
        tensors = {name: t * CHANGED if t.ndim > 1 else t for name, t in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    return [str(first), str(other)]


def configured(model: str, folder: Path, args: argparse.Namespace) -> Config:
    return Config.from_values(
        {
            "grpc.port": 0,
            "model.path": model,
            "model.updates": str(folder),
            "parallel.ranks": args.ranks[0],
            "parallel.max_ranks": max(args.ranks),
            "parallel.device": args.device,
            "parallel.threads_per_rank": 1 if args.device == "cpu" else 0,
            "exchange.timeout_seconds": 60.0,  # so long that a busy machine looks like no hang
            "resilience.balance": "off",
            "scheduler.max_running": args.streams,
        }
    )


async def timed(windows: list[Window], what: str, call: Callable[[], Awaitable[Any]]) -> None:
    """Makes a change and notes when."""
    began = time.monotonic()
    done = await call()
    windows.append((what, began, time.monotonic(), done.pause_seconds))
    print(
        f"{what}: paused {done.pause_seconds * 1000:.1f} ms, {windows[-1][2] - began:.2f} s in all",
        flush=True,
    )


async def idle(windows: list[Window], seconds: float) -> None:
    """Nothing changes."""
    began = time.monotonic()
    await asyncio.sleep(seconds)
    windows.append(("none", began, time.monotonic(), 0.0))


async def rounds(client: AsyncClient, args: argparse.Namespace, models: list[str]) -> list[Window]:
    windows: list[Window] = []
    for number in range(args.rounds):
        at = args.ranks[0]
        for count in [*args.ranks[1:], 0, args.ranks[0]]:
            await idle(windows, args.pause)
            if count:
                await timed(windows, f"{at} -> {count} ranks", lambda count=count: client.scale(count))
                at = count
            else:
                path = models[(number + 1) % 2]
                await timed(windows, "new weights", lambda path=path: client.update_weights(path))
    return windows


def report(windows: list[Window], answers: list[Answer]) -> None:
    """By change: pause and gap in ms, whole in s."""
    print("\n| change | times | pause ms | gap ms | whole s |\n|---|---|---|---|---|")
    for what in dict.fromkeys(window[0] for window in windows):
        these = [window for window in windows if window[0] == what]
        gaps = [max([0.0, *(g for one in answers for g in one.gaps(w[1], w[2]))]) for w in these]
        columns = [
            " / ".join(f"{value * scale:.{places}f}" for value in quantiles(values).values())
            for values, scale, places in (
                ([window[3] for window in these], 1000, 1),
                (gaps, 1000, 0),
                ([window[2] - window[1] for window in these], 1, 2),
            )
        ]
        print(f"| {what} | {len(these)} | {' | '.join(columns)} |")


async def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as name:
        models = write_models(args.model, Path(name))
        config = configured(models[0], Path(name), args)
        ranks = RestartingRanks(lambda: RankProcesses(config, outlive=True))
        server = Server(config, ServedModel.load(config.model), ranks)
        await server.start(lambda *_: None)
        async with AsyncClient(server.address) as client:
            load = Load(client, args, (await client.model_info()).vocab_size)
            streams = [asyncio.create_task(load.stream(number)) for number in range(args.streams)]
            windows = await rounds(client, args, models)
            load.over.set()
            await asyncio.gather(*streams)
        server.engine.check_integrity()
        await server.drain()
        await server.stop()
    report(windows, load.answers)
    tokens = sum(len(answer.output.token_ids) for answer in load.answers)
    print(f"\n{len(load.answers)} requests, {tokens} tokens; {len(load.wrong)} went wrong")
    for line in load.wrong[:20]:
        print(line)
    return int(bool(load.wrong))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--rounds", type=int, default=20)
    option(
        "--ranks", type=int, nargs="+", default=[2, 4, 3], help="numbers of ranks, the first one at the start"
    )
    option("--device", choices=("cpu", "cuda"), default="cpu")
    option("--model", default="", help="the demo model, 114m, or the folder of a checkpoint")
    option("--streams", type=int, default=32)
    option("--prompt", type=int, nargs=2, default=(16, 64), help="fewest and most tokens")
    option("--new", type=int, nargs=2, default=(64, 192), help="fewest and most tokens")
    option("--pause", type=float, default=1.0, help="seconds between two changes")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())

"""Kills ranks of a server on GPUs under load and prints how long streams pause, and where the time goes.

    python -m benchmarks.gpu_rank_loss --ranks 2 --streams 128 --faults 3

Random weights of a shape, or a checkpoint with --model, or one of the shape that is written first
(--written): random weights are made on the GPU and not read. Each rank needs a GPU. A gap is the longest
time between two messages of a stream during one loss; the phases are those of the server's log.

With --empty-spares no rank holds copies of other ranks' experts, and ranks are lost in turn. So the others
have to load every expert of a lost rank. With --set resilience.shadow=on they do it from the host shadow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.load_checkpoint import Pattern, write
from benchmarks.loss_server import Servers, given, of_streams, of_weights
from ep_server.cli.chaos.faults import FaultKind, FaultPlan, Faults, shape_of
from ep_server.cli.chaos.streams import Answer
from ep_server.client import AsyncClient
from ep_server.models.families import read_spec
from ep_server.scheduler.placement import first_placement, slots_lacking, slots_needed
from ep_server.scheduler.placement_file import placement_values

INTERVAL = 4  # tokens of a message: one client process reads all streams
SHAPE = "benchmarks/shapes/qwen3-30b-a3b"
CHAOS_SECONDS = 120
SHOWN = (
    "recovery: ",
    "recovered after",
    "lost",
    "start again",
    "expert slots",
    "they paused",
    "shadow",
    "weights ",
    '"level": "error"',
)


class InTurn(random.Random):
    """Draws the last rank first, then the one before it."""

    turn = 0

    def sample(self, population: Sequence[Any], k: int, **_: Any) -> list[Any]:  # type: ignore[override]
        self.turn += 1
        return [population[-self.turn % len(population)]]


def written(folder: Path, asked: argparse.Namespace, seed: int = 0) -> Path:
    """A checkpoint of the shape that can be served, in the page cache."""
    began = time.monotonic()
    folder.mkdir()
    pattern = Pattern(servable=True, seed=seed)
    write(folder, asked.shape, asked.written, len(os.sched_getaffinity(0)), pattern)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(f"wrote {size / 2**30:.1f} GiB in {time.monotonic() - began:.1f} s", flush=True)
    return folder


def empty_spares(asked: argparse.Namespace, file: Path) -> list[str]:
    """Settings by which ranks have the slots to lose one of them, without copies in them."""
    spec = read_spec(asked.model)
    experts, ranks = spec.router.num_experts, asked.ranks
    spares = slots_lacking(experts, slots_needed(experts, ranks), ranks)
    slots = slots_needed(experts, ranks) + spares
    placement = first_placement(spec.num_layers, experts, slots, range(ranks), ranks)
    file.write_text(json.dumps(placement_values(placement)))
    return [f"resilience.spare_slots={spares}", f"resilience.placement={file}"]


def servers_of(asked: argparse.Namespace) -> Servers:
    """The server, not started."""
    settings = {"parallel.device": asked.device, "model.path": asked.model, "grpc.port": asked.port}
    settings |= {"parallel.threads_per_rank": 0, "log.level": "info"}
    settings |= {**of_streams(asked.streams), **of_weights(Path(asked.model))}
    if asked.written is not None:
        settings["model.routing"] = "uniform"
    return Servers(1, asked.ranks, settings | given(asked.set), 1, asked.log)


@contextmanager
def served(servers: Servers) -> Iterator[None]:
    """While it serves. Prints how long the start took and, at the end, what its log says of it all."""
    began = time.monotonic()
    try:
        servers.start(0)
        asyncio.run(servers.until_served())
        print(f"served after {time.monotonic() - began:.1f} s", flush=True)
        yield
    finally:
        wrong = servers.stop()
        print(*servers.shown(SHOWN), *wrong, sep="\n")


async def lose_ranks(asked: argparse.Namespace, address: str) -> int:
    """Loses a rank under load so many times, each time once all ranks serve. Returns: streams that failed."""
    draw = InTurn(0) if asked.empty_spares else random.Random(0)
    async with AsyncClient(address) as client:
        failed = 0
        for _ in range(asked.faults):
            failed += await lose_one(client, asked, draw)
            await until_all_serve(client, asked.ranks)
        return failed


async def until_all_serve(client: AsyncClient, ranks: int) -> None:
    async with asyncio.timeout(CHAOS_SECONDS):
        began = time.monotonic()
        while len((await client.server_info()).rank_info) < ranks:
            await asyncio.sleep(0.1)
        print(f"  all ranks serve {time.monotonic() - began:.1f} s after the last stream ended")


async def lose_one(client: AsyncClient, asked: argparse.Namespace, draw: random.Random) -> int:
    """Greedy streams of one length, a rank killed meanwhile. Prints gaps. Returns: streams that failed."""
    plan = FaultPlan(1, [FaultKind.KILL], 1, 0.0, 0.01, CHAOS_SECONDS)
    vocabulary = (await client.model_info()).vocab_size

    async def answer() -> Answer:
        prompt = [draw.randrange(vocabulary) for _ in range(draw.randint(64, 512))]
        fields = {"temperature": 0.0, "ignore_eos": True, "stream_interval": INTERVAL}
        stream = client.generate(prompt, max_new_tokens=asked.new_tokens, **fields)
        found = Answer(stream.output)
        async for tokens in stream:
            found.got(tokens, time.monotonic())
        return found

    faults = await Faults.on(client, plan, await shape_of(client), draw)
    running = [asyncio.ensure_future(answer()) for _ in range(asked.streams)]
    await asyncio.sleep(3)
    await asyncio.wait_for(faults.run(), CHAOS_SECONDS)
    answers = await asyncio.gather(*running, return_exceptions=True)
    whole = [each for each in answers if isinstance(each, Answer)]
    short = [each for each in whole if len(each.output.sequences[0].token_ids) != asked.new_tokens]
    for loss in faults.losses:
        print(f"rank {sorted(loss.ranks)} killed, served again after {loss.ended - loss.began:.2f} s")
        for who in ("other ranks", "lost rank"):
            gaps = sorted(
                gap
                for each in whole
                if (each.rank_at(loss.began) in loss.ranks) == (who == "lost rank")
                for gap in each.gaps(loss.began, loss.ended)
            )
            if gaps:
                print(
                    f"  {who}: {len(gaps)} streams, longest gaps p50 {gaps[len(gaps) // 2]:.2f} s, "
                    f"p99 {gaps[len(gaps) * 99 // 100]:.2f} s, most {gaps[-1]:.2f} s"
                )
    failed = [each for each in answers if not isinstance(each, Answer)]
    print(f"  {len(whole)} streams to the end, {len(short)} of another length, {len(failed)} failed")
    for error in failed[:3]:
        print(f"  {error}")
    return len(failed) + len(short)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the server and its streams."""
    parser.add_argument("--model", default=SHAPE)
    parser.add_argument(
        "--written", type=int, nargs="?", const=0, help="layers of the shape to write, 0 = all of them"
    )
    parser.add_argument("--shape", default=Path(SHAPE).name, help="of benchmarks/shapes, to be written")
    parser.add_argument("--folder", type=Path, help="where it is written; default: /tmp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=2048)
    parser.add_argument("--port", type=int, default=50077)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], help="SECTION.FIELD=VALUE of the server")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    parser.add_argument("--faults", type=int, default=3)
    parser.add_argument("--empty-spares", action="store_true", help="no copies of experts at the start")
    parser.add_argument("--log", type=Path, default=Path("rank_loss"), help="prefix of the log")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        if asked.written is not None:
            asked.model = str(written(Path(folder) / "model", asked))
        if asked.empty_spares:
            asked.set += empty_spares(asked, Path(folder) / "placement.json")
        servers = servers_of(asked)
        with served(servers):
            return int(asyncio.run(lose_ranks(asked, servers.address)) > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Updates the weights of a server on GPUs under load and prints how long streams pause, beside the bound.

    python -m benchmarks.gpu_update_weights --ranks 2 --streams 128 --updates 3 --written 24

Writes two checkpoints of a shape first, which are in the page cache then, and switches between them; with
--one it writes one, and reads that again. The bound is the time that copying alone takes at the rate
measured while streams run. A gap is the longest time between two messages of a stream, from the call on.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_rank_loss import arguments, served, servers_of, written
from ep_server.client import AsyncClient


async def streamed(client: AsyncClient, asked: argparse.Namespace, draw: random.Random) -> list[float]:
    """When the messages of an endless stream arrive, until it is cancelled."""
    vocabulary, arrivals = (await client.model_info()).vocab_size, list[float]()
    while True:
        prompt = [draw.randrange(vocabulary) for _ in range(draw.randint(64, 512))]
        fields = {"temperature": 0.0, "ignore_eos": True, "stream_interval": 4}
        try:
            async for _ in client.generate(prompt, max_new_tokens=asked.new_tokens, **fields):
                arrivals.append(time.monotonic())
        except asyncio.CancelledError:
            return arrivals


async def update(asked: argparse.Namespace, paths: list[Path], address: str) -> None:
    draw = random.Random(0)
    async with AsyncClient(address) as client:
        running = [asyncio.ensure_future(streamed(client, asked, draw)) for _ in range(asked.streams)]
        await asyncio.sleep(5)
        for number in range(asked.updates):
            began = time.monotonic()
            done = await client.update_weights(str(paths[(number + 1) % len(paths)]))
            print(
                f"version {done.version} after {time.monotonic() - began:.1f} s: {done.bytes / 2**30:.2f} "
                f"GiB of a rank, paused {done.pause_seconds:.3f} s, bound {done.pause_bound_seconds:.3f} s",
                flush=True,
            )
            asked.calls.append((began, time.monotonic()))
            await asyncio.sleep(2)
        for task in running:
            task.cancel()
        found = await asyncio.gather(*running, return_exceptions=True)
    failed = [each for each in found if isinstance(each, BaseException)]
    for began, ended in asked.calls:
        gaps = sorted(
            max(b - a for a, b in pairwise(times) if b > began and a < ended + 1)
            for times in found
            if isinstance(times, list)
        )
        print(f"  longest gaps of streams: p50 {gaps[len(gaps) // 2]:.3f} s, most {gaps[-1]:.3f} s")
    print(f"{len(failed)} streams failed", *failed[:3])
    if failed:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="write one checkpoint only")
    parser.add_argument("--log", type=Path, default=Path("update_weights"), help="prefix of the log")
    asked = parser.parse_args()
    asked.calls, asked.written = [], asked.written or 0
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        names = ["model"] if asked.one else ["model", "other"]
        paths = [written(Path(folder) / name, asked, seed) for seed, name in enumerate(names)]
        asked.model = str(paths[0])
        asked.set.append(f"model.updates={folder}")
        servers = servers_of(asked)
        with served(servers):
            asyncio.run(update(asked, paths, servers.address))


if __name__ == "__main__":
    main()

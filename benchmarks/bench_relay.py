"""What a call at a node that does not lead costs: time between tokens there and at node 0, in turn.

    python benchmarks/bench_relay.py

Two nodes of one rank each on the loopback serve the demo model; every request goes to rank 0, so that only
the way of its tokens differs. Both ways must give the same tokens before anything is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

import ep_server
from ep_server.client import AsyncClient, generate_request
from ep_server.errors import Unavailable

MODEL = Path(ep_server.__file__).parent / "assets" / "demo_model"
START_SECONDS = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    with two_nodes() as (processes, ports):
        asyncio.run(measure(processes, ports, options))


@contextmanager
def two_nodes() -> Iterator[tuple[list[psutil.Process], list[int]]]:
    """Yields: the front processes and gRPC ports of node 0 and node 1."""
    rendezvous, *ports = free_ports(3)
    fronts = []
    with ExitStack() as ends:
        for node, port in enumerate(ports):
            line = [sys.executable, "-m", "ep_server", "serve", "--model", str(MODEL), "--nodes", "2"]
            line += ["--node-rank", str(node), "--rendezvous", f"127.0.0.1:{rendezvous}"]
            line += ["--port", str(port), "--metrics-enabled", "false", "--log-level", "warning"]
            fronts.append(ends.enter_context(subprocess.Popen(line)))
            ends.callback(fronts[-1].terminate)
        yield [psutil.Process(front.pid) for front in fronts], ports


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


async def measure(
    processes: Sequence[psutil.Process], ports: Sequence[int], options: argparse.Namespace
) -> None:
    """Prints a table."""
    async with AsyncClient(f"127.0.0.1:{ports[0]}") as direct, AsyncClient(f"127.0.0.1:{ports[1]}") as relay:
        await until_serving(relay)
        same = [(await one.complete([1, 2, 3], max_new_tokens=50)).token_ids for one in (direct, relay)]
        assert same[0] == same[1], same
        print(
            "streams | direct p50 / p99, us | relay p50 / p99, us | ratio of p50 | relay's CPU a message, us"
        )
        for streams in options.streams:
            gaps: dict[AsyncClient, list[float]] = {direct: [], relay: []}
            cpu, messages = 0.0, 0
            for turn in range(2 * options.rounds):
                client = (direct, relay)[turn % 2]
                before = sum(processes[1].cpu_times()[:2])
                found = await asyncio.gather(*(gaps_of(client, options.tokens) for _ in range(streams)))
                gaps[client] += [gap for one in found for gap in one]
                if client is relay:
                    cpu += sum(processes[1].cpu_times()[:2]) - before
                    messages += sum(len(one) + 1 for one in found)
            shown = [
                f"{1e6 * q(gaps[one], 50):.0f} / {1e6 * q(gaps[one], 99):.0f}" for one in (direct, relay)
            ]
            ratio = q(gaps[relay], 50) / q(gaps[direct], 50)
            print(f"{streams} | {' | '.join(shown)} | {ratio:.3f} | {1e6 * cpu / messages:.0f}", flush=True)


async def gaps_of(client: AsyncClient, tokens: int) -> list[float]:
    """Seconds between the messages of one stream."""
    times = []
    request = generate_request(
        [1, 2, 3], max_new_tokens=tokens, ignore_eos=True, temperature=0.0, output_text=False, dp_rank=0
    )
    async for event in client.decode.Generate(request):
        if event.WhichOneof("event") == "tokens":
            times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


async def until_serving(client: AsyncClient) -> None:
    """Raises: TimeoutError."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            try:
                if await client.serving("ep_server.v1.Decode"):
                    return
            except Unavailable:
                pass
            await asyncio.sleep(0.5)


def q(values: Sequence[float], percent: int) -> float:
    """A percentile."""
    return statistics.quantiles(values, n=100)[percent - 1]


if __name__ == "__main__":
    main()

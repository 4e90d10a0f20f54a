"""The transport between hosts beside the least that libfabric allows, and the exchange on it beside gloo.

Two processes that spin.
  raw    a write with its notification: our endpoint beside fabric_minimal.c (fi_writemsg with remote
         completion data, 16 in flight) on the same provider, in turn, the median of the repeats; fi_pingpong
         where it is installed, which sends messages and is another measurement
  pair   dispatch + combine, one rank per process, T = 32, H = 2048, K = 8, E = 64, BF16, in-place view, fixed
         expert output, beside one preallocated gloo all_to_all_single each way with the same deduplicated
         bytes, counts known beforehand; the slower rank of each iteration. What bounds it (fabric_pair.py):
         "sockets", the bytes for the other rank swapped over a plain connection, and "one host", the
         same pair in shared memory, which has the sums and the copies but no network
Both over the loopback, or with --hosts between two network namespaces (needs root).

    python benchmarks/bench_fabric.py [raw|pair] [--hosts] [--library PATH] [--provider NAME] [--check]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.fabric_pair import PAIR, PLACEMENT, Case, connect
from ep_server import _C
from ep_server.exchange.api import ExchangeSpec
from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.host import HostExchange
from ep_server.exchange.segment import HostShare, create_host_share
from ep_server.testing.namespaces import DEVICE, Hosts

WINDOW, SIZES, LARGEST = 16, (64, 8192, 65536, 1 << 20), 1 << 20
MOST_LATENCY, LEAST_BANDWIDTH = 1.3, 0.85  # of the minimal program
LIMIT_NS = 60_000_000_000
BLOCK = 25  # turns of one of the pair's carriers before the next one's


class Place:
    """Where the two processes run: on the loopback, or one in each of two namespaces."""

    def __init__(self, arguments: argparse.Namespace, hosts: Hosts | None) -> None:
        self.arguments, self.hosts = arguments, hosts
        self.device = DEVICE if hosts else "lo"

    def enter(self, index: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = self.device
        if self.hosts:
            with Path(f"/run/netns/{self.hosts.names[index]}").open() as file:
                assert ctypes.CDLL(None).setns(file.fileno(), 0x40000000) == 0

    def options(self, index: int) -> FabricOptions:
        address = self.hosts.address(index) if self.hosts else "127.0.0.1"
        return FabricOptions(self.arguments.library, self.arguments.provider, self.device, address)


def run_both(place: Place, body: Callable[..., Any], *args: Any) -> list[Any]:
    """body(place, index, connection to the other, *args) in two processes; their results."""
    context = multiprocessing.get_context("fork")
    ends = context.Pipe()
    answers: list[Any] = []
    processes = []
    for index in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(place, index, ends[index], theirs, body, args))
        process.start()
        processes.append((process, ours))
    for process, ours in processes:
        if not ours.poll(300):
            raise SystemExit("a process of the benchmark hangs")
        answers.append(ours.recv())
        process.join(30)
    return answers


def _main(place: Place, index: int, other: Any, result: Any, body: Callable[..., Any], args: Any) -> None:
    place.enter(index)
    torch.set_num_threads(1)
    result.send(body(place, index, other, *args))


# -- raw -----------------------------------------------------------------------------------------------------


def ours(place: Place, index: int, other: Any, size: int, rounds: int) -> dict[str, Any]:
    probe = _C.FabricProbe(place.options(index).native(), LARGEST)
    other.send(probe.address)
    probe.connect(other.recv())
    probe.latency(size, rounds // 10, index == 0, LIMIT_NS)
    times = sorted(probe.latency(size, rounds, index == 0, LIMIT_NS))
    took = probe.stream(size, rounds, WINDOW, index == 0, LIMIT_NS)
    other.send("done")
    other.recv()
    latency = [times[rounds // 2] / 1e3, times[rounds * 99 // 100] / 1e3]
    return {"latency_us": latency, "gb_per_s": size * rounds / took, "what": probe.description}


def minimal(place: Place, program: Path, provider: str, size: int, rounds: int) -> dict[str, Any]:
    names, library = (place.hosts.names if place.hosts else ("", "")), place.arguments.library
    addresses = [place.options(i).address for i in range(2)]
    line = [str(program), provider, *addresses, *names, str(size), str(rounds)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(Path(library).parent)} if library else None
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment, timeout=300)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}\n{done.stderr}")
    return json.loads(done.stdout)


def raw(place: Place, folder: Path) -> bool:
    program = folder / "fabric_minimal"
    source = Path(__file__).with_name("fabric_minimal.c")
    subprocess.run(["gcc", "-O2", "-o", str(program), str(source), "-lfabric"], check=True)
    good = True
    for size in SIZES:
        rounds = max(1000, min(20_000, (1 << 30) // size))
        both: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for _ in range(place.arguments.repeats):
            own = run_both(place, ours, size, rounds)[0]
            provider = own["what"].partition("provider ")[2].partition(",")[0]
            both.append((own, minimal(place, program, provider, size, rounds)))
        if size == SIZES[0]:
            print(both[0][0]["what"])
        p50, p99, rate = (
            [statistics.median(get(side) for side in sides) for sides in zip(*both, strict=True)]
            for get in (
                lambda s: s["latency_us"][0],
                lambda s: s["latency_us"][1],
                lambda s: s["gb_per_s"],
            )
        )
        print(
            f"{size:8} B   p50 {p50[0]:7.2f} us, minimal {p50[1]:7.2f} ({p50[0] / p50[1]:.2f} x)   "
            f"p99 {p99[0]:7.2f}, {p99[1]:7.2f}   {rate[0]:6.3f} GB/s, minimal {rate[1]:6.3f} "
            f"({rate[0] / rate[1]:.0%})"
        )
        good = good and p50[0] <= MOST_LATENCY * p50[1] and rate[0] >= LEAST_BANDWIDTH * rate[1]
    pingpong(provider)
    return good


def pingpong(provider: str) -> None:
    if shutil.which("fi_pingpong") is None:
        print("fi_pingpong is not installed")
        return
    line = ["fi_pingpong", "-p", provider, "-e", "rdm", "-I", "5000", "-S", "8192", "-B", "47592"]
    server = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(0.5)  # it has no way to say that it listens
    done = subprocess.run(
        [*line[:-2], "-P", "47592", "127.0.0.1"], capture_output=True, text=True, check=False, timeout=60
    )
    server.kill()
    server.wait()
    print("fi_pingpong, messages of 8192 B over the loopback:")
    print("  " + "\n  ".join((done.stdout or done.stderr).strip().splitlines()[-2:]))


# -- pair ----------------------------------------------------------------------------------------------------


def connected(link: FabricLink) -> HostExchange:
    """Its exchange, once both ranks have connected. Collective."""
    exchange, addresses = link.exchange(), [None, None]
    dist.all_gather_object(addresses, link.address)
    link.connect(addresses, 1)
    exchange.barrier()
    return exchange


def pair(
    place: Place, index: int, other: Any, folder: str, iterations: int, share: HostShare
) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})  # with its threads; else they meet on one core
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=index, world_size=2, timeout=timedelta(seconds=60))
    spec, case = ExchangeSpec(index, 2, PLACEMENT, **PAIR), Case(index)
    exchange = connected(FabricLink(spec, place.options(index)))
    one_host = connected(FabricLink(spec, place.options(index), share=share))
    runs = {
        "exchange": case.over(exchange),
        "gloo": case.over_gloo(),
        "sockets": case.over_sockets(connect(place.options(0).address, index, other)),
        "one host": case.over(one_host),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for block in range(1 + iterations // BLOCK):
        for name, run in runs.items():
            for _ in range(BLOCK):
                exchange.barrier()
                start = time.perf_counter()
                run()
                if block:  # the first one warms up
                    times[name].append(time.perf_counter() - start)
    what = exchange.group.link.description
    exchange.close()
    one_host.close()
    dist.barrier()
    dist.destroy_process_group()
    return {"what": what, **times}


def compare(place: Place, folder: Path) -> bool:
    share = create_host_share(ExchangeSpec(0, 2, PLACEMENT, **PAIR), (0, 0), 0)
    both = run_both(place, pair, str(folder), place.arguments.iterations, share)
    share.close()
    print(both[0]["what"])
    medians = {}
    for name in ("exchange", "gloo", "sockets", "one host"):
        slower = sorted(max(a, b) * 1e6 for a, b in zip(both[0][name], both[1][name], strict=True))
        best, medians[name], late = (slower[len(slower) * percent // 100] for percent in (10, 50, 99))
        print(f"{name:9} dispatch + combine p10 {best:7.1f} us  p50 {medians[name]:7.1f}  p99 {late:7.1f}")
    bound = medians["sockets"] + medians["one host"]
    print(f"gloo / exchange = {medians['gloo'] / medians['exchange']:.2f}")
    print(f"exchange / (sockets + one host) = {medians['exchange'] / bound:.2f}")
    return medians["gloo"] >= 3 * medians["exchange"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["raw", "pair"])
    parser.add_argument("--library", default="")
    parser.add_argument("--provider", default="")
    parser.add_argument("--hosts", action="store_true", help="between two network namespaces")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    arguments = parser.parse_args()
    parts = {"raw": raw, "pair": compare}
    good = True
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(Hosts(2)) if arguments.hosts else None
        for part in [arguments.part] if arguments.part else list(parts):
            good = parts[part](Place(arguments, hosts), folder) and good
    return 0 if good or not arguments.check else 1


if __name__ == "__main__":
    raise SystemExit(main())

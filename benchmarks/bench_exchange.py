"""Dispatch + combine beside gloo and memcpy: the same deduplicated bytes, one run, results checked first.

What is timed, per iteration, slowest rank, after a warm-up:
  pair    dispatch_send, dispatch_recv, combine_send (weighted sum of the experts' rows), combine_recv
  gloo    one preallocated all_to_all_single each way, rows only, counts known beforehand
  memcpy  the bytes that a rank sends in the pair, own rows included, copied once between two private buffers,
          warm in the cache of one core; "+ expert rows" also copies the experts' output, which the pair reads
          to sum it before it returns
  memcpy across cores  the same bytes both times, but rows of other ranks are written over memory that another
          rank has read, then read where that rank has just written them: the transfer that really happens.
          Both copies, without the barriers between them
Bytes of a rank: 2 * rows * H * element size, rows = sum over its tokens of the ranks that own an expert of
the token. Experts are not run: their output is a fixed buffer.

    python benchmarks/bench_exchange.py [--ranks 2 --tokens 32 --hidden 2048 --top-k 8 --experts 64]
    python benchmarks/bench_exchange.py --device cuda ...     the exchange over NVLink: exchange_cuda.py
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ep_server.compat.deep_ep.bootstrap import from_process_group
from ep_server.exchange.api import ExchangeSpec, Payload, Reduction, View
from ep_server.exchange.host import HostExchange


@dataclass(frozen=True)
class Settings:
    ranks: int
    tokens: int
    hidden: int
    top_k: int
    experts: int
    payload: str
    iterations: int
    warmup: int
    seed: int
    rendezvous: str = ""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.payload == "fp32" else torch.bfloat16


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor  # [T, H]
    ids: torch.Tensor  # [T, K]
    weights: torch.Tensor  # [T, K]

    @staticmethod
    def of(settings: Settings, rank: int) -> Inputs:
        g = torch.Generator().manual_seed(settings.seed * 1009 + rank)
        ids = torch.rand(settings.tokens, settings.experts, generator=g).topk(settings.top_k).indices
        x = torch.randn(settings.tokens, settings.hidden, generator=g).to(settings.dtype)
        return Inputs(x, ids, torch.rand(settings.tokens, settings.top_k, generator=g))


def check(exchange: HostExchange, settings: Settings, view: View) -> None:
    """One pair with experts that multiply by (1 + id / 8) must give the sums computed here, bit by bit."""
    spec = exchange.spec
    mine = Inputs.of(settings, spec.rank)
    received = exchange.dispatch_send(mine.x, mine.ids, mine.weights).recv(view)
    rows = received.rows if view == View.COMPACT else received.rows[received.row_ids]
    factors = 1 + torch.tensor(spec.local_experts).repeat_interleave(received.counts.long()) / 8
    got = exchange.combine_send((rows.float() * factors[:, None]).to(settings.dtype), received).recv()
    owner = torch.tensor(spec.placement)
    want = torch.zeros(settings.tokens, settings.hidden)
    for rank in range(spec.num_ranks):
        partial = torch.zeros_like(want)
        for k in range(settings.top_k):
            ids = mine.ids[:, k]
            row = (mine.x.float() * (1 + ids / 8)[:, None]).to(settings.dtype).float()
            here = (owner[ids] == rank)[:, None]
            partial += torch.where(here, mine.weights[:, k, None] * row, torch.zeros(()))
        want += partial.to(settings.dtype).float()
    if not torch.equal(got, want.to(settings.dtype)):
        raise SystemExit(f"rank {spec.rank}: wrong result with view {view}; nothing was timed")


def sample(settings: Settings, once: Callable[[], float | None]) -> torch.Tensor:
    """Seconds of each iteration on the slowest rank: all of `once`, or what it says that it took.

    Back to back: what is timed keeps the ranks in step itself, a barrier in between would add its skew.
    """
    times = torch.empty(settings.iterations, dtype=torch.float64)
    for _ in range(settings.warmup):
        once()
    gc.collect()
    gc.disable()
    dist.barrier()
    for i in range(settings.iterations):
        start = time.perf_counter()
        own = once()
        times[i] = time.perf_counter() - start if own is None else own
    gc.enable()
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times


def pair_of(exchange: HostExchange, settings: Settings, view: View) -> Callable[[], float | None]:
    mine = Inputs.of(settings, exchange.spec.rank)
    out = torch.empty_like(mine.x)
    received = exchange.dispatch_send(mine.x, mine.ids, mine.weights).recv(view)
    expert_out = torch.randn(int(received.offsets[-1]), settings.hidden).to(settings.dtype)
    exchange.combine_send(expert_out, received).recv(out)

    def once() -> None:
        got = exchange.dispatch_send(mine.x, mine.ids, mine.weights).recv(view)
        exchange.combine_send(expert_out, got).recv(out)

    return once


def row_counts(settings: Settings, placement: tuple[int, ...]) -> torch.Tensor:
    """[source, destination] deduplicated rows."""
    owner = torch.tensor(placement)
    table = torch.zeros(settings.ranks, settings.ranks, dtype=torch.int64)
    for source in range(settings.ranks):
        owners = owner[Inputs.of(settings, source).ids]
        for d in range(settings.ranks):
            table[source, d] = (owners == d).any(1).sum()
    return table


def entry_count(settings: Settings, rank: int, placement: tuple[int, ...]) -> int:
    """Rows that this rank's experts compute: one per (token, expert here)."""
    owner = torch.tensor(placement)
    return sum(int((owner[Inputs.of(settings, s).ids] == rank).sum()) for s in range(settings.ranks))


def gloo_of(settings: Settings, rank: int, table: torch.Tensor) -> Callable[[], float | None]:
    to, back = table[rank].tolist(), table[:, rank].tolist()
    sent = torch.randn(sum(to), settings.hidden).to(settings.dtype)
    there = torch.empty(sum(back), settings.hidden, dtype=settings.dtype)
    home = torch.empty_like(sent)

    def once() -> None:
        dist.all_to_all_single(there, sent, back, to)
        dist.all_to_all_single(home, there, to, back)

    once()
    if not torch.equal(home, sent):
        raise SystemExit("gloo returned other rows than were sent")
    return once


def memcpy_of(settings: Settings, rows: int, expert_rows: int) -> Callable[[], float | None]:
    source = torch.randn(rows, settings.hidden).to(settings.dtype)
    there, back = torch.empty_like(source), torch.empty_like(source)
    computed = torch.randn(expert_rows, settings.hidden).to(settings.dtype)
    read = torch.empty_like(computed)

    def once() -> None:
        there.copy_(source)
        if expert_rows:
            read.copy_(computed)
        back.copy_(there)

    return once


def memcpy_across(
    settings: Settings, exchange: HostExchange, shared: torch.Tensor, table: torch.Tensor
) -> Callable[[], float | None]:
    rank = exchange.spec.rank
    rows, own = int(table[rank].sum()), int(table[rank, rank])
    source = torch.randn(rows, settings.hidden).to(settings.dtype)
    mine, theirs = shared[rank, :rows], shared[(rank + 1) % settings.ranks, own:rows]
    back = torch.empty_like(source)

    def once() -> float:
        start = time.perf_counter()
        mine.copy_(source)
        written = time.perf_counter()
        exchange.barrier()
        read = time.perf_counter()
        back[:own].copy_(mine[:own])
        back[own:].copy_(theirs)
        end = time.perf_counter()
        exchange.barrier()
        return written - start + end - read

    return once


def pin(rank: int, settings: Settings) -> None:
    """The calling thread to a core of its own, if there are enough: two ranks might share one for a while."""
    cores = sorted(os.sched_getaffinity(0))
    if settings.ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def run(rank: int, settings: Settings, shared: torch.Tensor) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(settings.rendezvous, settings.ranks)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.ranks, timeout=limit)
    placement = tuple(e * settings.ranks // settings.experts for e in range(settings.experts))
    spec = ExchangeSpec(
        rank, settings.ranks, placement, settings.tokens, settings.hidden, settings.top_k,
        Payload(settings.payload), Reduction.RANK,
    )  # fmt: skip
    exchange = from_process_group(None, spec)
    pin(rank, settings)
    for view in (View.COMPACT, View.INDEX):
        check(exchange, settings, view)
    table = row_counts(settings, placement)
    rows, entries = int(table[rank].sum()), entry_count(settings, rank, placement)
    results = {
        "pair, index view": sample(settings, pair_of(exchange, settings, View.INDEX)),
        "pair, compact view": sample(settings, pair_of(exchange, settings, View.COMPACT)),
        "gloo all_to_all x 2": sample(settings, gloo_of(settings, rank, table)),
        "memcpy x 2": sample(settings, memcpy_of(settings, rows, 0)),
        "  + expert rows": sample(settings, memcpy_of(settings, rows, entries)),
        "memcpy across cores": sample(settings, memcpy_across(settings, exchange, shared, table)),
    }
    if rank == 0:
        report(settings, exchange, rows, results)
    dist.barrier()
    exchange.close()
    dist.destroy_process_group()


def report(settings: Settings, exchange: HostExchange, rows: int, results: dict[str, torch.Tensor]) -> None:
    size = 2 * rows * settings.hidden * settings.dtype.itemsize
    print(f"results checked bit by bit; {settings.iterations} iterations after {settings.warmup} of warm-up")
    print(f"bytes of rank 0, both ways: 2 x {rows} rows x {settings.hidden} x {settings.dtype} = {size}")
    median = {name: float(t.quantile(0.5)) for name, t in results.items()}
    columns = ("best us", "p50 us", "p90 us", "p99 us", "GB/s", "gloo / it", "it / memcpy")
    print(" " * 20, *(f"{column:>11}" for column in columns))
    for name, t in results.items():
        quantiles = [float(t.quantile(q)) * 1e6 for q in (0.0, 0.5, 0.9, 0.99)]
        gloo, memcpy = median["gloo all_to_all x 2"] / median[name], median[name] / median["memcpy x 2"]
        values = (*quantiles, size / median[name] / 1e9, gloo, memcpy)
        print(f"{name:20}", *(f"{value:11.2f}" for value in values))
    statistics = exchange.statistics()
    print("mean us by part: ", end="")
    for name, total in statistics["sums"].items():
        print(f"{name} {total / sum(statistics['histograms'][name]) / 1e3:.1f}", end="  ")
    print()


def hardware() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = [x.split(":")[1].strip() for x in lines if x.startswith(("model name", "CPU part"))]
    name, cores = model[0] if model else platform.machine(), len(os.sched_getaffinity(0))
    return f"{name}, {cores} usable cores, load {os.getloadavg()[0]:.1f}"


def commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"


def main() -> None:
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    chosen, rest = first.parse_known_args()
    if chosen.device == "cuda":
        import exchange_cuda  # beside this file; needs the CUDA part

        exchange_cuda.main(rest)
    else:
        main_cpu(rest)


def main_cpu(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("ranks", 2), ("tokens", 32), ("hidden", 2048), ("top-k", 8), ("experts", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--payload", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    settings = Settings(**vars(parser.parse_args(argv)))
    print(f"{hardware()}; torch {torch.__version__}, Python {sys.version.split()[0]}; commit {commit()}")
    print(settings)
    with tempfile.TemporaryDirectory() as folder:
        started = replace(settings, rendezvous=str(Path(folder) / "rendezvous"))
        rows = settings.tokens * settings.ranks
        shared = torch.zeros(settings.ranks, rows, settings.hidden, dtype=settings.dtype)
        shared.share_memory_()
        mp.spawn(run, args=(started, shared), nprocs=settings.ranks)


if __name__ == "__main__":
    main()

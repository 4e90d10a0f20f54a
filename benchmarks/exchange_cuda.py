"""Dispatch and combine on GPUs beside NCCL.

Checked bit by bit first, on the build and with the settings that are timed (statistics, deadlines and masks
on). Then graphs of 20 operations are replayed 300 times; a time is that of one replay over 20, on the slowest
rank, between two events of its stream. Columns, us, median (p99 in brackets):
    dispatch, combine   both halves in one kernel, 20 of the same in a row
    pair                dispatch then combine, chained
    halves              the same pair with send and receive as four kernels
    AG+RS, A2A          NCCL all-gather + reduce-scatter, and all_to_all_single each way, same routing: rows
                        with scales, ids and weights out, BF16 back; A2A moves deduplicated rows, counts known
KB out: what the busiest rank really writes to its peers in a pair. bound: the most that any rank sends or
receives, each way, at 375 GB/s. Below each line: parts by the device's own clock (mean, slowest rank).

    python benchmarks/bench_exchange.py --device cuda [--quick | --overlap] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from exchange_calls import Pair, check, nccl_calls
from exchange_case import ROUTINGS, Case, rows_between
from exchange_overlap import overlap
from exchange_timing import Time, Timer

from ep_server.ep import cuda_memory
from ep_server.ep.exchange import Payload

LINK_GBS = 375.0
TOKENS = (1, 8, 16, 32, 64, 128, 200, 256)
QUICK = {4: (128, 64, 16, 1), 2: (128,), 1: (1,)}
COLUMNS = ("dispatch", "combine", "pair", "halves", "AG+RS", "A2A")


@dataclass
class Row:
    """One line of the table."""

    case: Case
    times_us: dict[str, Time] = field(default_factory=dict)
    parts_us: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    kb_out: float = 0.0
    bound_us: float = 0.0
    memory_mb: float = 0.0


@dataclass(frozen=True)
class Job:
    """What all processes run. cases: rank count -> cases; folder: rendezvous and results."""

    cases: dict[int, list[Case]]
    folder: str
    overlap: bool
    nccl: bool


def measure(case: Case, rank: int, timer: Timer, nccl: dist.ProcessGroup | None) -> Row:
    """One row, on every rank of the case."""
    exchange = cuda_memory.from_process_group(timer.group, case.spec(rank), num_sms=case.num_sms)
    pair = Pair(exchange, case)
    row = Row(case, memory_mb=exchange.memory_bytes / 2**20)
    row.errors = timer.most(check(pair))
    row.kb_out, row.bound_us = traffic(case, pair, timer)
    for name in ("dispatch", "combine", "pair", "halves"):
        pair.pair()  # a dispatch outside graphs, for the combines that answer it
        before = exchange.statistics()
        row.times_us[name] = timer.graph(getattr(pair, name))
        if name in {"pair", "halves"}:
            row.parts_us |= timer.most(parts(name, before, exchange.statistics()))
    exchange.check()
    exchange.barrier()
    exchange.close()
    for name, call in nccl_calls(case, rank, nccl).items() if nccl is not None else ():
        row.times_us[name] = timer.graph(call)
    return row


def parts(name: str, before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Mean us of each part of an operation, from the sums that the kernels keep."""
    means = {}
    for part in after["sums"]:
        times = sum(after["histograms"][part]) - sum(before["histograms"].get(part, (0,)))
        if times:
            means[f"{name} {part}"] = (after["sums"][part] - before["sums"].get(part, 0)) / times / 1e3
    return means


def traffic(case: Case, pair: Pair, timer: Timer) -> tuple[float, float]:
    """KB that the busiest rank writes to peers in a pair, and the us that the link needs for them."""
    before = pair.exchange.statistics()["counters"]
    pair.pair()
    pair.exchange.synchronize()
    after = pair.exchange.statistics()["counters"]
    rows = rows_between(case).double().fill_diagonal_(0)
    out, bound = torch.zeros(case.ranks, dtype=torch.float64), 0.0
    for op, table in (("dispatch", rows), ("combine", rows.T)):
        sent = torch.zeros(case.ranks, dtype=torch.float64)
        sent[pair.exchange.spec.rank] = after[f"bytes/{op}"] - before[f"bytes/{op}"]
        dist.all_reduce(sent, group=timer.group)
        share = table / table.sum(1, keepdim=True).clamp(min=1)  # of a rank's bytes, by destination
        received = (share * sent[:, None]).sum(0)
        bound += float(torch.maximum(sent, received).max()) / LINK_GBS / 1e3
        out += sent
    return float(out.max()) / 1e3, bound


def run(rank: int, job: Job) -> None:
    """One process, one GPU; takes part in every rank count that reaches it, waits through the others."""
    torch.set_num_threads(4)
    torch.cuda.set_device(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world = max(job.cases)
    dist.init_process_group("gloo", init_method=f"file://{job.folder}/store", rank=rank, world_size=world)
    for ranks, cases in job.cases.items():
        members = list(range(ranks))
        gloo = dist.new_group(members, backend="gloo")
        nccl = dist.new_group(members, backend="nccl") if job.nccl and ranks > 1 else None
        for case in cases if rank < ranks else ():
            timer = Timer(gloo, case.replays)
            if job.overlap:
                overlap(case, rank, timer)
                continue
            row = measure(case, rank, timer, nccl)
            if rank == 0:
                report(row)
                with (Path(job.folder) / "rows.jsonl").open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
        dist.barrier()
    os._exit(0)  # NCCL's teardown of captured communicators is not what is measured


def report(row: Row) -> None:
    """The line of a row, and its parts below."""
    case = row.case
    times = [f"{row.times_us.get(name, '-')!s:>15}" for name in COLUMNS]
    share = 100 * row.bound_us / row.times_us["pair"].median
    print(
        f"{case.ranks:2} {case.tokens:4} {case.routing:>7} {case.form:>6} {case.wire:>5}",
        *times,
        f"{row.kb_out:8.0f} {row.bound_us:6.1f} {share:5.1f}",
    )
    by_op: dict[str, str] = {}
    for name, us in row.parts_us.items():  # "pair dispatch/send" and so on
        op, _, part = name.partition("/")
        by_op[op] = f"{by_op.get(op, op + ':')} {part} {us:.1f}"
    print("      " + "; ".join(by_op.values()))
    errors = "  ".join(f"{name} {error:.2e}" for name, error in row.errors.items())
    print(f"      memory {row.memory_mb:.1f} MiB; error against float64 sums: {errors}", flush=True)


def cases_of(given: argparse.Namespace) -> dict[int, list[Case]]:
    """The cases that the options ask for, by rank count."""
    asked = {n: tuple(given.tokens or TOKENS) for n in given.ranks or (1, 2, 4)}
    if given.overlap:
        asked = {n: tuple(given.tokens or (128,)) for n in given.ranks or (4,)}
    if given.quick:
        asked = {n: tokens for n, tokens in QUICK.items() if not given.ranks or n in given.ranks}
    common = Case(
        0, 0, payload=given.payload, form=given.form, num_sms=given.num_sms,
        replays=100 if given.overlap else 300,
    )  # fmt: skip
    return {
        n: [
            replace(common, ranks=n, tokens=t, routing=routing, wire=wire)
            for t, routing, wire in product(tokens, given.routing, given.wire)
        ]
        for n, tokens in asked.items()
    }


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_exchange.py --device cuda",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", choices=(1, 2, 3, 4, 5, 6, 7, 8), help="default 1 2 4"
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="default " + " ".join(map(str, TOKENS)))
    parser.add_argument("--payload", choices=[p.value for p in Payload if p != Payload.FP32], default="fp8")
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=["uniform"])
    parser.add_argument("--form", choices=("own", "deepep"), default="own", help="deepep: weights at combine")
    parser.add_argument("--wire", nargs="+", choices=("bf16", "log10", "fp8"), default=["bf16"])
    parser.add_argument("--num-sms", type=int, default=0, help="multiprocessors of a kernel; 0 = all")
    parser.add_argument("--quick", action="store_true", help="few sizes, no NCCL")
    parser.add_argument("--overlap", action="store_true", help="the pair beside a GEMM, instead of the table")
    parser.add_argument("--no-nccl", action="store_true")
    parser.add_argument("--json", default="", help="where to write the rows")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    given = options(argv)
    cases = cases_of(given)
    here = torch.cuda.device_count()
    if max(cases) > here:
        raise SystemExit(f"--ranks {max(cases)} needs as many GPUs, here are {here}")
    machine = {
        "gpus": f"{here} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "commit": commit(),
    }
    print("; ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    if not given.overlap:
        print("EP    T routing   form  wire", *(f"{name:>15}" for name in COLUMNS), "  KB out  bound     %")
    mp.get_context("forkserver").set_forkserver_preload(["torch.distributed", "ep_server.ep.cuda"])
    with tempfile.TemporaryDirectory() as folder:
        job = Job(cases, folder, given.overlap, nccl=not (given.quick or given.no_nccl or given.overlap))
        mp.start_processes(run, args=(job,), nprocs=max(cases), start_method="forkserver")
        rows = Path(folder) / "rows.jsonl"
        if given.json and rows.exists():
            found = [json.loads(line) for line in rows.read_text().splitlines()]
            Path(given.json).write_text(json.dumps(machine | {"rows": found}, indent=1) + "\n")


def commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"

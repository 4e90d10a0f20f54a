"""Dispatch and combine on GPUs beside NCCL.

Checked bit by bit first, on the build and with the settings that are timed (statistics, deadlines and masks
on). Then graphs of 20 operations are replayed 300 times; a time is that of one replay over 20, on the slowest
rank, between two events of its stream. Columns, us, median (p99 in brackets):
    dispatch, combine   both halves in one kernel, 20 of the same in a row
    pair                dispatch then combine, chained
    halves              the same pair with send and receive as four kernels
KB out: what the busiest rank really writes to its peers in a pair. bound: the most that any rank sends or
receives, each way, at 375 GB/s. Below each line: parts by the device's own clock (mean, slowest rank), memory
and errors, and NCCL at the same routing, rows with scales, ids and weights out, BF16 back:
    AG+RS               all-gather + reduce-scatter
    A2A                 all_to_all_single each way, deduplicated rows, counts known

Without a choice of cases all of exchange_plan.py runs, the most important first, for at most --seconds; rows
are printed, and written to --json, as they come.

    python benchmarks/bench_exchange.py --device cuda [--quick | --overlap] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from exchange_calls import Pair, check, nccl_calls
from exchange_case import FORMS, ROUTINGS, Case, rows_between
from exchange_overlap import overlap
from exchange_plan import TOKENS, Asked, cases_of
from exchange_report import HEAD, Report, Row, name_of
from exchange_timing import Timer

from ep_server.compat.deep_ep.bootstrap import from_process_group
from ep_server.exchange.api import Payload

LINK_GBS = 375.0
SECONDS = 450  # of a whole run
WAIT = timedelta(seconds=300)  # for ranks that may have died


@dataclass(frozen=True)
class Job:
    """What all processes run. folder: of the rendezvous; began: time.time() of the start."""

    cases: list[Case]
    folder: str
    machine: dict[str, str]
    began: float
    options: argparse.Namespace


def measure(case: Case, rank: int, timer: Timer) -> Row:
    """One row without NCCL, on every rank of the case."""
    device = torch.device("cuda", torch.cuda.current_device())
    exchange = from_process_group(timer.group, case.spec(rank), device, num_sms=case.num_sms)
    pair = Pair(exchange, case)
    row = Row(case, memory_mb=exchange.capabilities.memory_bytes / 2**20)
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
    """One process, one GPU; takes part in every case that reaches it, waits through the others."""
    torch.set_num_threads(4)
    torch.cuda.set_device(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world = max(case.ranks for case in job.cases)
    store = f"file://{job.folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=WAIT)
    counts = sorted({case.ranks for case in job.cases})
    gloo = {n: dist.new_group(list(range(n)), backend="gloo", timeout=WAIT) for n in counts}
    nccl = {
        n: dist.new_group(list(range(n)), backend="nccl", timeout=WAIT) for n in counts if beside_nccl(job, n)
    }
    report = Report(job.machine, job.options.json, job.began) if rank == 0 else None
    if report is not None:
        report.say(f"{world} rank processes are up")
    for case in job.cases:
        if over(job, report):
            break
        if rank < case.ranks:
            one(case, rank, Timer(gloo[case.ranks], case.replays), nccl.get(case.ranks), report, job)
    dist.barrier()
    os._exit(0)  # NCCL's teardown of captured communicators is not what is measured


def one(
    case: Case,
    rank: int,
    timer: Timer,
    nccl: dist.ProcessGroup | None,
    report: Report | None,
    job: Job,
) -> None:
    """One case, on every rank of it; rank 0 reports."""
    if job.options.overlap:
        return overlap(case, rank, timer)
    if report is not None:
        report.say(f"EP {name_of(case)}")
    row = measure(case, rank, timer)
    if report is not None:
        report.own(row)
    if nccl is None or case.form != "own" or case.wire != "bf16":
        return None  # NCCL's rows are those of the usual form
    for name, call in nccl_calls(case, rank, nccl).items():
        row.times_us[name] = timer.graph(call)
    if report is not None:
        report.beside(row)
    return None


def beside_nccl(job: Job, ranks: int) -> bool:
    given = job.options
    return ranks > 1 and not (given.quick or given.no_nccl or given.overlap)


def over(job: Job, report: Report | None) -> bool:
    """Whether the time is up, as rank 0 says it to all."""
    late = torch.zeros(1)
    if report is not None and report.seconds > job.options.seconds:
        report.say(f"stopped: --seconds {job.options.seconds:.0f} are over, the cases behind are left out")
        late += 1
    dist.broadcast(late, 0)
    return bool(late)


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_exchange.py --device cuda",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        choices=(1, 2, 3, 4, 5, 6, 7, 8),
        help="default 4 2 1, as far as there are GPUs",
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="default " + " ".join(map(str, TOKENS)))
    parser.add_argument("--payload", choices=[p.value for p in Payload if p != Payload.FP32], default="fp8")
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS)
    parser.add_argument("--form", nargs="+", choices=FORMS, help="deepep: weights at combine")
    parser.add_argument(
        "--wire", nargs="+", choices=("bf16", "log10", "fp8"), help="how combine's rows travel"
    )
    parser.add_argument("--num-sms", type=int, default=0, help="multiprocessors of a kernel; 0 = all")
    parser.add_argument("--quick", action="store_true", help="few sizes, no NCCL, 100 replays")
    parser.add_argument("--overlap", action="store_true", help="the pair beside a GEMM, instead of the table")
    parser.add_argument("--no-nccl", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="no case begins later, default %(default)s"
    )
    parser.add_argument("--json", default="", help="where to write the rows")
    return parser.parse_args(argv)


def asked_by(given: argparse.Namespace) -> Asked:
    """The options as exchange_plan.py knows them."""
    replays = 100 if given.overlap or given.quick else 300
    return Asked(
        Case(0, 0, payload=given.payload, num_sms=given.num_sms, replays=replays),
        *(tuple(each or ()) for each in (given.ranks, given.tokens, given.routing, given.wire, given.form)),
        quick=given.quick,
        overlap=given.overlap,
    )


def main(argv: list[str]) -> None:
    given, began, here = options(argv), time.time(), torch.cuda.device_count()
    try:
        cases = cases_of(asked_by(given), here)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    machine = {
        "gpus": f"{here} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "commit": commit(),
    }
    print("; ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    print(f"{len(cases)} cases, graphs of 20 operations, {cases[0].replays} replays", flush=True)
    if not given.overlap:
        print(HEAD, flush=True)
    mp.get_context("forkserver").set_forkserver_preload(
        ["torch.distributed", "ep_server.exchange.nvlink.exchange"]
    )
    with tempfile.TemporaryDirectory() as folder:
        job = Job(cases, folder, machine, began, given)
        world = max(case.ranks for case in cases)
        mp.start_processes(run, args=(job,), nprocs=world, start_method="forkserver")


def commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"

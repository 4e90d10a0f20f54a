"""GPUs of several hosts: rows through host memory (flat), or NVLink inside a host (hierarchical).

One process per rank on one machine; what counts as different hosts is joined over the loopback, so the
network is as fast as a socket here and no faster: a card's time is not measured. Results are checked first
against sums in float64. Then, for each number of tokens T per rank, both kinds in turn, back to back, the
slowest rank of each iteration, median (p99), us:
  dispatch   from dispatch_send until the GPU has the rows (INDEX view)
  combine    from combine_send until the GPU has the sums; experts are not run, their output is fixed
  pair       the two
Rows of rank 0 in a pair: intra = sum over its tokens of the ranks of its host that own an expert of the
token, itself included; inter = of those of other hosts. Bytes = 2 * rows * H * 2 (BF16). flat copies all
of them through host memory, hierarchical the inter ones.

    python benchmarks/bench_hierarchical.py [--hosts 0 0 1 1] [--tokens 1 8] [--device cpu] [--json FILE]

With fewer GPUs than ranks the hosts share them. --device cpu tries the program: shared memory for NVLink.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exchange_case import Case, Inputs, factors, rows_between, wanted

sys.path.insert(0, str(Path(__file__).parents[1]))

from ep_server.exchange.api import View
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.hierarchical.exchange import HierarchicalExchange
from tests.support.exchange.process_group import run_group
from tests.support.fabric import hierarchical_ends, mixed_ends
from tests.support.fabric.fabric_ends import LIBRARIES, loopback, usable

KINDS = ("flat", "hierarchical")
MOST_ERROR = 0.005  # root mean square, relative: a little above what BF16 gives
WARM_UP, LIMIT = 10, 1800.0
Exchange = FabricDeviceExchange | HierarchicalExchange


@dataclass(frozen=True)
class Job:
    """hosts: of each rank. case: all but tokens. library: of LIBRARIES."""

    hosts: tuple[int, ...]
    tokens: tuple[int, ...]
    case: Case
    device: str
    library: str
    folder: str


@dataclass
class Row:
    """One line of the table: times in us, [median, p99] by part."""

    kind: str
    tokens: int
    intra_rows: int
    inter_rows: int
    times_us: dict[str, list[float]] = field(default_factory=dict)


def opened(job: Job, kind: str, case: Case, group: dist.ProcessGroup) -> Exchange:
    """Collective."""
    rank, cuda = group.rank(), job.device == "cuda"
    device = "cpu"
    if cuda:
        enough = torch.cuda.device_count() >= len(job.hosts)
        torch.cuda.set_device(rank if enough else rank - job.hosts.index(job.hosts[rank]))
        device = "cuda"
    inner = mixed_ends.from_process_group(loopback(job.library), job.hosts, case.spec(rank), group)
    inter = FabricDeviceExchange(inner, device)
    if kind == "flat":
        return inter
    if cuda:
        return hierarchical_ends.on_gpus(inter, job.hosts)
    return hierarchical_ends.beside(inter, job.hosts)


class Pair:
    """Dispatch and combine of one case on one exchange."""

    def __init__(self, exchange: Exchange, case: Case, device: str) -> None:
        self.exchange, self.case, self.device = exchange, case, device
        mine = Inputs.of(case, exchange.spec.rank)
        self.given = [each.to(device) for each in (mine.x, mine.ids, mine.weights)]
        self.out = torch.empty_like(self.given[0])
        self.answers = self.check()

    def check(self) -> torch.Tensor:
        """One pair with experts that multiply. Returns: their output."""
        spec = self.exchange.spec
        received = self.exchange.dispatch_send(*self.given).recv(View.INDEX)
        assert received.row_ids is not None
        rows = received.rows.index_select(0, received.row_ids).float()
        local = factors(self.case)[list(spec.local_experts)].to(self.device)
        each = local.repeat_interleave(received.counts.long())
        answers = (rows * each[:, None]).to(torch.bfloat16)
        got = self.exchange.combine_send(answers, received).recv().double().cpu()
        sums = wanted(self.case, spec.rank).sums
        error = float((got - sums).norm() / sums.norm())
        if not error < MOST_ERROR:
            raise SystemExit(f"rank {spec.rank}: wrong sums, error {error:.2e}; nothing was timed")
        return answers

    def timed(self) -> tuple[float, float]:
        """Seconds of dispatch and of combine."""
        begin = time.perf_counter()
        received = self.exchange.dispatch_send(*self.given).recv(View.INDEX)
        self.settle()
        between = time.perf_counter()
        self.exchange.combine_send(self.answers, received).recv(self.out)
        self.settle()
        return between - begin, time.perf_counter() - between

    def settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()


def measure(pair: Pair, iterations: int) -> dict[str, list[float]]:
    """Collective."""
    for _ in range(WARM_UP):
        pair.timed()
    times = torch.tensor([pair.timed() for _ in range(iterations)], dtype=torch.float64)
    times = torch.cat([times, times.sum(1, keepdim=True)], 1) * 1e6
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    parts = zip(("dispatch", "combine", "pair"), times.unbind(1), strict=True)
    return {name: [float(t.quantile(q)) for q in (0.5, 0.99)] for name, t in parts}


def run(group: dist.ProcessGroup, job: Job) -> None:
    """One process; rank 0 prints each line when it is there."""
    intra = torch.tensor([host == job.hosts[0] for host in job.hosts])
    for tokens in job.tokens:
        case = Case(**{**asdict(job.case), "tokens": tokens})
        rows = rows_between(case)[0]
        for kind in KINDS:
            exchange = opened(job, kind, case, group)
            row = Row(kind, tokens, int(rows[intra].sum()), int(rows[~intra].sum()))
            row.times_us = measure(Pair(exchange, case, job.device), max(30, min(300, 20_000 // tokens)))
            exchange.barrier()
            exchange.close()
            if group.rank() == 0:
                report(row)
                with (Path(job.folder) / "rows.jsonl").open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")


def report(row: Row) -> None:
    times = [f"{median:.0f} ({p99:.0f})" for median, p99 in row.times_us.values()]
    print(f"{row.tokens:5} {row.kind:>7}", *(f"{time:>16}" for time in times), end=" ")
    print(f"{row.intra_rows:10} {row.inter_rows:9}", flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", help="of each rank; default 0 1, with 4 GPUs 0 0 1 1")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    for name, default in (("hidden", 7168), ("top-k", 8), ("experts", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--library", choices=LIBRARIES, default="system" if not usable("system") else "wheel")
    parser.add_argument("--json", default="", help="where to write the rows")
    return parser.parse_args()


def machine(given: argparse.Namespace, hosts: tuple[int, ...]) -> dict[str, Any]:
    """What a figure is worth nothing without."""
    asked = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    cuda = given.device == "cuda"
    return {
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if cuda else "cpu",
        "torch": torch.__version__,
        "commit": commit or "unknown",
        "hosts": hosts,
        "H, K, E": (given.hidden, given.top_k, given.experts),
    }


def main() -> None:
    given = options()
    many = given.device == "cuda" and torch.cuda.device_count() >= 4
    hosts = tuple(given.hosts or ((0, 0, 1, 1) if many else (0, 1)))
    about = machine(given, hosts)
    print("; ".join(f"{name} {value}" for name, value in about.items()))
    print(
        "    T    kind",
        *(f"{name:>16}" for name in ("dispatch", "combine", "pair")),
        " intra rows  inter rows",
    )
    case = Case(len(hosts), 0, given.hidden, given.top_k, given.experts, payload="bf16")
    with tempfile.TemporaryDirectory() as folder:
        job = Job(hosts, tuple(given.tokens), case, given.device, given.library, folder)
        try:
            run_group(run, len(hosts), args=(job,), timeout=LIMIT)
        finally:
            found = Path(folder) / "rows.jsonl"
            if given.json and found.exists():
                rows = [json.loads(line) for line in found.read_text().splitlines()]
                Path(given.json).write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

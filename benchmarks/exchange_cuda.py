"""Dispatch and combine on GPUs beside NCCL.

Checked bit by bit first, on the build and with the settings that are timed (statistics, deadlines and masks
on). Then graphs of 20 operations are replayed 300 times; a time is that of one replay over 20, on the slowest
rank, between two events of its stream. Columns, us, median (p99 in brackets):
    dispatch, combine   both halves in one kernel, 20 of the same in a row
    pair                dispatch then combine, chained
    halves              the same pair with send and receive as four kernels
    AG+RS, A2A          NCCL all-gather + reduce-scatter, and all_to_all_single each way, same routing: FP8
                        rows with scales out, BF16 back; A2A moves deduplicated rows, counts known before
bytes: what a rank really writes to its peers in a pair; bound: those bytes at 375 GB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ep_server.ep import cuda_memory
from ep_server.ep.cuda import CudaExchange
from ep_server.ep.exchange import ExchangeSpec, Payload, View
from ep_server.ep.quant import dequantise, quantise

OPERATIONS, LINK_GBS = 20, 375.0


@dataclass(frozen=True)
class Settings:
    ranks: int
    tokens: int
    hidden: int = 7168
    top_k: int = 8
    experts: int = 256
    payload: str = "fp8"
    routing: str = "uniform"
    replays: int = 300
    num_sms: int = 0

    def placement(self) -> tuple[int, ...]:
        return tuple(e * self.ranks // self.experts for e in range(self.experts))


@dataclass
class Row:
    settings: Settings
    median_us: dict[str, float] = field(default_factory=dict)
    p99_us: dict[str, float] = field(default_factory=dict)
    parts_us: dict[str, float] = field(default_factory=dict)
    bytes_out: dict[str, int] = field(default_factory=dict)
    memory_mb: float = 0.0


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @staticmethod
    def of(s: Settings, rank: int) -> Inputs:
        g = torch.Generator().manual_seed(4057 + rank)
        if s.routing == "uniform":
            ids = torch.rand(s.tokens, s.experts, generator=g).topk(s.top_k).indices
        elif s.routing == "zipf":
            share = (1.0 / torch.arange(1, s.experts + 1)).expand(s.tokens, -1)
            ids = torch.multinomial(share, s.top_k, generator=g)
        else:  # all to one: the experts of rank 0
            ids = torch.rand(s.tokens, s.experts // s.ranks, generator=g).topk(s.top_k).indices
        x = torch.randn(s.tokens, s.hidden, generator=g).to(torch.bfloat16)
        return Inputs(x, ids, torch.rand(s.tokens, s.top_k, generator=g))


def factors(s: Settings) -> torch.Tensor:
    return 1 + torch.arange(s.experts) / 64


def check(exchange: CudaExchange, s: Settings, halves: bool) -> torch.Tensor:
    """One pair must give the sums computed here. Returns expert outputs to time with."""
    spec, mine = exchange.spec, Inputs.of(s, exchange.spec.rank)
    given = mine.x.cuda(), mine.ids.cuda(), mine.weights.cuda()
    rows, scales = exchange.empty_padded()
    rows.view(torch.uint8).fill_(0x7F)
    if halves:
        received = exchange.dispatch_send(*given).recv(View.PADDED, out=(rows, scales))
    else:
        received = exchange.dispatch(*given, View.PADDED, out=(rows, scales), source_map=True)
    values = rows.float() if scales is None else dequantise(rows, scales)
    mine_factors = factors(s)[list(spec.local_experts)].cuda().view(-1, 1, 1)
    expert_out = (values * mine_factors).to(torch.bfloat16)
    got = (
        exchange.combine_send(expert_out, received).recv()
        if halves
        else exchange.combine(expert_out, received)
    )
    exchange.synchronize()
    wire = mine.x.float() if scales is None else dequantise(*quantise(mine.x, spec.payload))
    owner = torch.tensor(spec.placement)
    want = torch.zeros(s.tokens, s.hidden)
    for rank in range(s.ranks):
        partial = torch.zeros_like(want)
        for k in range(s.top_k):
            ids = mine.ids[:, k]
            answer = (wire * factors(s)[ids][:, None]).to(torch.bfloat16).float()
            term = mine.weights[:, k, None] * answer
            partial += torch.where((owner[ids] == rank)[:, None], term, torch.zeros(()))
        want += partial.to(torch.bfloat16).float()
    if not torch.equal(got.cpu(), want.to(torch.bfloat16)):
        raise SystemExit(f"rank {spec.rank}: wrong result, halves={halves}; nothing was timed")
    return expert_out


def time_graph(s: Settings, once: Callable[[], object]) -> tuple[float, float]:
    """Median and p99 us of one operation, slowest rank."""
    once()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(OPERATIONS):
            once()
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(s.replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = torch.tensor([a.elapsed_time(b) for a, b in pairwise(events)]) * 1e3 / OPERATIONS
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return float(times.quantile(0.5)), float(times.quantile(0.99))


def nccl(s: Settings, rank: int, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    width = s.hidden + s.hidden // 128 * 4 + s.top_k * 8
    sent = torch.zeros(s.tokens, width, dtype=torch.uint8, device="cuda")
    gathered = torch.empty(s.ranks * s.tokens, width, dtype=torch.uint8, device="cuda")
    partial = torch.zeros(s.ranks * s.tokens, s.hidden, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(s.tokens, s.hidden, dtype=torch.bfloat16, device="cuda")
    owner = torch.tensor(s.placement())
    table = [
        [int((owner[Inputs.of(s, source).ids] == d).any(1).sum()) for d in range(s.ranks)]
        for source in range(s.ranks)
    ]
    to, back = table[rank], [table[source][rank] for source in range(s.ranks)]
    a_in = torch.zeros(sum(to), width, dtype=torch.uint8, device="cuda")
    a_out = torch.empty(sum(back), width, dtype=torch.uint8, device="cuda")
    b_in = torch.zeros(sum(back), s.hidden, dtype=torch.bfloat16, device="cuda")
    b_out = torch.empty(sum(to), s.hidden, dtype=torch.bfloat16, device="cuda")

    def ag_rs() -> None:
        dist.all_gather_into_tensor(gathered, sent, group=group)
        dist.reduce_scatter_tensor(out, partial, group=group)

    def a2a() -> None:
        dist.all_to_all_single(a_out, a_in, back, to, group=group)
        dist.all_to_all_single(b_out, b_in, to, back, group=group)

    return {"AG+RS": ag_rs, "A2A": a2a}


def measure(s: Settings, rank: int, group: dist.ProcessGroup | None) -> Row:
    spec = ExchangeSpec(
        rank, s.ranks, s.placement(), s.tokens, s.hidden, s.top_k, Payload(s.payload), num_banks=2
    )
    exchange = cuda_memory.from_process_group(None, spec, num_sms=s.num_sms)
    row = Row(s, memory_mb=exchange.memory_bytes / 2**20)
    expert_out = check(exchange, s, halves=True)
    check(exchange, s, halves=False)
    mine = Inputs.of(s, rank)
    given = mine.x.cuda(), mine.ids.cuda(), mine.weights.cuda()
    padded, out = exchange.empty_padded(), torch.empty_like(given[0])

    def dispatch() -> object:
        return exchange.dispatch(*given, View.PADDED, out=padded, source_map=True)

    received = exchange.dispatch(*given, View.PADDED, out=padded, source_map=True)
    exchange.combine(expert_out, received, out=out)
    torch.cuda.synchronize()
    before = exchange.statistics()["counters"]
    received = exchange.dispatch(*given, View.PADDED, out=padded, source_map=True)
    exchange.combine(expert_out, received, out=out)
    torch.cuda.synchronize()
    after = exchange.statistics()["counters"]
    row.bytes_out = {op: after[f"bytes/{op}"] - before[f"bytes/{op}"] for op in ("dispatch", "combine")}

    def combine() -> object:
        return exchange.combine(expert_out, received, out=out)

    def pair() -> object:
        return exchange.combine(expert_out, dispatch(), out=out)

    def halves() -> object:
        pending = exchange.dispatch_send(*given)
        return exchange.combine_send(expert_out, pending.recv(View.PADDED, out=padded, source_map=True)).recv(
            out
        )

    programs: dict[str, Callable[[], object]] = {
        "dispatch": dispatch, "combine": combine, "pair": pair, "halves": halves
    }  # fmt: skip
    for name, program in programs.items():
        before = exchange.statistics()
        row.median_us[name], row.p99_us[name] = time_graph(s, program)
        after = exchange.statistics()
        if name not in {"pair", "halves"}:
            continue
        for part in after["sums"]:
            times = sum(after["histograms"][part]) - sum(before["histograms"].get(part, (0,)))
            if times:
                mean = (after["sums"][part] - before["sums"].get(part, 0)) / times / 1e3
                row.parts_us[f"{name} {part}"] = mean
    exchange.check()
    exchange.barrier()
    exchange.close()
    if group is not None:
        for name, program in nccl(s, rank, group).items():
            row.median_us[name], row.p99_us[name] = time_graph(s, program)
    return row


def run(rank: int, ranks: int, folder: str, todo: list[Settings]) -> None:
    torch.set_num_threads(4)
    torch.cuda.set_device(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks)
    group = dist.new_group(backend="nccl") if ranks > 1 else None
    for settings in todo:
        row = measure(settings, rank, group)
        if rank == 0:
            report(row)
            with (Path(folder) / "rows.jsonl").open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    dist.barrier()
    os._exit(0)  # NCCL's teardown of captured communicators is not what is measured


HEADER = (
    "EP",
    "T",
    "routing",
    "dispatch",
    "combine",
    "pair",
    "halves",
    "AG+RS",
    "A2A",
    "KB out",
    "bound",
    "%",
)


def report(row: Row) -> None:
    s, sent = row.settings, sum(row.bytes_out.values())
    bound = sent / LINK_GBS / 1e3

    def cell(name: str) -> str:
        if name not in row.median_us:
            return "-"
        return f"{row.median_us[name]:.1f} ({row.p99_us[name]:.1f})"

    times = [f"{cell(name):>15}" for name in ("dispatch", "combine", "pair", "halves", "AG+RS", "A2A")]
    share = 100 * bound / row.median_us["pair"]
    print(
        f"{s.ranks:2} {s.tokens:4} {s.routing:8}",
        *times,
        f"{sent / 1e3:9.0f} {bound:6.1f} {share:5.1f}",
        flush=True,
    )
    parts = "  ".join(f"{name} {us:.1f}" for name, us in row.parts_us.items())
    print(f"        by device clock: {parts}; memory {row.memory_mb:.1f} MiB", flush=True)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 200, 256])
    parser.add_argument("--payload", choices=[p.value for p in Payload if p != Payload.FP32], default="fp8")
    parser.add_argument("--routing", nargs="+", choices=("uniform", "zipf", "one"), default=["uniform"])
    parser.add_argument("--num-sms", type=int, default=0)
    parser.add_argument("--out", default="")
    given = parser.parse_args(argv)
    print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}; torch {torch.__version__}")
    print(*HEADER, sep="  ")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in given.ranks:
            todo = [
                Settings(ranks, tokens, payload=given.payload, routing=routing, num_sms=given.num_sms)
                for tokens in given.tokens
                for routing in given.routing
            ]
            mp.spawn(run, args=(ranks, folder, todo), nprocs=ranks)
        if given.out:
            Path(given.out).write_text((Path(folder) / "rows.jsonl").read_text())


if __name__ == "__main__":
    main(sys.argv[1:])

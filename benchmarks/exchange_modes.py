"""Dispatch and combine as steps on GPUs run them: with the kernels for few rows, and with those for many.

Both ways in one run, in turns, replayed from graphs, with the norm that follows and without experts between:
what exchange.mode = auto measures when a server starts. Times are medians over rounds, of the slowest rank.

    few     low latency: one kernel each way; the combine adds to the residual stream and norms
    many    route, plan, dispatch, order by expert; sum by row, combine, norm
    ratio   few / many; above 1 many rows win

    python -m benchmarks.exchange_modes [--tokens 512 8192] [--hidden 2048] [--payload bf16 fp8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ep_server.backends.gpu.moe.rows import FusedRows, ManyRows, RowsOfSteps
from ep_server.backends.gpu.moe.timed_pairs import GpuTimedPairs
from ep_server.compat.deep_ep.bootstrap import group_segment
from ep_server.exchange.api import ExchangeSpec, Payload
from ep_server.exchange.factory import Opening, Topology, open_exchange, segment_spec

TIMEOUT_NS = 20_000_000_000
WAIT = timedelta(seconds=120)


def rows_of(rank: int, args: argparse.Namespace, payload: str) -> list[dict[str, object]]:
    """One line per size."""
    ranks, most = dist.get_world_size(), max(args.tokens)
    placement = tuple(e * ranks // args.experts for e in range(args.experts))
    spec = ExchangeSpec(
        rank, ranks, placement, most, args.hidden, args.top_k, Payload(payload), timeout_ns=TIMEOUT_NS
    )
    topology, device = Topology((0,) * ranks, gpus=True), torch.device("cuda", rank)
    segment = group_segment(None, segment_spec(topology, spec))
    exchange = open_exchange(topology, spec, device, Opening(segment, many=True))
    assert exchange.fused is not None and exchange.normal is not None
    few = FusedRows(exchange.fused)
    rows = RowsOfSteps(few, few, exchange.check, ManyRows(exchange.normal))
    timed = GpuTimedPairs(exchange, rows, device, most, captured=True)
    lines = []
    for tokens in args.tokens:
        times: tuple[list[int], list[int]] = ([], [])
        for turn in range(2 * args.rounds + 2):
            took = timed.run(turn % 2 == 1, tokens)
            if turn >= 2:
                times[turn % 2].append(took)
        records = exchange.all_gather(struct.pack("<dd", *(statistics.median(each) for each in times)))
        few_us, many_us = (
            max(each) / 1e3 for each in zip(*(struct.unpack("<dd", r) for r in records), strict=True)
        )
        lines.append({"payload": payload, "tokens": tokens, "few_us": few_us, "many_us": many_us})
        if rank == 0:
            ratio = few_us / many_us
            times_us = f"few {few_us:8.1f} us   many {many_us:8.1f} us   {ratio:5.2f}"
            print(f"{payload:6} {tokens:6} tokens   {times_us}")
    exchange.barrier()
    exchange.close()
    return lines


def rank_main(rank: int, ranks: int, store: str, args: argparse.Namespace) -> None:
    """One process."""
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=WAIT)
    with torch.inference_mode():
        lines = [line for payload in args.payload for line in rows_of(rank, args, payload)]
    if rank == 0 and args.json:
        named = {"device": torch.cuda.get_device_name(), "ranks": ranks, "hidden": args.hidden}
        Path(args.json).write_text(json.dumps({**named, "lines": lines}, indent=1))
    dist.destroy_process_group()


def main() -> None:
    """Starts one process for each GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    parser.add_argument("--tokens", type=int, nargs="+", default=sizes)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--payload", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast stays off
    ranks = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(ranks, f"{folder}/store", args), nprocs=ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()

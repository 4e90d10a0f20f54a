"""The exchange of many rows over NVLink (DeepEP's high-throughput mode), beside plain stores and NCCL.

Results are checked bit by bit first. Then graphs of 10 operations are replayed; a time is the median over
rounds, of the slowest rank. Rates are link bytes per second and direction: one row per token and remote rank,
with its scales; what stays on its own GPU is not counted. In the same run, on the same number of
multiprocessors:

    stores      16-byte stores of registers to the next rank, as many bytes
    dispatch    along known routes, FP8 rows with scales that are already cast, and BF16 rows
    combine     BF16 rows back, summed in float32
    next only   dispatch and combine of BF16 rows where every token has one rank, the next one
    NCCL        all_to_all_single of the same rows, deduplicated, counts known
    call        dispatch and combine through DeepEP's API, per call with its host work
    pair LL     one dispatch and one combine of the low-latency kernels, with all multiprocessors; the combine
                also sums the outputs of a token's experts with their weights, as a step needs it

    python benchmarks/bench_bulk.py [--tokens 4096] [--sms 24] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ep_server.compat import deep_ep
from ep_server.compat.deep_ep.bootstrap import bulk_from_process_group, from_process_group
from ep_server.compat.deep_ep.normal import layout
from ep_server.exchange.api import ExchangeSpec, Payload, View
from ep_server.exchange.bulk import Arrival, Plan, Returned, Routing, Rows
from ep_server.exchange.nvlink.bulk import NvlinkBulk, combine_args, dispatch_args

REPEATS = 10  # operations in one graph
HEAP = 3 << 30
TIMEOUT_NS = 20_000_000_000
WAIT = timedelta(seconds=120)


@dataclass(frozen=True)
class Rate:
    """One line: us per operation of the slowest rank, link bytes of the busiest rank."""

    what: str
    tokens: int
    sms: int
    us: float
    link_bytes: int

    @property
    def gbs(self) -> float:
        """Link bytes per second, in 10^9."""
        return self.link_bytes / self.us / 1e3


class Bench:
    """One rank of the benchmark."""

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        self.rank, self.args, self.ranks = rank, args, dist.get_world_size()
        self.device = torch.device("cuda", rank)
        self.gloo = dist.new_group(backend="gloo")
        self.bulk: NvlinkBulk = bulk_from_process_group(self.gloo, self.device, TIMEOUT_NS, HEAP)  # type: ignore[assignment]
        self.rates: list[Rate] = []

    # -- timing -----------------------------------------------------------------------------------------

    def slowest(self, us: float) -> float:
        """Over the ranks."""
        found = torch.tensor([us], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.gloo)
        return float(found)

    def largest(self, count: int) -> int:
        """Over the ranks."""
        return int(self.slowest(float(count)))

    def replay(self, run: Callable[[], object]) -> float:
        """us of one run, REPEATS in a graph."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(REPEATS):
                run()
        return self.median(graph.replay) / REPEATS

    def median(self, run: Callable[[], object]) -> float:
        """us of one run, the slowest rank's median over rounds."""
        times = []
        for _ in range(self.args.rounds):
            dist.barrier(group=self.gloo)
            torch.cuda._sleep(2_000_000)  # the host gets ahead
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        self.bulk.check()
        return self.slowest(statistics.median(times[1:] or times))

    def note(self, what: str, tokens: int, sms: int, us: float, link_bytes: int) -> Rate:
        """Prints a line, and keeps it."""
        rate = Rate(what, tokens, sms, us, link_bytes)
        self.rates.append(rate)
        return rate

    # -- one size -----------------------------------------------------------------------------------------

    def run(self, tokens: int) -> None:
        """All lines of one number of tokens per rank."""
        args, device = self.args, self.device
        random = torch.Generator(device=device).manual_seed(100 + self.rank)
        x = torch.randn(tokens, args.hidden, device=device, generator=random).to(torch.bfloat16)
        fp8 = x.to(torch.float8_e4m3fn)
        scales = torch.rand(tokens, args.hidden // 128, device=device, generator=random)
        scores = torch.rand(tokens, args.experts, device=device, generator=random)
        ids = scores.topk(args.top_k, 1).indices
        weights = torch.rand(tokens, args.top_k, device=device, generator=random)
        per_rank, per_expert, in_rank = layout(ids, args.experts, self.ranks)
        plan, report = self.bulk.plan(Routing(in_rank, per_expert), report=True)
        assert report is not None
        arrival, sent = Arrival(report[0]), per_rank.tolist()
        remote = self.largest(sum(sent) - sent[self.rank])
        self.check(x, (fp8, scales), (ids, weights), in_rank, plan, arrival)
        forms = {"dispatch FP8": Rows(fp8, scales), "dispatch BF16": Rows(x)}
        row_bytes = {"dispatch FP8": args.hidden + scales.shape[1] * 4, "dispatch BF16": 2 * args.hidden}
        row_bytes["combine BF16"] = 2 * args.hidden
        returned = torch.randn(max(report[0], tokens), args.hidden, device=device).to(torch.bfloat16)
        for sms in args.sms:
            stores = {}
            for size in sorted(set(row_bytes.values())):
                us = self.replay(partial(self.stores, sms, remote * size))
                stores[size] = self.note("stores", tokens, sms, us, remote * size).gbs
            for what, rows in forms.items():
                us = self.replay(self.dispatcher(rows, plan, arrival, sms))
                rate = self.note(what, tokens, sms, us, remote * row_bytes[what])
                self.line(rate, stores[row_bytes[what]])
            us = self.replay(self.combiner(Returned(returned), plan, sms))
            rate = self.note("combine BF16", tokens, sms, us, remote * row_bytes["combine BF16"])
            self.line(rate, stores[row_bytes["combine BF16"]])
            self.check(x, (fp8, scales), (ids, weights), in_rank, plan, arrival)
        if self.ranks > 1:
            self.next_rank_only(x, returned)
        self.nccl(fp8, x, sent, plan, remote, tokens)
        self.low_latency(x, ids, weights, remote, tokens)

    def next_rank_only(self, x: torch.Tensor, returned: torch.Tensor) -> None:
        """Every token goes to the next rank and nowhere else, so nothing is copied on its own GPU."""
        tokens, sms = x.shape[0], self.args.sms[0]
        in_rank = torch.zeros(tokens, self.ranks, dtype=torch.bool, device=self.device)
        in_rank[:, (self.rank + 1) % self.ranks] = True
        experts = torch.zeros(self.args.experts, dtype=torch.int32, device=self.device)
        plan, report = self.bulk.plan(Routing(in_rank, experts), report=True)
        assert report is not None and report[0] == tokens
        us = self.replay(self.dispatcher(Rows(x), plan, Arrival(tokens), sms))
        size = x.numel() * x.itemsize
        self.line(self.note("dispatch, next only", tokens, sms, us, size), 0.0)
        us = self.replay(self.combiner(Returned(returned[:tokens].contiguous()), plan, sms))
        self.line(self.note("combine, next only", tokens, sms, us, size), 0.0)

    def line(self, rate: Rate, stores: float) -> None:
        """Prints a rate beside that of plain stores."""
        if self.rank == 0:
            print(
                f"{rate.what:20} T={rate.tokens:5} {rate.sms:3} SMs {rate.us:8.1f} us {rate.gbs:6.1f} GB/s"
                + (f"   stores {stores:6.1f} GB/s, ratio {rate.gbs / stores:.2f}" if stores else ""),
                flush=True,
            )

    def stores(self, sms: int, size: int) -> None:
        """Plain stores to the next rank."""
        stream = torch.cuda.current_stream().cuda_stream
        self.bulk.group.bulk_stores(stream, sms, (self.rank + 1) % self.ranks, size)

    def dispatcher(self, rows: Rows, plan: Plan, arrival: Arrival, sms: int) -> Callable[[], None]:
        """A dispatch along known routes, always to the start of the heap."""
        args = dispatch_args(rows, plan, arrival, 0)
        group = self.bulk.group
        return lambda: group.bulk_dispatch(torch.cuda.current_stream().cuda_stream, sms, args)

    def combiner(self, returned: Returned, plan: Plan, sms: int) -> Callable[[], None]:
        """A combine, always through the start of the heap."""
        tokens, hidden = plan.places.shape[0], returned.x.shape[1]
        out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=self.device)
        args = combine_args(returned, plan, (out, out), 0)
        group, keep = self.bulk.group, (out, returned)
        return lambda: keep and group.bulk_combine(torch.cuda.current_stream().cuda_stream, sms, args)

    def check(
        self,
        x: torch.Tensor,
        fp8: tuple[torch.Tensor, torch.Tensor],
        choices: tuple[torch.Tensor, torch.Tensor],
        in_rank: torch.Tensor,
        plan: Plan,
        arrival: Arrival,
    ) -> None:
        """Compares all results with those of all-gathers, bit by bit."""

        def expected(mine: torch.Tensor) -> torch.Tensor:
            parts = [torch.empty_like(mine) for _ in range(self.ranks)]
            dist.all_gather(parts, mine)
            return torch.cat([part[to[:, self.rank]] for part, to in zip(parts, everyone, strict=True)])

        everyone = [torch.empty_like(in_rank) for _ in range(self.ranks)]
        dist.all_gather(everyone, in_rank)
        sms, local = self.args.sms[0], self.args.experts // self.ranks
        with_choices = Arrival(arrival.rows, local, with_sources=True)
        received, sources = self.bulk.dispatch(Rows(x, None, *choices), plan, with_choices, sms)
        assert torch.equal(received.x, expected(x)), "BF16 rows"
        numbers = torch.arange(x.shape[0], dtype=torch.int32, device=self.device)
        assert sources is not None and torch.equal(sources, expected(numbers)), "token numbers"
        ids = expected(choices[0]) - self.rank * local
        here = (ids >= 0) & (ids < local)
        assert torch.equal(received.ids, torch.where(here, ids, -1)), "ids"
        assert torch.equal(received.weights, torch.where(here, expected(choices[1]), 0.0)), "weights"
        again, _ = self.bulk.dispatch(Rows(*fp8), plan, arrival, sms)
        assert torch.equal(again.x.view(torch.uint8), expected(fp8[0].view(torch.uint8))), "FP8 rows"
        assert torch.equal(again.scales, expected(fp8[1])), "scales"
        results = (received.x.float() * (1 + self.rank / 8)).to(torch.bfloat16)
        total, sums = torch.zeros(x.shape, device=self.device), torch.zeros_like(choices[1])
        for rank in range(self.ranks):
            to = in_rank[:, rank]
            total[to] += (x[to].float() * (1 + rank / 8)).to(torch.bfloat16).float()
            theirs = (choices[0] // local == rank) & to[:, None]
            sums += torch.where(theirs, choices[1], 0.0)
        for _ in range(3):
            out, weights = self.bulk.combine(Returned(results, received.weights), plan, sms)
            assert torch.equal(out, total.to(torch.bfloat16)), "sums"
            assert torch.equal(weights, sums), "sums of weights"

    def nccl(
        self, fp8: torch.Tensor, x: torch.Tensor, sent: list[int], plan: Plan, remote: int, tokens: int
    ) -> None:
        """all_to_all_single of as many rows."""
        prefix = plan.prefix[:, self.rank].tolist()
        came = [count - (prefix[s - 1] if s else 0) for s, count in enumerate(prefix)]
        for what, rows in (("NCCL FP8", fp8.view(torch.uint8)), ("NCCL BF16", x)):
            mine = rows.new_empty(sum(sent), rows.shape[1])
            theirs = rows.new_empty(sum(came), rows.shape[1])
            call = lambda a=theirs, b=mine: dist.all_to_all_single(a, b, came, sent)  # noqa: E731
            for _ in range(3):
                call()
            us = self.median(lambda run=call: [run() for _ in range(REPEATS)]) / REPEATS
            self.line(self.note(what, tokens, 0, us, remote * rows.shape[1] * rows.itemsize), 0.0)

    def low_latency(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, remote: int, tokens: int
    ) -> None:
        """The pair of the low-latency kernels, which also sorts rows by expert and sums them with weights."""
        for payload, row in (
            (Payload.FP8, self.args.hidden * 33 // 32),
            (Payload.BF16, 2 * self.args.hidden),
        ):
            share = self.args.experts // self.ranks
            spec = ExchangeSpec(
                rank=self.rank,
                num_ranks=self.ranks,
                placement=tuple(e // share for e in range(self.args.experts)),
                max_tokens=tokens,
                hidden=self.args.hidden,
                top_k=self.args.top_k,
                payload=payload,
                num_banks=2,
            )
            exchange = from_process_group(self.gloo, spec, self.device)
            fused = exchange.fused
            assert fused is not None
            received = fused.dispatch(x, ids, weights, View.INDEX)
            assert received.row_ids is not None
            rows = received.row_ids.shape[0]
            results = torch.randn(rows, self.args.hidden, device=self.device).to(torch.bfloat16)
            options: dict[str, Any] = {"capacity": rows}

            def pair(fused: Any = fused, results: Any = results, options: Any = options) -> None:
                found = fused.dispatch(x, ids, weights, View.INDEX, **options)
                fused.combine(results, found)

            fused.combine(results, received)
            us = self.replay(pair)
            link = remote * (row + 2 * self.args.hidden)
            self.line(self.note(f"pair LL {payload}", tokens, 0, us, link), 0.0)
            dist.barrier(group=self.gloo)
            exchange.close()

    def calls(self, tokens: int) -> None:
        """DeepEP's API, per call, with all that the host does."""
        buffer = deep_ep.Buffer(self.gloo, HEAP // 2, explicitly_destroy=True)
        x = torch.randn(tokens, self.args.hidden, device=self.device).to(torch.bfloat16)
        ids = torch.rand(tokens, self.args.experts, device=self.device).topk(self.args.top_k, 1).indices
        ranks, _, experts, in_rank, _ = buffer.get_dispatch_layout(ids, self.args.experts)
        config = deep_ep.Config(self.args.sms[0])
        recv_x, _, _, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=ranks,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=experts,
            config=config,
        )
        link = self.largest(int(in_rank.sum()) - int(in_rank[:, self.rank].sum())) * 2 * self.args.hidden

        def repeat(run: Callable[[], object]) -> Callable[[], object]:
            return lambda: [run() for _ in range(REPEATS)]

        for what, call in (
            ("call dispatch", lambda: buffer.dispatch(x, handle=handle, config=config)),
            ("call combine", lambda: buffer.combine(recv_x, handle, config=config)),
        ):
            us = self.median(repeat(call)) / REPEATS
            self.line(self.note(what, tokens, self.args.sms[0], us, link), 0.0)
        torch.cuda.synchronize()
        dist.barrier(group=self.gloo)
        buffer.destroy()


def rank_main(rank: int, ranks: int, store: str, args: argparse.Namespace) -> None:
    """One process."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=WAIT,
        device_id=torch.device("cuda", rank),
    )
    bench = Bench(rank, args)
    for tokens in args.tokens:
        bench.run(tokens)
    bench.calls(args.tokens[0])
    dist.barrier(group=bench.gloo)
    bench.bulk.close()
    if rank == 0 and args.json:
        rows = [asdict(rate) | {"gbs": rate.gbs} for rate in bench.rates]
        found = {"gpu": torch.cuda.get_device_name(0), "ranks": ranks, "rates": rows}
        Path(args.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Starts one process for each GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--sms", type=int, nargs="+", default=[24])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast stays off
    ranks = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(ranks, f"{folder}/store", args), nprocs=ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()

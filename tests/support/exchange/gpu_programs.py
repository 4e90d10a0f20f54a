"""What ranks on GPUs run in tests where nothing goes wrong: the suite, sizes, graphs, measurements."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ep_server.errors import ConfigError
from ep_server.exchange.api import ExchangeSpec, Payload, Reduction, View
from ep_server.exchange.faults import Action, Fault
from ep_server.exchange.nvlink.exchange import NvlinkExchange
from ep_server.exchange.quant import dequantise
from tests.support.compare import assert_equal
from tests.support.exchange.conformance import failure_of, run_cases, run_pair
from tests.support.exchange.expected import expect, expert
from tests.support.exchange.gpu_group import (
    a_models_spec,
    answer,
    close_exchange,
    factors_of,
    factory,
    on_gpu,
    open_exchange,
    run_experts,
)
from tests.support.exchange.gpu_sizes import sizes
from tests.support.exchange.on_gpu import OnGpu
from tests.support.exchange.routing import make_inputs
from tests.support.exchange.sequences import run_sequences


def conformance(group: dist.ProcessGroup) -> dict[str, str]:
    """The whole suite on halves apart; every case again with both halves in one kernel."""
    return fused_conformance(group) | conformance_apart(group)


def fused_conformance(group: dist.ProcessGroup) -> dict[str, str]:
    """Every case with both halves in one kernel."""
    fused = run_cases(group, factory(fused=True), instead_of_fp32=Payload.BF16)
    return {f"fused-{name}": text for name, text in fused.items()}


def conformance_apart(group: dist.ProcessGroup) -> dict[str, str]:
    """The whole suite on halves apart."""
    apart = factory(fused=False)
    return run_cases(group, apart, instead_of_fp32=Payload.BF16) | run_sequences(
        group, apart, payload=Payload.BF16
    )


def run_sizes(group: dist.ProcessGroup, only: Collection[str] = ()) -> dict[str, str]:
    """Name -> failure text, of every size with both reductions, apart and fused, in every view."""
    results = {}
    for name, size in sizes(group.size()).items():
        if only and name not in only:
            continue
        for reduction in Reduction:
            spec = size.shape.spec(group.rank(), group.size(), size.payload, reduction)
            exchange = open_exchange(group, spec, num_sms=size.num_sms)
            found = [
                failure_of(
                    partial(
                        run_pair,
                        OnGpu(exchange, fused=fused, most_tokens=size.most_tokens),
                        routing,
                        seed,
                        view,
                    )
                )
                for seed, routing in enumerate(size.routings)
                for fused in (False, True)
                for view in View
            ]
            results[f"{name}-{reduction.value}"] = next(filter(None, found), "")
            exchange.barrier()
            exchange.close()
    return results


ROUTINGS = ("uniform", "zipf", "nobody", "all_to_one", "empty_rank", "max_tokens", "dropped")


class Cases:
    """Inputs and results of many routings on the GPU, [C, ...]; beyond a case's tokens they are poison."""

    def __init__(self, spec: ExchangeSpec, count: int) -> None:
        self.names = [f"{ROUTINGS[seed % len(ROUTINGS)]}, seed {seed}" for seed in range(count)]
        size, local = spec.max_tokens, len(spec.local_experts)
        self.x = torch.full((count, size, spec.hidden), torch.nan, dtype=torch.bfloat16)
        self.ids = torch.zeros(count, size, spec.top_k, dtype=torch.int64)  # valid ids: too many show
        self.weights = torch.full((count, size, spec.top_k), torch.nan)
        self.combined = torch.zeros_like(self.x)
        self.tokens = torch.zeros(count, 1, dtype=torch.int32)
        self.counts = torch.zeros(count, local, dtype=torch.int32)
        for seed in range(count):
            self._fill(spec, seed)
        for name in ("x", "ids", "weights", "combined", "tokens", "counts"):
            setattr(self, name, getattr(self, name).cuda())

    def _fill(self, spec: ExchangeSpec, seed: int) -> None:
        inputs = make_inputs(spec, ROUTINGS[seed % len(ROUTINGS)], seed)
        mine, wanted = inputs[spec.rank], expect(spec, inputs)
        count = len(mine.x)
        self.x[seed, :count], self.ids[seed, :count], self.weights[seed, :count] = (
            mine.x,
            mine.ids,
            mine.weights,
        )
        self.combined[seed, :count], self.tokens[seed] = wanted.combined, count
        for local, _, _ in wanted.entries:
            self.counts[seed, local] += 1


class Replayed:
    """A graph that takes the next case, runs an odd number of operations and compares, all on the GPU."""

    OPERATIONS = 3

    def __init__(self, exchange: NvlinkExchange, cases: Cases, *, fused: bool) -> None:
        self.exchange, self.cases, self.fused = exchange, cases, fused
        self.x, self.ids, self.weights = (torch.empty_like(t[0]) for t in (cases.x, cases.ids, cases.weights))
        self.tokens, self.factors = torch.empty_like(cases.tokens[0]), factors_of(exchange.spec)
        self.rows = torch.arange(len(self.x), device=self.x.device)[:, None]
        self.outputs = [(exchange.empty_padded(), torch.empty_like(self.x)) for _ in range(self.OPERATIONS)]
        self.step, self.wrong = (torch.zeros(1, dtype=torch.int64, device=self.x.device) for _ in range(2))
        self.first_wrong = torch.full_like(self.step, -1)
        self.run()  # once as it is, then captured
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def run(self) -> None:
        now = self.step % len(self.cases.names)
        for name in ("x", "ids", "weights", "tokens"):
            getattr(self, name).copy_(getattr(self.cases, name).index_select(0, now)[0])
        combined, counts = (t.index_select(0, now)[0] for t in (self.cases.combined, self.cases.counts))
        for padded, out in self.outputs:
            got = self.operation(padded, out)
            wrong = (out.view(torch.int16) != combined.view(torch.int16)) & (self.rows < self.tokens)
            self.note(wrong.sum() + (got != counts).sum())
        self.step += 1

    def note(self, wrong: torch.Tensor) -> None:
        first = (self.first_wrong < 0) & (wrong > 0)
        self.first_wrong.copy_(torch.where(first, self.step, self.first_wrong))
        self.wrong += wrong

    def operation(self, padded: tuple[torch.Tensor, torch.Tensor | None], out: torch.Tensor) -> torch.Tensor:
        """Poisons the outputs, runs one pair, returns the counts."""
        padded[0].view(torch.uint8).fill_(0x7F)
        if padded[1] is not None:
            padded[1].fill_(torch.nan)
        out.fill_(torch.nan)
        given = (self.x, self.ids, self.weights)
        if self.fused:
            received = self.exchange.dispatch(*given, View.PADDED, out=padded, tokens_on_device=self.tokens)
            self.exchange.combine(answer(received, self.factors), received, out=out)
        else:
            pending = self.exchange.dispatch_send(*given, tokens_on_device=self.tokens)
            received = pending.recv(View.PADDED, out=padded)
            self.exchange.combine_send(answer(received, self.factors), received).recv(out)
        return received.counts


def graph_replays(group: dist.ProcessGroup, replays: int) -> None:
    """Poisoned replays of a graph, each with another routing and token count, bit for bit."""
    for payload, fused in ((Payload.FP8, True), (Payload.BF16, False)):
        exchange = open_exchange(group, a_models_spec(group.rank(), group.size(), payload))
        cases = Cases(exchange.spec, 4 * len(ROUTINGS))
        program = Replayed(exchange, cases, fused=fused)
        for _ in range(replays):
            program.graph.replay()
        exchange.synchronize()
        assert int(program.step) == replays + 1
        if int(program.wrong):
            step = int(program.first_wrong)
            what = f"{payload}, fused {fused}: {int(program.wrong)} elements or counts differ"
            raise AssertionError(f"{what}, first in replay {step} ({cases.names[step % len(cases.names)]})")
        run_pair(OnGpu(exchange, fused=fused), "zipf", 3, View.PADDED)
        close_exchange(exchange)


def side_by_side(group: dist.ProcessGroup) -> None:
    """DeepSeek's sizes with DeepEP's outputs: rows, scales, ranges and sums are those of the oracle."""
    share = tuple(e * group.size() // 256 for e in range(256))
    spec = ExchangeSpec(group.rank(), group.size(), share, 16, 7168, 8, Payload.FP8, num_banks=2)
    exchange = open_exchange(group, spec)
    inputs = make_inputs(spec, "max_tokens", 5)
    wanted, mine = expect(spec, inputs), inputs[spec.rank]
    given = torch.full((len(spec.local_experts),), -1, dtype=torch.int32, device="cuda")
    source_map = exchange.shapes.source_map()
    received = exchange.dispatch(*on_gpu(mine), View.PADDED, counts=given, source_map=source_map)
    assert received.counts is given
    exchange.synchronize()
    counts = given.tolist()
    places = [(e, i) for e, count in enumerate(counts) for i in range(count)]
    assert [(e, *_source(source_map, e, i)) for e, i in places] == wanted.entries
    rows = torch.stack([received.rows[e, i] for e, i in places]).cpu()
    scales = torch.stack([received.scales[e, i] for e, i in places]).cpu()
    assert_equal(rows, wanted.rows, "rows")
    assert_equal(scales, wanted.scales, "scales")
    values = dequantise(received.rows, received.scales)
    answers = torch.stack([expert(values[i], e, torch.bfloat16) for i, e in enumerate(spec.local_experts)])
    assert_equal(exchange.combine(answers, received).cpu(), wanted.combined, "combined")
    statistics = exchange.statistics()
    assert statistics["counters"]["exchange_tokens"] == spec.max_tokens
    assert sum(statistics["expert_tokens"].values()) == sum(counts)
    sources = {(s, t) for _, s, t in wanted.entries}
    assert statistics["counters"]["exchange_rows"] == len(sources)
    close_exchange(exchange)


def _source(source_map: tuple[torch.Tensor, torch.Tensor], e: int, i: int) -> tuple[int, int]:
    for source, packed in enumerate(source_map[1][e].tolist()):
        begin, count = packed >> 32, packed & 0xFFFFFFFF
        if begin <= i < begin + count:
            return source, int(source_map[0][e, i])
    raise AssertionError(f"row {i} of expert {e} lies in no range")


def measurements(group: dist.ProcessGroup) -> None:
    """Rows per expert and waits per peer add up in the caller's tensors, operations in histograms."""
    exchange = open_exchange(group, a_models_spec(group.rank(), group.size(), Payload.FP8, tokens=8))
    spec, operations, last, late_ns = exchange.spec, 3, group.size() - 1, 1_000_000_000
    ops = ("dispatch", "combine")
    exchange.set_faults(
        [Fault(last, op, "send_header", Action.DELAY, epoch=operations, delay_ns=late_ns) for op in ops]
    )
    mine = make_inputs(spec, "zipf", 4)[spec.rank]
    rows = torch.full((len(spec.local_experts),), 100, dtype=torch.int32, device="cuda")
    waits = torch.zeros(2, spec.num_ranks, dtype=torch.int64, device="cuda")
    for _ in range(operations):
        pending = exchange.dispatch_send(*on_gpu(mine))
        received = pending.recv(View.PADDED, expert_stats=rows, wait_stats=waits[0])
        exchange.combine_send(run_experts(spec, received), received).recv(wait_stats=waits[1])
        exchange.synchronize()
    assert_equal(rows, 100 + operations * received.counts, "expert_stats")
    found = exchange.statistics()
    for op, waited in zip(ops, waits.tolist(), strict=True):
        kept = [found["peer_wait_ns"][op, peer] for peer in range(spec.num_ranks)]
        for peer, ns in enumerate(waited):  # the exchange counts waits for rows too
            assert 0 <= ns <= kept[peer], f"{op}: wait_stats {waited}, the exchange's own {kept}"
        assert spec.rank == last or waited[last] > late_ns // 2, (
            f"{op}: wait_stats {waited}, rank {last} was late"
        )
        most = [found["peer_wait_max_ns"][op, peer] for peer in range(spec.num_ranks)]
        assert all(
            one <= all_of_them <= operations * one for one, all_of_them in zip(most, kept, strict=True)
        )
        for part in ("send", "wait", "expand" if op == "dispatch" else "reduce"):
            assert sum(found["histograms"][f"{op}/{part}"]) == operations, (op, part)
        long = sum(found["histograms"][f"{op}/wait"][(late_ns // 2).bit_length() - 1 :])
        assert spec.rank == last or long >= 1, f"{op}: no wait was as long as rank {last} was late"
    for name, counts in found["histograms"].items():  # bucket b: from 2^b to 2^(b+1) ns, the first from 0
        least = sum(count << b for b, count in enumerate(counts) if b)
        most_ns = sum(count << b + 1 for b, count in enumerate(counts))
        assert least <= found["sums"][name] <= most_ns, f"{name}: {counts}, together {found['sums'][name]} ns"
    close_exchange(exchange)


def refused(group: dist.ProcessGroup) -> None:
    """Sizes that the format or the GPU cannot carry name their field; R * T = 6 columns are padded."""
    good = ExchangeSpec(group.rank(), group.size(), (0,) * 3, 6, 640, 2, Payload.FP8, num_banks=2)
    exchange = open_exchange(group, good)
    rows, scales = exchange.empty_padded()
    assert scales is not None
    assert scales.stride(2) % 4 == 0
    assert rows.shape[1] == group.size() * 6
    close_exchange(exchange)
    for field, value in (("hidden", 640), ("payload", Payload.FP32), ("num_sms", 1000), ("num_sms", -1)):
        spec, options = good, {}
        if field == "hidden":
            spec = replace(good, payload=Payload.FP8_UE8M0)
        elif field == "payload":
            spec = replace(good, payload=value)
        else:
            options = {field: value}
        with pytest.raises(ConfigError) as caught:
            open_exchange(group, spec, **options)
        assert caught.value.field == field
        dist.barrier(group)

"""What ranks on GPUs run in tests: functions of a process group, one GPU per rank."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ep_server.ep import cuda_memory
from ep_server.ep.cuda import CudaExchange
from ep_server.ep.exchange import Exchange, ExchangeSpec, Payload, View
from ep_server.ep.quant import dequantise
from ep_server.errors import ConfigError, GroupAborted, HookNotCalled, InvalidArgument, PeerTimeout
from tests.ep.conformance import Factory, run_cases
from tests.ep.on_gpu import OnGpu
from tests.ep.sequences import run_sequences
from tests.harness.compare import assert_equal
from tests.harness.expected import expect, expert
from tests.harness.routing import Inputs, make_inputs


def _factory(*, fused: bool) -> Factory:
    def make(spec: ExchangeSpec, group: dist.ProcessGroup) -> Exchange:
        torch.cuda.set_device(spec.rank)
        exchange = cuda_memory.from_process_group(group, spec, validate=not fused)
        return OnGpu(exchange, fused=fused)

    return make


def conformance(group: dist.ProcessGroup) -> dict[str, str]:
    """The whole suite on halves apart; every case again with both halves in one kernel."""
    fused = run_cases(group, _factory(fused=True), instead_of_fp32=Payload.BF16)
    apart = _factory(fused=False)
    return (
        {f"fused-{name}": text for name, text in fused.items()}
        | run_cases(group, apart, instead_of_fp32=Payload.BF16)
        | run_sequences(group, apart, payload=Payload.BF16)
    )


def a_models_spec(group: dist.ProcessGroup, payload: Payload, tokens: int = 32) -> ExchangeSpec:
    share = tuple(e * group.size() // 64 for e in range(64))
    return ExchangeSpec(group.rank(), group.size(), share, tokens, 2048, 8, payload, num_banks=2)


class Replayed:
    """An odd number of operations in one graph, whose inputs change between replays."""

    OPERATIONS = 3

    def __init__(self, exchange: CudaExchange, *, fused: bool) -> None:
        spec = self.spec = exchange.spec
        device = exchange.device
        self.exchange, self.fused = exchange, fused
        self.x = torch.zeros(spec.max_tokens, spec.hidden, dtype=torch.bfloat16, device=device)
        self.ids = torch.full((spec.max_tokens, spec.top_k), -1, dtype=torch.int64, device=device)
        self.weights = torch.zeros(spec.max_tokens, spec.top_k, device=device)
        self.tokens = torch.zeros(1, dtype=torch.int32, device=device)
        self.factors = torch.tensor(
            [(1.0 + e / 16) * (-1 if e % 2 else 1) for e in spec.local_experts], device=device
        ).view(-1, 1, 1)
        self.padded = [exchange.empty_padded() for _ in range(self.OPERATIONS)]
        self.out = [torch.empty_like(self.x) for _ in range(self.OPERATIONS)]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for padded, out in zip(self.padded, self.out, strict=True):
                self.operation(padded, out)

    def operation(self, padded: tuple[torch.Tensor, torch.Tensor | None], out: torch.Tensor) -> None:
        given = (self.x, self.ids, self.weights)
        if self.fused:
            received = self.exchange.dispatch(*given, View.PADDED, out=padded, tokens_on_device=self.tokens)
        else:
            pending = self.exchange.dispatch_send(*given, tokens_on_device=self.tokens)
            received = pending.recv(View.PADDED, out=padded)
        rows = (
            received.rows.float() if received.scales is None else dequantise(received.rows, received.scales)
        )
        answers = (rows * self.factors).to(torch.bfloat16)
        if self.fused:
            self.exchange.combine(answers, received, out=out)
        else:
            self.exchange.combine_send(answers, received).recv(out)

    def replay(self, mine: Inputs) -> None:
        count = len(mine.x)
        for tensor in (self.x, self.weights, *self.out):
            tensor.fill_(torch.nan)
        for rows, scales in self.padded:
            rows.view(torch.uint8).fill_(0x7F)
            if scales is not None:
                scales.fill_(torch.nan)
        self.ids.fill_(0)
        self.x[:count], self.ids[:count], self.weights[:count] = (
            mine.x.cuda(),
            mine.ids.cuda(),
            mine.weights.cuda(),
        )
        self.tokens.fill_(count)
        self.graph.replay()


ROUTINGS = ("uniform", "zipf", "nobody", "all_to_one", "empty_rank", "max_tokens", "dropped")


def graph_replays(group: dist.ProcessGroup, replays: int) -> None:
    """Poisoned replays of a graph with another routing and token count each time, bit for bit."""
    torch.cuda.set_device(group.rank())
    kinds = [(Payload.FP8, True), (Payload.BF16, False)]
    for payload, fused in kinds:
        spec = a_models_spec(group, payload)
        exchange = cuda_memory.from_process_group(group, spec)
        program = Replayed(exchange, fused=fused)
        cases = []
        for seed in range(14):
            inputs = make_inputs(spec, ROUTINGS[seed % len(ROUTINGS)], seed)
            cases.append((inputs[spec.rank], expect(spec, inputs).combined.cuda()))
        wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        for step in range(replays // len(kinds)):
            mine, combined = cases[step % len(cases)]
            program.replay(mine)
            for out in program.out:
                wrong += (out[: len(mine.x)].view(torch.int16) != combined.view(torch.int16)).sum()
        exchange.synchronize()
        assert int(wrong) == 0, f"{int(wrong)} elements differ with {payload}"
        exchange.barrier()
        exchange.close()


def side_by_side(group: dist.ProcessGroup) -> None:
    """DeepSeek's sizes with DeepEP's outputs: rows, scales, ranges and sums are those of the oracle."""
    torch.cuda.set_device(group.rank())
    share = tuple(e * group.size() // 256 for e in range(256))
    spec = ExchangeSpec(group.rank(), group.size(), share, 16, 7168, 8, Payload.FP8, num_banks=2)
    exchange = cuda_memory.from_process_group(group, spec)
    inputs = make_inputs(spec, "max_tokens", 5)
    wanted, mine = expect(spec, inputs), inputs[spec.rank]
    received = exchange.dispatch(
        mine.x.cuda(), mine.ids.cuda(), mine.weights.cuda(), View.PADDED, source_map=True
    )
    exchange.synchronize()
    handle = received.handle
    counts = received.counts.tolist()
    places = [(e, i) for e, count in enumerate(counts) for i in range(count)]
    assert [(e, *_source(handle, e, i)) for e, i in places] == wanted.entries
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
    exchange.barrier()
    exchange.close()


def _source(handle: object, e: int, i: int) -> tuple[int, int]:
    for source, packed in enumerate(handle.layout_range[e].tolist()):
        begin, count = packed >> 32, packed & 0xFFFFFFFF
        if begin <= i < begin + count:
            return source, int(handle.src_info[e, i])
    raise AssertionError(f"row {i} of expert {e} lies in no range")


def failures(group: dist.ProcessGroup) -> None:
    """A rank that does not come is named; the others go on after a reset, with and without it masked."""
    torch.cuda.set_device(group.rank())
    spec = replace(a_models_spec(group, Payload.BF16, tokens=4), timeout_ns=200_000_000)
    exchange = cuda_memory.from_process_group(group, spec)
    inputs = make_inputs(spec, "max_tokens", 1)
    mine, last = inputs[spec.rank], spec.num_ranks - 1
    given = (mine.x.cuda(), mine.ids.cuda(), mine.weights.cuda())
    if spec.rank != last:
        with pytest.raises((PeerTimeout, GroupAborted)) as caught:
            exchange.dispatch(*given)
            exchange.synchronize()
        if isinstance(caught.value, PeerTimeout):
            assert (caught.value.phase, caught.value.peer) == ("recv_header", last)
    exchange.barrier()
    exchange.reset()
    received = exchange.dispatch(*given)
    exchange.combine(torch.zeros_like(received.rows), received)
    exchange.synchronize()

    # Ids out of range are refused by the kernel and end the operation of all.
    if spec.rank == 0:
        bad = given[1].clone()
        bad[1, 2] = spec.num_experts
        with pytest.raises(InvalidArgument, match="topk_ids"):
            exchange.dispatch(given[0], bad, given[2])
            exchange.synchronize()
    exchange.barrier()
    exchange.reset()

    # A bank that comes round unread: at once where the host knows, by the kernel inside a graph.
    for _ in range(spec.num_banks):
        exchange.dispatch_send(*given)
    with pytest.raises(HookNotCalled):
        exchange.dispatch_send(*given)
    exchange.synchronize()
    exchange.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(spec.num_banks + 1):
            exchange.dispatch_send(*given)
    with pytest.raises((HookNotCalled, GroupAborted)):
        graph.replay()
        exchange.synchronize()
    exchange.barrier()
    exchange.reset()
    exchange.barrier()
    exchange.close()


def masking(group: dist.ProcessGroup) -> None:
    """The last rank stops taking part: the others mask it within the deadline and get their own sums."""
    torch.cuda.set_device(group.rank())
    spec = replace(a_models_spec(group, Payload.BF16, tokens=4), timeout_ns=200_000_000)
    exchange = cuda_memory.from_process_group(group, spec, on_timeout="mask")
    inputs = make_inputs(spec, "max_tokens", 1)
    mine, last = inputs[spec.rank], spec.num_ranks - 1
    given = (mine.x.cuda(), mine.ids.cuda(), mine.weights.cuda())
    if spec.rank != last:
        masked_ids = torch.where(mine.ids >= 64 - 64 // spec.num_ranks, -1, mine.ids)
        survivors = [replace(each, ids=masked_ids) if each is mine else each for each in inputs]
        wanted = expect(spec, survivors).combined
        for turn in range(5):
            began = time.monotonic()
            received = exchange.dispatch(*given)
            factors = [(1.0 + e / 16) * (-1 if e % 2 else 1) for e in spec.local_experts]
            scale = torch.tensor(factors, device="cuda").view(-1, 1, 1)
            out = exchange.combine((received.rows.float() * scale).to(torch.bfloat16), received)
            exchange.synchronize()
            assert_equal(out.cpu(), wanted, f"turn {turn}")
            assert turn == 0 or time.monotonic() - began < 5.0
        assert exchange.masked == {last}
    exchange.barrier()
    exchange.reset()
    assert exchange.masked == frozenset()
    received = exchange.dispatch(*given)
    exchange.combine(torch.zeros_like(received.rows), received)
    exchange.synchronize()
    exchange.barrier()
    exchange.close()


def refused(group: dist.ProcessGroup) -> None:
    """Sizes that the format or the GPU cannot carry name their field."""
    torch.cuda.set_device(group.rank())
    good = ExchangeSpec(group.rank(), group.size(), (0,) * 3, 6, 640, 2, Payload.FP8, num_banks=2)
    exchange = cuda_memory.from_process_group(group, good)  # R * T = 6 where R = 1: columns are padded
    rows, scales = exchange.empty_padded()
    assert scales is not None
    assert scales.stride(2) % 4 == 0
    assert rows.shape[1] == group.size() * 6
    exchange.barrier()
    exchange.close()
    for field, value in (("hidden", 640), ("payload", Payload.FP32)):
        spec = replace(good, payload=Payload.FP8_UE8M0 if field == "hidden" else value)
        with pytest.raises(ConfigError) as caught:
            cuda_memory.from_process_group(group, spec)
        assert caught.value.field == field

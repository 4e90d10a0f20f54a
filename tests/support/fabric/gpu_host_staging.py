"""Programs of ranks whose tensors are on a GPU, one for all, and whose rows travel over the loopback.

Calls are made behind kernels that take long, so that work that does not wait for the caller's stream reads
or writes too early. Arguments are overwritten as soon as a send has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ep_server.errors import InvalidArgument
from ep_server.exchange.api import ExchangeSpec, Payload, PendingCombine, PendingDispatch, Received, View
from ep_server.exchange.fabric.device import FabricDeviceExchange
from ep_server.exchange.fabric.link import FabricLink
from ep_server.exchange.fabric.settings import FabricOptions
from ep_server.exchange.hierarchical.exchange import HierarchicalExchange
from ep_server.exchange.quant import dequantise
from tests.support.compare import assert_equal
from tests.support.exchange.conformance import run_cases
from tests.support.exchange.expected import expect
from tests.support.exchange.routing import make_inputs
from tests.support.exchange.sequences import run_sequences
from tests.support.fabric.fabric_ends import connected, through_group

LONG = 200_000  # clock cycles, about 0.1 ms
SHARED = "cuda:0"


def late(tensor: torch.Tensor) -> torch.Tensor:
    """The same values and strides on the current GPU, there only after a long kernel of its stream."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
    ready = tensor.to("cuda")
    torch.cuda._sleep(LONG)
    return made.copy_(ready)


def poison(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.fill_(torch.nan if tensor.dtype.is_floating_point else -1)


def to_cpu(received: Received) -> Received:
    """Waits for the current stream alone. Scales keep their strides."""
    scales = received.scales
    if scales is not None:
        padded = received.view is View.PADDED
        scales = scales.transpose(1, 2).cpu().transpose(1, 2) if padded else scales.cpu()
    ids = None if received.row_ids is None else received.row_ids.cpu()
    moved = (received.rows.cpu(), received.counts.cpu(), received.offsets.cpu())
    return Received(*moved, received, received.view, scales, ids)


class Dispatch:
    def __init__(self, pending: PendingDispatch, stream: torch.cuda.Stream) -> None:
        self.pending, self.stream = pending, stream

    def recv(self, view: View = View.COMPACT) -> Received:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(LONG)
            return to_cpu(self.pending.recv(view))


class Combine:
    def __init__(self, pending: PendingCombine, stream: torch.cuda.Stream) -> None:
        self.pending, self.stream = pending, stream

    def recv(self, out: torch.Tensor | None = None) -> torch.Tensor:
        with torch.cuda.stream(self.stream):
            given = None if out is None else late(out)  # poison, which must not come after the result
            result = self.pending.recv(given)
            assert given is None or result is given
            return result.cpu() if out is None else out.copy_(result)


class OnGpu:
    """The Protocol on CPU tensors over an exchange on tensors of the current GPU."""

    def __init__(self, exchange: FabricDeviceExchange | HierarchicalExchange) -> None:
        self.exchange, self.spec, self.stream = exchange, exchange.spec, torch.cuda.Stream()
        self.intra_ranks = getattr(exchange, "intra_ranks", ())
        self.all_gather, self.barrier, self.close = exchange.all_gather, exchange.barrier, exchange.close

    def dispatch_send(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> Dispatch:
        with torch.cuda.stream(self.stream):
            given = (late(x), late(topk_ids), None if topk_weights is None else late(topk_weights))
            pending = self.exchange.dispatch_send(*given)
            poison(*given)
        return Dispatch(pending, self.stream)

    def combine_send(
        self, expert_out: torch.Tensor, received: Received, topk_weights: torch.Tensor | None = None
    ) -> Combine:
        original = received.handle
        assert isinstance(original, Received)
        with torch.cuda.stream(self.stream):
            given = (late(expert_out), None if topk_weights is None else late(topk_weights))
            pending = self.exchange.combine_send(given[0], original, given[1])
            poison(*given)
        return Combine(pending, self.stream)


def make(options: FabricOptions, spec: ExchangeSpec, group: dist.ProcessGroup) -> FabricDeviceExchange:
    torch.cuda.set_device(SHARED)
    inner = connected(FabricLink(spec, options), through_group(group))
    return FabricDeviceExchange(inner, SHARED)


def whole_suite(group: dist.ProcessGroup, options: FabricOptions) -> dict[str, str]:
    def factory(spec: ExchangeSpec, group: dist.ProcessGroup) -> OnGpu:
        return OnGpu(make(options, spec, group))

    return run_cases(group, factory) | run_sequences(group, factory)


def a_models_spec(group: dist.ProcessGroup, payload: Payload) -> ExchangeSpec:
    share = tuple(e * group.size() // 64 for e in range(64))
    return ExchangeSpec(group.rank(), group.size(), share, 32, 2048, 8, payload, num_banks=2)


def in_flight(group: dist.ProcessGroup, options: FabricOptions) -> None:
    """At a model's sizes, many chunks and both banks."""
    run_in_flight(group, partial(make, options))


def run_in_flight(
    group: dist.ProcessGroup, make: Callable[..., FabricDeviceExchange | HierarchicalExchange]
) -> None:
    """Two operations at a time; results are looked at only when all is over."""
    for payload in (Payload.BF16, Payload.FP8):
        exchange = make(a_models_spec(group, payload), group)
        intra = getattr(exchange, "intra_ranks", ())
        spec, sums, seeds = exchange.spec, [], range(12)
        for first in seeds[::2]:
            pending = [exchange.dispatch_send(*inputs(spec, seed)) for seed in (first, first + 1)]
            received = [each.recv() for each in pending]
            answers = [experts(spec, each) for each in received]
            returning = list(map(exchange.combine_send, answers, received))
            sums += [each.recv() for each in reversed(returning)][::-1]
        torch.cuda.current_stream().synchronize()
        for seed, found in zip(seeds, sums, strict=True):
            wanted = expect(spec, make_inputs(spec, "max_tokens", seed), intra).combined
            assert_equal(found.cpu(), wanted, f"{payload} seed {seed}")
        exchange.barrier()
        exchange.close()


def inputs(spec: ExchangeSpec, seed: int) -> tuple[torch.Tensor, ...]:
    mine = make_inputs(spec, "max_tokens", seed)[spec.rank]
    return late(mine.x), late(mine.ids), late(mine.weights)


def experts(spec: ExchangeSpec, received: Received) -> torch.Tensor:
    """What tests.support.exchange.expected.expert computes, for a COMPACT view."""
    rows = received.rows.float() if received.scales is None else dequantise(received.rows, received.scales)
    factors = [(1.0 + e / 16) * (-1 if e % 2 else 1) for e in spec.local_experts]
    each = torch.tensor(factors, device="cuda").repeat_interleave(received.counts.long())
    torch.cuda._sleep(LONG)
    return (rows * each[:, None]).to(torch.bfloat16)


def refused(group: dist.ProcessGroup, options: FabricOptions) -> None:
    """Tensors of another device are named, and so is a stream that is being captured."""
    run_refused(make(options, a_models_spec(group, Payload.BF16), group))


def run_refused(exchange: FabricDeviceExchange | HierarchicalExchange) -> None:
    """Closes it, too."""
    mine = make_inputs(exchange.spec, "uniform", 1)[exchange.spec.rank]
    with pytest.raises(InvalidArgument, match=r"x .* on cpu.* on cuda"):
        exchange.dispatch_send(mine.x, mine.ids, mine.weights)
    given = (mine.x.cuda(), mine.ids.cuda(), mine.weights.cuda())
    with pytest.raises(InvalidArgument, match=r"topk_ids .* on cpu.* on cuda"):
        exchange.dispatch_send(given[0], mine.ids, given[2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(InvalidArgument, match="graph"):
        exchange.dispatch_send(*given)
    received = exchange.dispatch_send(*given).recv()
    exchange.combine_send(received.rows, received).recv()
    exchange.barrier()
    exchange.close()
